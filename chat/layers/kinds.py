"""The kinds of cache that a person can choose from: what each is made of, and whether it can be had here.

Everything here is cheap and changes nothing; a backend's library is only imported by `codec_for`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType
from typing import get_args

from chat.errors import KindUnavailable
from chat.layers.affine import AffineCodec, Fit, between_extremes, least_error
from chat.layers.backends import hqq_fit, quanto_fit
from chat.layers.fp8 import Fp8Codec
from chat.layers.packed import RowCodec
from chat.settings import CacheKind, CacheSettings

CACHE_FIELD = "cache"
"""The part of a fingerprint that tells the kind of cache."""

_LITTLE_WORDS = frozenset({"The", "It", "Room"})

INSTALL_BACKENDS = ".venv/bin/python -m pip install -r requirements-quant.txt"


@dataclass(frozen=True, slots=True)
class Backend:
    """A library that quantizes: how it is imported, and what pip calls it."""

    module: str
    package: str


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a quantized kind is made of. A `backend` fits the scales instead of `fit`, in chunks of rows."""

    bits: int
    fit: Fit = between_extremes
    rotated: bool = False
    backend: Backend | None = None


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a kind can be had: when not, the `reason`, and the command that changes it if there is one."""

    reason: str = ""
    install: str = ""

    @property
    def is_available(self) -> bool:
        """No reason speaks against it."""
        return not self.reason

    @property
    def because(self) -> str:
        """The reason as the end of a sentence: names keep their capital."""
        first, _, rest = self.reason.rstrip(".").partition(" ")
        return f"{first.lower() if first in _LITTLE_WORDS else first} {rest}"


HQQ = Backend("hqq", "hqq")
QUANTO = Backend("optimum.quanto", "optimum-quanto")

QUANTIZATIONS: Mapping[CacheKind, Quantization] = {
    "native8": Quantization(8),
    "native4": Quantization(4, least_error, rotated=True),
    "hqq8": Quantization(8, backend=HQQ),
    "hqq4": Quantization(4, backend=HQQ),
    "hqq2": Quantization(2, backend=HQQ),
    "quanto4": Quantization(4, backend=QUANTO),
    "quanto2": Quantization(2, backend=QUANTO),
}
"""The kinds of whole numbers on a scale."""


@dataclass(frozen=True, slots=True)
class Dense:
    """A kind whose rows are as the model computed them: where they are kept, and in how much room."""

    is_offloaded: bool = False
    is_fixed: bool = False


DENSE: Mapping[CacheKind, Dense] = {
    "dynamic": Dense(),
    "offloaded": Dense(is_offloaded=True),
    "static": Dense(is_fixed=True),
    "offloaded_static": Dense(is_offloaded=True, is_fixed=True),
}
"""Their rows are alike byte for byte, so each of these kinds goes on with rows of any other."""

NEEDS_CUDA: Mapping[CacheKind, str] = {
    "offloaded": "It spares the memory of a CUDA device, and the model does not run on one here.",
    "static": "Room of a fixed size is of use on a CUDA device, and the model does not run on one here.",
    "offloaded_static": "It spares the memory of a CUDA device, and the model does not run on one here.",
}
"""Why these kinds cannot be had without."""


def is_exact(kind: CacheKind) -> bool:
    """Whether answers are those of the dense cache."""
    return kind in DENSE


def is_offloaded(kind: CacheKind) -> bool:
    """Whether rows are kept in the computer's memory, wherever the model runs."""
    return kind in DENSE and DENSE[kind].is_offloaded


def is_fixed(kind: CacheKind) -> bool:
    """Whether there is room for so many tokens from the first one on, and never for more."""
    return kind in DENSE and DENSE[kind].is_fixed


def available_kinds(device_type: str) -> dict[CacheKind, Availability]:
    """Every kind, best known first, and whether a model on `cpu`, `cuda` or `mps` can have it."""
    return {kind: availability(kind, device_type) for kind in get_args(CacheKind)}


def availability(kind: CacheKind, device_type: str) -> Availability:
    """See `available_kinds`."""
    if device_type != "cuda" and kind in NEEDS_CUDA:
        return Availability(NEEDS_CUDA[kind])
    if kind == "fp8" and device_type == "mps":
        return Availability("Apple's GPU has no eight-bit floating point.")
    quantization = QUANTIZATIONS.get(kind)
    backend = quantization.backend if quantization else None
    if backend is None or _is_installed(backend):
        return Availability()
    return Availability(f"The package {backend.package} is not installed.", INSTALL_BACKENDS)


def codec_for(settings: CacheSettings) -> RowCodec | None:
    """What packs the rows of this kind; None for the dense ones. Raises KindUnavailable."""
    quantization = QUANTIZATIONS.get(settings.kind)
    if quantization is None or quantization.backend is None:
        return sized_codec(settings)
    try:
        fit = hqq_fit() if quantization.backend is HQQ else quanto_fit()
    except Exception as error:  # a library that is there may still not load: built for another torch, say
        raise KindUnavailable(
            f"The cache kind {settings.kind} cannot be used because {quantization.backend.package} does not"
            f" load ({error}); your chats are kept, choose another kind or run `{INSTALL_BACKENDS}`."
        ) from error
    return _affine(settings, quantization, fit)


def sized_codec(settings: CacheSettings) -> RowCodec | None:
    """As `codec_for` as far as sizes go, without needing any library."""
    if settings.kind == "fp8":
        return Fp8Codec()
    quantization = QUANTIZATIONS.get(settings.kind)
    return _affine(settings, quantization, quantization.fit) if quantization else None


def num_tail_tokens(settings: CacheSettings) -> int:
    """How many tokens may wait in full precision to be packed."""
    quantization = QUANTIZATIONS.get(settings.kind)
    return settings.chunk_tokens if quantization is not None and quantization.backend is not None else 0


def cache_fingerprint(model_fields: Mapping[str, str], settings: CacheSettings) -> Mapping[str, str]:
    """What saved rows depend on: a model's own fingerprint, and the kind of cache."""
    return MappingProxyType({**model_fields, CACHE_FIELD: parameters(settings)})


@cache
def parameters(settings: CacheSettings) -> str:
    """The kind and everything that rows of it depend on, in words."""
    quantization = QUANTIZATIONS.get(settings.kind)
    if quantization is None:
        return rows_of(settings.kind)
    words = [settings.kind, f"groups of {settings.group_size}"]
    if quantization.rotated:
        words.append("rotated")
    if quantization.fit is least_error:
        words.append("least error")
    if quantization.backend is not None:
        words += [f"chunks of {settings.chunk_tokens}", _version(quantization.backend)]
    return ", ".join(words)


def rows_of(kind: str) -> str:
    """The kind whose rows are what those of `kind` are; kinds of other versions stand for themselves."""
    return "dynamic" if kind in DENSE else kind


def have_same_rows(one: CacheSettings, other: CacheSettings) -> bool:
    """Whether rows and states of one cache are what the other would hold, byte for byte."""
    return parameters(one) == parameters(other)


def _affine(settings: CacheSettings, quantization: Quantization, fit: Fit) -> AffineCodec:
    return AffineCodec(quantization.bits, settings.group_size, fit, rotated=quantization.rotated)


def _is_installed(backend: Backend) -> bool:
    try:
        return find_spec(backend.module) is not None
    except ModuleNotFoundError:  # the package around it is not there either
        return False


def _version(backend: Backend) -> str:
    try:
        return f"{backend.package} {version(backend.package)}"
    except PackageNotFoundError:
        return backend.package

"""The first bytes of a segment's file: which tensors it holds, and where.

A safetensors file is eight bytes with the length of the header (little-endian), the header (JSON, padded
with spaces to a multiple of eight), then the tensors' bytes without a gap. Nothing in a header is believed:
`parse_header` answers only when names, types, shapes and places fit together and fill the file exactly.
It allocates nothing in proportion to what a header claims.

Tensors named `state.…` belong to the end of the segment and may have any shape; every other tensor holds
one row per token, `[kv_heads, num_tokens, width]`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, cast

import torch

STATE_PREFIX = "state."

LENGTH_BYTES = 8
ALIGNMENT = 8
MAX_HEADER_BYTES = 1 << 20
MAX_DIMENSIONS = 8

DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""The format's name of a type → ours. A file with any other type is not one of ours."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_NAME = re.compile(r"[A-Za-z0-9_.]{1,200}")
_FIELDS = {"dtype", "shape", "data_offsets"}
_PLACE = itemgetter(0)
_METADATA = {"format": "pt", "keepwarm": "kv segment 1"}


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What is needed to tell later whether a file is still the one that was written."""

    nbytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_state(self) -> bool:
        """Does it belong to the segment's end, instead of holding a row per token?"""
        return self.name.startswith(STATE_PREFIX)

    def with_rows(self, num_rows: int) -> TensorInfo:
        """The same tensor with another number of tokens."""
        heads, _, width = self.shape
        return TensorInfo(self.name, self.dtype, (heads, num_rows, width))


def info_of(name: str, tensor: torch.Tensor) -> TensorInfo:
    """Raises ValueError when such a tensor cannot be in a segment's file."""
    info = TensorInfo(name, tensor.dtype, tuple(tensor.shape))
    if not _NAME.fullmatch(name):
        raise ValueError(f"not a name for a stored tensor: {name!r}")
    if info.dtype not in _CODES:
        raise ValueError(f"{name} has a type that is not stored: {info.dtype}")
    if len(info.shape) > MAX_DIMENSIONS or not (info.is_state or len(info.shape) == 3):
        raise ValueError(f"{name} must be [kv_heads, num_tokens, width], not {info.shape}")
    return info


def in_file_order(infos: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Widest types first, so that every tensor is aligned; otherwise as given: layer after layer."""
    return sorted(infos, key=lambda info: -info.dtype.itemsize)


def render_header(infos: Iterable[TensorInfo]) -> bytes:
    """The header, its length included, for tensors that follow it in this order."""
    entries: dict[str, Any] = {"__metadata__": _METADATA}
    place = 0
    for info in infos:
        entries[info.name] = {
            "dtype": _CODES[info.dtype],
            "shape": info.shape,
            "data_offsets": (place, place + info.nbytes),
        }
        place += info.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError("too many tensors for one file")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def parse_length(length: bytes, num_file_bytes: int) -> int:
    """How many bytes of header follow. Raises ValueError when that cannot be."""
    num_header_bytes = int.from_bytes(length, "little")
    if not 0 < num_header_bytes <= min(MAX_HEADER_BYTES, num_file_bytes - LENGTH_BYTES):
        raise ValueError("its header has an impossible length")
    return num_header_bytes


def parse_header(text: bytes, num_data_bytes: int) -> tuple[TensorInfo, ...]:
    """The tensors that follow the header, in their order. Raises ValueError, saying what is wrong."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as exc:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ValueError("its header is not readable") from exc
    if not isinstance(entries, dict):
        raise ValueError("its header is not a table")
    tensors = cast("dict[str, Any]", entries)
    tensors.pop("__metadata__", None)
    placed = sorted((_parse_entry(name, entry) for name, entry in tensors.items()), key=_PLACE)
    place = 0
    for start, end, info in placed:
        if start != place or end - start != info.nbytes:
            raise ValueError("its tensors do not lie one after the other")
        place = end
    # A name that stands there twice leaves a gap, so it cannot get here.
    if place != num_data_bytes:
        raise ValueError("its tensors do not fill the file")
    return tuple(info for _, _, info in placed)


def _parse_entry(name: str, entry: object) -> tuple[int, int, TensorInfo]:
    """Where the tensor begins and ends, and what it is. Runs for every tensor of every file that is read."""
    if not isinstance(entry, dict) or entry.keys() != _FIELDS or not _NAME.fullmatch(name):
        raise ValueError("its header has an entry that is not a tensor")
    fields = cast("dict[str, Any]", entry)
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError("its header names an unknown type")
    if not (isinstance(shape, list) and isinstance(offsets, list)):
        raise ValueError("its header has something else where a list belongs")
    numbers = cast("list[int]", shape + offsets)
    if set(map(type, numbers)) != {int} or min(numbers) < 0:
        raise ValueError("its header has an impossible number")
    num_dimensions = len(numbers) - 2
    is_state = name.startswith(STATE_PREFIX)
    if len(cast("list[int]", offsets)) != 2:
        raise ValueError("its header has an impossible place")
    if num_dimensions > MAX_DIMENSIONS or not (is_state or num_dimensions == 3):
        raise ValueError("its header has an impossible shape")
    start, end = numbers[num_dimensions:]
    return start, end, TensorInfo(name, DTYPES[dtype], tuple(numbers[:num_dimensions]))

"""The settings that shape a chat: frozen values, checked once when they are built, passed whole.

Counts are tokens, sizes are bytes, unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal, get_args

from cache_store.records import Json

DEFAULT_MODEL = "default"
"""The name under which the bundled small model is asked for."""

STATIC_TOKENS = 8192
"""What a cache of fixed size has room for, where nobody says otherwise."""

DeviceName = Literal["auto", "cpu", "cuda", "mps"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
WeightForm = Literal["full", "int8", "nf4"]
"""Weights as they were saved, or quantized to 8 or 4 bits while they are loaded."""
DeviceMap = Literal["single", "auto"]
"""The whole model on one device, or on as many, the disk included, as it needs."""
CacheKind = Literal[
    "dynamic",
    "native8",
    "native4",
    "fp8",
    "hqq8",
    "hqq4",
    "hqq2",
    "quanto4",
    "quanto2",
    "offloaded",
    "static",
    "offloaded_static",
]
"""How rows are kept: as they are, or quantized to so many bits by our own code or by an optional library; or
as they are, but in the computer's memory, or in room of a fixed size, or both."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model to load and how. `name`: `default`, a hub id, a folder, or a `.gguf` file.

    Raises ValueError, with a sentence in the words of the command line, for what cannot go together.
    """

    name: str = DEFAULT_MODEL
    device: DeviceName = "auto"
    dtype: DtypeName = "auto"
    offline: bool = False
    weights: WeightForm = "full"
    device_map: DeviceMap = "single"

    def __post_init__(self) -> None:
        if self.device_map == "auto" and self.device == "mps":
            raise ValueError(
                "--device-map auto cannot go with --device mps, whose memory is the machine's own; leave one"
                " of the two out."
            )
        if self.weights != "full":
            self._check_quantized()

    def _check_quantized(self) -> None:
        if self.name.lower().endswith(".gguf"):
            raise ValueError(
                f"--weights {self.weights} cannot go with a GGUF file, whose weights are quantized already;"
                " leave it out, or choose a model in full precision with --model."
            )
        if self.device == "mps":
            raise ValueError(
                f"--weights {self.weights} cannot go with --device mps, where bitsandbytes needs program code"
                " from the hub; choose --weights full or --device cpu."
            )
        if self.device == "cpu" and self.device_map == "auto":
            raise ValueError(
                f"--weights {self.weights} cannot go with --device-map auto on the CPU, because quantized"
                " weights cannot be left on the disk; leave one of the two out."
            )


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What live caches are made of, how they grow and how prompts are read.

    `growth_step`: a layer's buffer grows by at least this many tokens at a time.
    `prefill_chunk`: tokens per forward pass while reading; Stop is honoured between two chunks.
    `group_size`: elements that share a scale, at most, in quantized kinds.
    `chunk_tokens`: rows that an optional library quantizes at a time; until then they wait as they are.
    `static_tokens`: how many tokens a cache of fixed size has room for, where the model reads that many.
    """

    growth_step: int = 256
    prefill_chunk: int = 256
    kind: CacheKind = "dynamic"
    group_size: int = 64
    chunk_tokens: int = 64
    static_tokens: int = STATIC_TOKENS

    def __post_init__(self) -> None:
        if self.kind not in get_args(CacheKind):
            raise ValueError(f"there is no cache kind {self.kind!r}")
        for name in ("growth_step", "prefill_chunk", "group_size", "chunk_tokens", "static_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")


@dataclass(frozen=True, slots=True)
class Budgets:
    """Hard limits in bytes. `max_disk_bytes` is for the cache files only; text is never evicted."""

    max_live_bytes: int
    max_disk_bytes: int

    def __post_init__(self) -> None:
        if self.max_live_bytes < 0 or self.max_disk_bytes < 0:
            raise ValueError("budgets must not be negative")


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How the next token is chosen. Temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and
    repetition_penalty 1 switch the respective filter off. `seed` None draws a fresh one per reply,
    which is then stored with the reply."""

    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 50
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 1024
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            object.__setattr__(self, name, float(getattr(self, name)))  # JSON does not keep 1.0 apart from 1
        limits = {
            "temperature": 0.0 <= self.temperature <= 5.0,
            "top_p": 0.0 < self.top_p <= 1.0,
            "top_k": self.top_k >= 0,
            "min_p": 0.0 <= self.min_p < 1.0,
            "repetition_penalty": 0.1 <= self.repetition_penalty <= 5.0,
            "max_new_tokens": self.max_new_tokens >= 1,
            "seed": self.seed is None or 0 <= self.seed < 2**63,
            "stop_strings": all(self.stop_strings),
        }
        for name, allowed in limits.items():
            if not allowed:
                raise ValueError(f"{name} is out of range: {getattr(self, name)!r}")

    def to_json(self) -> dict[str, Json]:
        """A plain dict for the store; `from_json` is its inverse."""
        return {**asdict(self), "stop_strings": list(self.stop_strings)}

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> SamplingSettings:
        """Build from stored JSON; fields that an older or newer version wrote are ignored.

        Raises ValueError or TypeError when a value is not one that the field accepts.
        """
        known = {f.name for f in fields(cls)}
        values: dict[str, object] = {name: value for name, value in data.items() if name in known}
        stops = values.get("stop_strings", [])
        if not isinstance(stops, (list, tuple)):
            raise TypeError("stop_strings must be a list of strings")
        values["stop_strings"] = tuple(str(stop) for stop in stops)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        return cls(**values)  # pyright: ignore[reportArgumentType]

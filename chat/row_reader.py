"""Rows from elsewhere → the layers of one cache, straight into the room where they will live.

Reading changes nothing that counts: rows lie behind what a cache holds until they are adopted. So several
files may be read at once, by a thread each, and whatever turns out to be damaged was never there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cache_store.errors import SegmentDamaged
from cache_store.file_header import TensorInfo
from chat.layer_state import has_state, put_back
from chat.layers.contract import RowLayer
from chat.placement import Placement

States = dict[int, dict[str, Tensor]]
"""The state of layers without rows, by layer and name."""


class RowSource(Protocol):
    """What rows and states are read from, in the order of `tensors`: a segment's file, or memory."""

    @property
    def tensors(self) -> Sequence[TensorInfo]:
        """`layers.{i}.{part}` are rows of a layer, `state.{i}.{name}` its state at their end."""
        ...

    def read_into(self, info: TensorInfo, destination: Tensor) -> None:
        """Read a tensor, or the first rows of it, into memory of the computer. Raises SegmentDamaged."""
        ...

    def skip(self, info: TensorInfo) -> None:
        """Go past a tensor. Raises SegmentDamaged."""
        ...

    def verify(self) -> None:
        """Raises SegmentDamaged when anything of what was read is not what was written."""
        ...


@dataclass(frozen=True, slots=True)
class RowReader:
    """See the module. `layers`: those of the cache, in order; `placement`: on which devices they are."""

    layers: Sequence[object]
    placement: Placement

    def make_room(self, tensors: Sequence[TensorInfo], num_tokens: int) -> None:
        """Make room in every layer that these have rows for, for `num_tokens` in all. Raises
        SegmentDamaged when they are of another kind."""
        like: dict[int, dict[str, Tensor]] = {}
        for info in tensors:
            family, number, name = _parsed(info)
            if family == "layers":
                device = self.placement.of_layer(number)
                like.setdefault(number, {})[name] = torch.empty(
                    info.with_rows(0).shape, dtype=info.dtype, device=device
                )
        for index, layer in enumerate(self.layers):
            if isinstance(layer, RowLayer) and index in like:
                if like[index].keys() != layer.part_names:
                    raise SegmentDamaged(f"its rows of layer {index} are of another kind")
                layer.prepare(like[index], num_tokens)

    @torch.inference_mode()
    def read(self, source: RowSource, start: int, end: int, *, with_state: bool) -> States:
        """Read a source whole, its first rows into the room of the tokens `[start, end)`, and verify it. The
        states are returned, or gone past. Raises SegmentDamaged; from any thread."""
        states: States = {}
        for info in source.tensors:
            family, number, name = _parsed(info)
            if family != "state":
                self._read_rows(source, info, self._room(number, start, end, info))
            elif with_state:
                target = states.setdefault(number, {})[name] = torch.empty(info.shape, dtype=info.dtype)
                source.read_into(info, target)
            else:
                source.skip(info)
        source.verify()
        return states

    def adopt(self, num_tokens: int, states: States | None) -> None:
        """Declare the first `num_tokens` rows valid. `states`: of layers that are fresh (None: they are
        still to come). Raises CacheMismatch when one is missing or does not fit; then no row counts."""
        for index, layer in enumerate(self.layers):
            if has_state(layer) and states is not None:
                device = self.placement.of_layer(index)
                state = {name: tensor.to(device) for name, tensor in states.get(index, {}).items()}
                put_back(layer, state, num_tokens)
        for layer in self.layers:
            if isinstance(layer, RowLayer) and layer.is_initialized:
                layer.adopt(num_tokens)

    def _room(self, number: int, start: int, end: int, info: TensorInfo) -> Tensor:
        layer = self.layers[number] if number < len(self.layers) else None
        place = None
        if isinstance(layer, RowLayer) and layer.is_initialized:
            place = layer.room(start, end).get(info.name.split(".", 2)[2])
        if place is None:
            raise SegmentDamaged(f"{info.name} has no layer to go to")
        return place

    def _read_rows(self, source: RowSource, info: TensorInfo, place: Tensor) -> None:
        if place.device.type == "cpu":
            source.read_into(info, place)
        else:
            staged = torch.empty(place.shape, dtype=place.dtype, pin_memory=place.device.type == "cuda")
            source.read_into(info, staged)
            place.copy_(staged, non_blocking=True)


def _parsed(info: TensorInfo) -> tuple[str, int, str]:
    family, number, name = info.name.split(".", 2)
    return family, int(number), name

"""Rows on their way from the computer's memory to the device that computes, one layer ahead of attention.

There are two places on the device, each with room for one layer's rows. While attention looks at one of them,
the rows of the next layer are copied into the other on a stream of their own. What was fetched ahead is only
a copy: a layer that was cropped meanwhile uses less of it, one that gained rows has them added, and whatever
is not wanted any more is forgotten.

On CUDA two streams work on the same memory, so each waits for the other where they meet: copying ahead begins
behind everything that was computed so far, which includes the last look at that place and the rows' way
back; and nothing computed from then on is done before the copy is there. Elsewhere there is one order anyway.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

from chat.layers.workspace import Workspace

SIDES = ("keys", "values")

Rows = dict[str, Tensor]
"""`keys` and `values`, `[kv_heads, n, width]` each."""


class StoredRows(Protocol):
    """A layer whose first `num_tokens` rows are to be seen on a device."""

    num_tokens: int

    def stored(self, start: int, end: int) -> Rows:
        """Rows in the computer's memory, for the device only: some may still be on their way from there."""
        ...


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Of the rows of a layer, the first `num_tokens` are in `place`, or will be once its copy is done."""

    layer: ref[StoredRows]
    place: Rows
    num_tokens: int

    def is_for(self, layer: StoredRows, num_tokens: int, device: torch.device) -> bool:
        """Whether that layer can use it for `num_tokens` rows in all."""
        keys = self.place["keys"]
        return self.layer() is layer and keys.device == device and keys.shape[1] >= num_tokens


class Prefetcher:
    """See the module. One for all caches of a model, because one thread feeds them, one after the other."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._number = 0
        self._ahead: _Ahead | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def on_device(self, layer: StoredRows, num_tokens: int, device: torch.device) -> Rows:
        """The rows of a layer on `device`, in a place with room for `num_tokens` in all; theirs until the
        layer after it asks for its own."""
        ahead, self._ahead = self._ahead, None
        self._wait_for_copies(device)
        if ahead is not None and ahead.is_for(layer, num_tokens, device):
            place = {side: each[:, :num_tokens] for side, each in ahead.place.items()}
            num_there = ahead.num_tokens
        else:
            place, num_there = self._next_place(layer, num_tokens, device), 0
        copy_rows(layer.stored(num_there, layer.num_tokens), place, num_there)
        return place

    def fetch_ahead(self, layer: StoredRows, num_new: int, device: torch.device) -> None:
        """Begin to copy the rows of the layer that comes next, to a place with room for so many more."""
        place = self._next_place(layer, layer.num_tokens + num_new, device)
        with self._beside(device, place):
            copy_rows(layer.stored(0, layer.num_tokens), place, 0)
        self._ahead = _Ahead(ref(layer), place, layer.num_tokens)

    def forget(self, layer: StoredRows, num_tokens: int) -> None:
        """The layer's rows from `num_tokens` on will be others: they must be fetched again."""
        ahead = self._ahead
        if ahead is not None and ahead.layer() is layer:
            self._ahead = replace(ahead, num_tokens=min(ahead.num_tokens, num_tokens))

    def _next_place(self, layer: StoredRows, num_tokens: int, device: torch.device) -> Rows:
        """The place that was not given out last, typed and shaped for a layer's rows."""
        self._number = 1 - self._number
        likes = {side: part[None].to(device) for side, part in layer.stored(0, 0).items()}
        return {
            side: self._workspace.take(f"{side} {self._number}", like, num_tokens)[0]
            for side, like in likes.items()
        }

    def _wait_for_copies(self, device: torch.device) -> None:
        if device in self._streams:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])

    @contextmanager
    def _beside(self, device: torch.device, place: Rows) -> Generator[None]:
        """What is done here runs beside what will be computed, on CUDA."""
        if device.type != "cuda":
            yield
            return
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield
        for each in place.values():  # not to be given to anybody else before the copy is done
            each.record_stream(stream)


def copy_rows(rows: Rows, target: Rows, start: int) -> None:
    """Copy rows into `target` from its row `start` on, between any devices; with CUDA nobody waits for it.
    Head by head: only memory in one piece is copied there without a detour."""
    for side in SIDES:
        source, place = rows[side], target[side]
        end, is_async = start + source.shape[1], source.is_cuda or place.is_cuda
        for head, head_rows in enumerate(source):
            place[head, start:end].copy_(head_rows, non_blocking=is_async)

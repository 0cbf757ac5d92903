"""Rows as they are, in the computer's memory: the device has those of two layers at a time.

Each pass brings a layer's rows to the device (see `prefetch`), attention looks at them there with the new
ones behind, and only the new ones are written back. Cropping, saving and restoring never touch the device.
The memory is pinned where the device is a CUDA one, so that copies run beside the computing.

New rows are still on their way back when `update` returns; whoever reads or moves the buffers waits first.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from chat.layers.contract import StateBesideRows
from chat.layers.growing import GrowingLayer
from chat.layers.prefetch import Prefetcher, copy_rows

HOST = torch.device("cpu")


class OffloadedLayer(GrowingLayer):
    """See the module. `device` is where attention runs, not where the rows are."""

    def __init__(self, growth_step: int, prefetcher: Prefetcher) -> None:
        super().__init__(growth_step)
        self._prefetcher = prefetcher
        self._next: ref[OffloadedLayer] | None = None
        self._written: torch.cuda.Event | None = None

    def come_before(self, layer: OffloadedLayer) -> None:
        """Fetch that layer's rows whenever this one's are there."""
        self._next = ref(layer)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append `[1, kv_heads, n, head_dim]` states; return all keys and values on their device, valid until
        the next layer is updated."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        device, start, num_new = key_states.device, self.num_tokens, key_states.shape[-2]
        end = start + num_new
        self.reserve(end)
        rows = self._prefetcher.on_device(self, end, device)
        rows["keys"][:, start:] = key_states[0]
        rows["values"][:, start:] = value_states[0]
        copy_rows({side: each[:, start:] for side, each in rows.items()}, self.stored(0, end), start)
        if device.type == "cuda":
            self._written = torch.cuda.Event()
            self._written.record(torch.cuda.current_stream(device))
        self._show(end)
        following = self._next() if self._next is not None else None
        if following is not None and following.num_tokens:
            assert following.device is not None
            self._prefetcher.fetch_ahead(following, num_new, following.device)
        return rows["keys"][None], rows["values"][None]

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Add the rows of new tokens, `[1, kv_heads, n, head_dim]` each, from wherever they are."""
        self.take_copies({"keys": key_states[0], "values": value_states[0]}, key_states.device)

    def reserve(self, num_tokens: int) -> None:
        """See the contract."""
        if self.capacity_for(num_tokens) > self.capacity:
            self._settle()
        super().reserve(num_tokens)

    def crop_to(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` rows. Raises ValueError when there are fewer."""
        super().crop_to(num_tokens)
        self._prefetcher.forget(self, num_tokens)

    def room(self, start: int, end: int) -> dict[str, Tensor]:
        """Views `[kv_heads, end - start, head_dim]` of the buffers, in the computer's memory."""
        self._settle()
        return super().room(start, end)

    def stored(self, start: int, end: int) -> dict[str, Tensor]:
        """As `room`, without waiting: for what the device does behind what it was told already."""
        return super().room(start, end)

    def reset(self) -> None:
        """Forget everything and free the buffers."""
        self._prefetcher.forget(self, 0)
        self.__init__(self.growth_step, self._prefetcher)

    def _new_buffer(self, like: Tensor, capacity: int) -> Tensor:
        shape = *like.shape[:2], capacity, like.shape[-1]
        return torch.empty(shape, dtype=like.dtype, device=HOST, pin_memory=like.device.type == "cuda")

    def _settle(self) -> None:
        """Wait until every row is back in the computer's memory. Several threads may: those that read files
        into the rows behind."""
        written = self._written
        if written is not None:
            written.synchronize()
            self._written = None


class OffloadedHybridLayer(StateBesideRows, OffloadedLayer):
    """Offloaded attention rows next to a recurrent state, which stays on the device."""

    def __init__(self, growth_step: int, prefetcher: Prefetcher, number_of_states: int) -> None:
        OffloadedLayer.__init__(self, growth_step, prefetcher)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)  # pyright: ignore[reportUnknownMemberType]

    def reset(self) -> None:
        """Forget everything and free the buffers."""
        self._prefetcher.forget(self, 0)
        self.__init__(self.growth_step, self._prefetcher, self.number_of_states)


def in_turn(layers: Sequence[object]) -> None:
    """Let each offloaded layer of a cache have the next one's rows fetched, and the last one the first's."""
    offloaded = [layer for layer in layers if isinstance(layer, OffloadedLayer)]
    for layer, following in zip(offloaded, [*offloaded[1:], *offloaded[:1]], strict=True):
        layer.come_before(following)

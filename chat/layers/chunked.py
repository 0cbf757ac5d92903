"""A packed layer that packs many rows at a time, for quantizers that are slow to call.

New rows wait as they are in a tail. When it is as long as a chunk, its whole chunks are packed and never
touched again. A crop into the tail shortens the tail; a crop into packed rows keeps the first of them as they
are packed, so the rows that stay are exactly what they were, and the tail begins anew behind them. Saving
packs the tail, so that what a restart brings back is what the live cache goes on with.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from chat.layers.contract import RowLayer, StateBesideRows
from chat.layers.packed import SIDES, PackedLayer, RowCodec
from chat.layers.workspace import Workspace


class ChunkedLayer(PackedLayer):
    """See the module. Invariant: `num_packed <= num_tokens < num_packed + chunk_tokens`."""

    def __init__(self, growth_step: int, codec: RowCodec, workspace: Workspace, chunk_tokens: int) -> None:
        super().__init__(growth_step, codec, workspace)
        self.num_packed = 0
        self._chunk_tokens = chunk_tokens
        self._tails: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes allocated for packed rows and for the tail."""
        return super().nbytes + sum(tail.nbytes for tail in self._tails.values())

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Add the rows of new tokens, `[1, kv_heads, n, head_dim]` each, and pack whole chunks."""
        self._make_tails(key_states, value_states)
        end = self.num_tokens + key_states.shape[-2]
        self.reserve(end)
        num_waiting = self.num_tokens - self.num_packed
        if end - self.num_packed >= self._chunk_tokens:
            key_states, value_states = self._waiting(key_states, value_states)
            num_new = key_states.shape[-2] // self._chunk_tokens * self._chunk_tokens
            self._pack(self.num_packed, key_states[:, :, :num_new], value_states[:, :, :num_new])
            key_states, value_states = key_states[:, :, num_new:], value_states[:, :, num_new:]
            self.num_packed, num_waiting = self.num_packed + num_new, 0
        for side, states in zip(SIDES, (key_states, value_states), strict=True):
            self._tails[side][:, :, num_waiting : num_waiting + states.shape[-2]] = states
        self.num_tokens = end

    def crop_to(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` rows. Raises ValueError when there are fewer."""
        super().crop_to(num_tokens)
        self.num_packed = min(self.num_packed, num_tokens)

    def rows_out(self, start: int) -> dict[str, Tensor]:
        """Views of the rows from `start` on, all of them packed from now on."""
        self._pack_tail()
        return super().rows_out(start)

    def prepare(self, like: Mapping[str, Tensor], num_tokens: int) -> None:
        """Make room for packed rows, behind which no tail may wait."""
        super().prepare(like, num_tokens)
        self._pack_tail()

    def adopt(self, num_tokens: int) -> None:
        """Declare the first `num_tokens` rows valid: they were filled through `room`."""
        super().adopt(num_tokens)
        self.num_packed = num_tokens

    def copy_from(self, source: RowLayer, num_tokens: int) -> None:
        """Take the first rows of another chunked layer, packed ones packed and waiting ones waiting."""
        assert isinstance(source, ChunkedLayer)
        super().copy_from(source, min(num_tokens, source.num_packed))
        num_waiting = num_tokens - source.num_packed
        if num_waiting > 0:
            self.append(*(source._tails[side][:, :, :num_waiting] for side in SIDES))

    def reset(self) -> None:
        """Forget everything and free the buffers."""
        ChunkedLayer.__init__(self, self.growth_step, self._codec, self._workspace, self._chunk_tokens)

    def _make_tails(self, key_states: Tensor, value_states: Tensor) -> None:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not self._tails:  # rows from the disk come without
            self._tails = {
                side: states.new_empty(1, states.shape[1], self._chunk_tokens, states.shape[-1])
                for side, states in zip(SIDES, (key_states, value_states), strict=True)
            }

    def _waiting(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """The tail with these states behind it."""
        num_waiting = self.num_tokens - self.num_packed
        keys, values = (self._tails[side][:, :, :num_waiting] for side in SIDES)
        return torch.cat((keys, key_states), -2), torch.cat((values, value_states), -2)

    def _pack_tail(self) -> None:
        num_waiting = self.num_tokens - self.num_packed
        if num_waiting:
            self._pack(self.num_packed, *(self._tails[side][:, :, :num_waiting] for side in SIDES))
            self.num_packed = self.num_tokens

    def _unpack_history(self, side: str, out: Tensor) -> None:
        self._unpack(side, out[:, : self.num_packed])
        num_waiting = self.num_tokens - self.num_packed
        if num_waiting:
            out[:, self.num_packed :] = self._tails[side][0, :, :num_waiting]


class ChunkedHybridLayer(StateBesideRows, ChunkedLayer):
    """Chunked attention rows next to a recurrent state, for models that run both in one layer."""

    def __init__(
        self,
        growth_step: int,
        codec: RowCodec,
        workspace: Workspace,
        chunk_tokens: int,
        number_of_states: int,
    ) -> None:
        ChunkedLayer.__init__(self, growth_step, codec, workspace, chunk_tokens)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)  # pyright: ignore[reportUnknownMemberType]

    def reset(self) -> None:
        """Forget everything and free the buffers."""
        self.__init__(
            self.growth_step, self._codec, self._workspace, self._chunk_tokens, self.number_of_states
        )

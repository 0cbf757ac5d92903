"""A layer whose rows are kept packed: quantized when they come, unpacked while attention looks at them.

A codec packs each row by itself, so packed rows are appended, cropped, copied, saved and split at any token
exactly like dense ones, and nothing is ever packed twice. A pass sees the rows that it adds itself in full
precision and all earlier ones unpacked.

Buffers are `[kv_heads, capacity, width]`, one for each part that the codec names, for keys and for values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from chat.layers.contract import RowLayer, StateBesideRows, grown
from chat.layers.workspace import Workspace

SIDES = ("keys", "values")


class RowCodec(Protocol):
    """How rows are packed. No row's packed form depends on another row, nor on how many come at once."""

    def parts(self, width: int) -> dict[str, tuple[torch.dtype, int]]:
        """Type and width of each part of a packed row of `width` elements."""
        ...

    def pack(self, rows: Tensor) -> dict[str, Tensor]:
        """The parts `[kv_heads, n, …]` of rows `[kv_heads, n, width]`."""
        ...

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor, workspace: Workspace) -> None:
        """Write the rows into `out`, `[kv_heads, n, width]`, of which each head's rows are contiguous."""
        ...


class PackedLayer(RowLayer):
    """See the module."""

    def __init__(self, growth_step: int, codec: RowCodec, workspace: Workspace) -> None:
        super().__init__(growth_step)
        self._codec = codec
        self._workspace = workspace
        self._parts: dict[str, Tensor] = {}
        self._num_wanted = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit before the next allocation."""
        return min((buffer.shape[1] for buffer in self._parts.values()), default=0)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """One for each part."""
        return tuple(self._parts.values())

    @property
    def part_names(self) -> frozenset[str]:
        """The codec's parts, for each side."""
        return frozenset(f"{side}.{part}" for side in SIDES for part in self._codec.parts(1))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Learn device and shapes from the first states `[1, kv_heads, n, head_dim]` and allocate."""
        like: dict[str, Tensor] = {}
        for side, states in zip(SIDES, (key_states, value_states), strict=True):
            heads, width = states.shape[1], states.shape[-1]
            for part, (dtype, part_width) in self._codec.parts(width).items():
                like[f"{side}.{part}"] = states.new_empty(heads, 0, part_width, dtype=dtype)
        self._allocate(like)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append `[1, kv_heads, n, head_dim]` states; return all keys and values in their precision, valid
        until the next layer is updated."""
        self.reserve(self.num_tokens + key_states.shape[-2])
        states = key_states, value_states
        if self.num_tokens:
            states = self._behind_history("keys", key_states), self._behind_history("values", value_states)
        self.append(key_states, value_states)
        return states

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Pack the rows of new tokens, `[1, kv_heads, n, head_dim]` each."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.num_tokens + key_states.shape[-2]
        self.reserve(end)
        self._pack(self.num_tokens, key_states, value_states)
        self.num_tokens = end

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` in all; before the first rows, remember to do so then."""
        self._num_wanted = max(self._num_wanted, num_tokens)
        capacity = self.capacity_for(num_tokens)
        for name, buffer in self._parts.items():
            if buffer.shape[1] < capacity:
                self._parts[name] = grown(buffer, capacity, self.num_tokens)

    def crop_to(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` rows. Raises ValueError when there are fewer."""
        self.check_crop(num_tokens)
        self.num_tokens = num_tokens

    def rows_out(self, start: int) -> dict[str, Tensor]:
        """Views of the packed rows from `start` on."""
        return self.room(start, self.num_tokens)

    def prepare(self, like: Mapping[str, Tensor], num_tokens: int) -> None:
        """Make room for `num_tokens` rows in all, shaped like these; see the contract."""
        if not self.is_initialized:
            self._allocate(like)
        self.reserve(num_tokens)

    def room(self, start: int, end: int) -> dict[str, Tensor]:
        """Views `[kv_heads, end - start, …]` of the buffers, also of room that holds nothing yet."""
        return {name: buffer[:, start:end] for name, buffer in self._parts.items()}

    def adopt(self, num_tokens: int) -> None:
        """Declare the first `num_tokens` rows valid: they were filled through `room`."""
        self.check_adoption(num_tokens)
        self.num_tokens = num_tokens

    def copy_from(self, source: RowLayer, num_tokens: int) -> None:
        """Take the first packed rows of another packed layer."""
        assert isinstance(source, PackedLayer)
        if num_tokens:
            self.take_copies(source.room(0, num_tokens), source.device)

    def reset(self) -> None:
        """Forget everything and free the buffers."""
        PackedLayer.__init__(self, self.growth_step, self._codec, self._workspace)

    def _allocate(self, like: Mapping[str, Tensor]) -> None:
        """Empty buffers for parts typed and shaped like these `[kv_heads, 0, width]`."""
        capacity = self.capacity_for(self._num_wanted)
        self._parts = {
            name: part.new_empty(len(part), capacity, part.shape[-1]) for name, part in like.items()
        }
        self.device = next(iter(like.values())).device
        self.is_initialized = True

    def _behind_history(self, side: str, states: Tensor) -> Tensor:
        """Everything held, unpacked, with `states` behind it."""
        everything = self._workspace.take(side, states, self.num_tokens + states.shape[-2])
        self._unpack_history(side, everything[0, :, : self.num_tokens])
        everything[:, :, self.num_tokens :] = states
        return everything

    def _unpack_history(self, side: str, out: Tensor) -> None:
        self._unpack(side, out)

    def _unpack(self, side: str, out: Tensor) -> None:
        """The first packed rows, as many as `out` `[kv_heads, n, head_dim]` has."""
        parts = {part: self._parts[f"{side}.{part}"][:, : out.shape[1]] for part in self._codec.parts(1)}
        self._codec.unpack(parts, out, self._workspace)

    def _pack(self, start: int, key_states: Tensor, value_states: Tensor) -> None:
        """Put these `[1, kv_heads, n, head_dim]` states packed into the buffers, from row `start` on."""
        if key_states.shape == value_states.shape:  # both at once: for one token the calls are what costs
            both = self._codec.pack(torch.cat((key_states[0], value_states[0])))
            split = {part: rows.chunk(2) for part, rows in both.items()}
        else:
            keys, values = self._codec.pack(key_states[0]), self._codec.pack(value_states[0])
            split = {part: (rows, values[part]) for part, rows in keys.items()}
        end = start + key_states.shape[-2]
        for part, rows_by_side in split.items():
            for side, rows in zip(SIDES, rows_by_side, strict=True):
                self._parts[f"{side}.{part}"][:, start:end] = rows


class PackedHybridLayer(StateBesideRows, PackedLayer):
    """Packed attention rows next to a recurrent state, for models that run both in one layer."""

    def __init__(
        self, growth_step: int, codec: RowCodec, workspace: Workspace, number_of_states: int
    ) -> None:
        PackedLayer.__init__(self, growth_step, codec, workspace)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)  # pyright: ignore[reportUnknownMemberType]

    def reset(self) -> None:
        """Forget everything and free the buffers."""
        self.__init__(self.growth_step, self._codec, self._workspace, self.number_of_states)

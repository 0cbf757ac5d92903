"""The default layer: full attention's keys and values as they are, in buffers that grow in steps.

There is one buffer per tensor, `[1, kv_heads, capacity, head_dim]`, of which the first `num_tokens` rows
count. Appending writes in place and cropping moves a number, where the stock layer copies everything it
holds for every new token. `keys` and `values` are always views of the valid rows, so whatever reads a stock
layer reads this one too.

Invariant: `keys.shape[-2] == values.shape[-2] == num_tokens <= capacity`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from chat.layers.contract import RowLayer, StateBesideRows, grown


class GrowingLayer(RowLayer):
    """See the module."""

    def __init__(self, growth_step: int) -> None:
        super().__init__(growth_step)
        self._num_wanted = 0
        self._key_buffer: Tensor | None = None
        self._value_buffer: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Tokens that fit before the next allocation."""
        return min((buffer.shape[-2] for buffer in self.buffers), default=0)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Keys and values; nothing before the first states."""
        if self._key_buffer is None or self._value_buffer is None:
            return ()
        return self._key_buffer, self._value_buffer

    @property
    def part_names(self) -> frozenset[str]:
        """Keys and values, as they are."""
        return frozenset({"keys", "values"})

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember dtype, device and head shapes from the first states `[1, kv_heads, n, head_dim]`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        capacity = self.capacity_for(self._num_wanted)
        self._key_buffer = self._new_buffer(key_states, capacity)
        self._value_buffer = self._new_buffer(value_states, capacity)
        self.is_initialized = True
        self._show(0)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append `[1, kv_heads, n, head_dim]` states; return views of all valid keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.num_tokens, self.num_tokens + key_states.shape[-2]
        self.reserve(end)
        assert self._key_buffer is not None
        assert self._value_buffer is not None
        self._key_buffer[:, :, start:end] = key_states
        self._value_buffer[:, :, start:end] = value_states
        self._show(end)
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """As `update`, which costs nothing more here."""
        self.update(key_states, value_states)

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` in all; before the first update, when there is no shape yet, remember
        to do so then."""
        self._num_wanted = max(self._num_wanted, num_tokens)
        capacity = self.capacity_for(num_tokens)
        if capacity <= self.capacity or self._key_buffer is None or self._value_buffer is None:
            return
        self._key_buffer = grown(self._key_buffer, capacity, self.num_tokens)
        self._value_buffer = grown(self._value_buffer, capacity, self.num_tokens)
        self._show(self.num_tokens)

    def crop_to(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` rows. Raises ValueError when there are fewer."""
        self.check_crop(num_tokens)
        if self.is_initialized:
            self._show(num_tokens)

    def rows_out(self, start: int) -> dict[str, Tensor]:
        """Views of the rows from `start` on."""
        return self.room(start, self.num_tokens) if self.is_initialized else {}

    def prepare(self, like: Mapping[str, Tensor], num_tokens: int) -> None:
        """Make room for `num_tokens` rows in all, shaped like these; see the contract."""
        if not self.is_initialized:
            self.lazy_initialization(like["keys"][None], like["values"][None])
        self.reserve(num_tokens)

    def room(self, start: int, end: int) -> dict[str, Tensor]:
        """Views `[kv_heads, end - start, head_dim]` of the buffers, also of room that holds nothing yet."""
        assert self._key_buffer is not None
        assert self._value_buffer is not None
        return {"keys": self._key_buffer[0, :, start:end], "values": self._value_buffer[0, :, start:end]}

    def adopt(self, num_tokens: int) -> None:
        """Declare the first `num_tokens` rows valid: they were filled through `room`."""
        self.check_adoption(num_tokens)
        self._show(num_tokens)

    def copy_from(self, source: RowLayer, num_tokens: int) -> None:
        """Take the first rows of another growing layer."""
        assert isinstance(source, GrowingLayer)
        if num_tokens:
            self.take_copies(source.room(0, num_tokens), source.device)

    def reset(self) -> None:
        """Forget everything and free the buffers."""
        self.__init__(self.growth_step)

    def _new_buffer(self, like: Tensor, capacity: int) -> Tensor:
        """Room for rows typed and shaped like the states `like`."""
        return like.new_empty(*like.shape[:2], capacity, like.shape[-1])

    def _show(self, num_tokens: int) -> None:
        assert self._key_buffer is not None
        assert self._value_buffer is not None
        self.num_tokens = num_tokens
        self.keys = self._key_buffer[:, :, :num_tokens]
        self.values = self._value_buffer[:, :, :num_tokens]


class GrowingHybridLayer(StateBesideRows, GrowingLayer):
    """Growing attention rows next to a recurrent state, for models that run both in one layer."""

    def __init__(self, growth_step: int, number_of_states: int) -> None:
        GrowingLayer.__init__(self, growth_step)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)  # pyright: ignore[reportUnknownMemberType]

    def reset(self) -> None:
        """Forget everything and free the buffers."""
        self.__init__(self.growth_step, self.number_of_states)

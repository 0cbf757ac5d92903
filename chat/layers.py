"""Our cache layers.

`GrowingLayer` holds full attention's keys and values in one buffer per tensor, `[1, kv_heads, capacity,
head_dim]`, of which the first `num_tokens` rows count. Appending writes in place and cropping moves a
number, where the stock layer copies everything it holds for every new token. `keys` and `values` are
always views of the valid rows, so whatever reads a stock layer reads this one too.

Invariant: `keys.shape[-2] == values.shape[-2] == num_tokens <= capacity`.
"""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer


class GrowingLayer(DynamicLayer):
    """A full-attention layer with room to grow. Batch size is 1: one cache belongs to one conversation."""

    def __init__(self, growth_step: int) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.growth_step = growth_step
        self.num_tokens = 0
        self._num_wanted = 0
        self._key_buffer: Tensor | None = None
        self._value_buffer: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Tokens that fit before the next allocation."""
        buffers = (self._key_buffer, self._value_buffer)
        return min(0 if buffer is None else buffer.shape[-2] for buffer in buffers)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""
        buffers = (self._key_buffer, self._value_buffer)
        return sum(buffer.nbytes for buffer in buffers if buffer is not None)

    def capacity_for(self, num_tokens: int) -> int:
        """The capacity after growing to hold `num_tokens`: whole steps, with an eighth to spare, so that
        a chat of any length is copied O(1) times per token and at most an eighth and a step stand empty."""
        if num_tokens <= self.capacity:
            return self.capacity
        spare = self.capacity // 8
        steps = -(-(num_tokens + spare) // self.growth_step)
        return steps * self.growth_step

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember dtype, device and head shapes from the first states `[1, kv_heads, n, head_dim]`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        capacity = self.capacity_for(self._num_wanted)
        self._key_buffer = key_states.new_empty(*key_states.shape[:2], capacity, key_states.shape[-1])
        self._value_buffer = value_states.new_empty(*value_states.shape[:2], capacity, value_states.shape[-1])
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

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` in all; before the first update, when there is no shape yet, remember
        to do so then."""
        self._num_wanted = max(self._num_wanted, num_tokens)
        capacity = self.capacity_for(num_tokens)
        if capacity <= self.capacity or self._key_buffer is None or self._value_buffer is None:
            return
        self._key_buffer = _grown(self._key_buffer, capacity, self.num_tokens)
        self._value_buffer = _grown(self._value_buffer, capacity, self.num_tokens)
        self._show(self.num_tokens)

    def prepare(self, keys_like: Tensor, values_like: Tensor, num_tokens: int) -> None:
        """Make room for `num_tokens` rows that come from elsewhere, shaped and typed like these
        `[1, kv_heads, 0, head_dim]`; a layer that holds rows already keeps their shape."""
        if not self.is_initialized:
            self.lazy_initialization(keys_like, values_like)
        self.reserve(num_tokens)

    def rows(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Views `[kv_heads, end - start, head_dim]` of the buffers, also of room that holds nothing yet."""
        assert self._key_buffer is not None
        assert self._value_buffer is not None
        return self._key_buffer[0, :, start:end], self._value_buffer[0, :, start:end]

    def adopt(self, num_tokens: int) -> None:
        """Declare the first `num_tokens` rows valid: they were filled through `rows`."""
        if not self.num_tokens <= num_tokens <= self.capacity:
            raise ValueError(f"cannot adopt {num_tokens} rows of {self.capacity}")
        self._show(num_tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (the library's sign); more than all removes all.

        Raises ValueError for a positive number, as the stock layers do.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens to remove, not {tokens_to_remove}")
        self.crop_to(max(0, self.num_tokens + tokens_to_remove))

    def crop_to(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` rows. Raises ValueError when there are fewer."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot crop {self.num_tokens} tokens to {num_tokens}")
        if self.is_initialized:
            self._show(num_tokens)

    def reset(self) -> None:
        """Forget everything and free the buffers."""
        self.__init__(self.growth_step)

    def _show(self, num_tokens: int) -> None:
        assert self._key_buffer is not None
        assert self._value_buffer is not None
        self.num_tokens = num_tokens
        self.keys = self._key_buffer[:, :, :num_tokens]
        self.values = self._value_buffer[:, :, :num_tokens]


class GrowingHybridLayer(LinearAttentionLayer, GrowingLayer):
    """Growing attention rows next to a recurrent state, for models that run both in one layer. The rows
    could be cropped, the state cannot, so the layer as a whole cannot."""

    is_compileable = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, growth_step: int, number_of_states: int) -> None:
        GrowingLayer.__init__(self, growth_step)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)  # pyright: ignore[reportUnknownMemberType]

    def lazy_initialization(self, *args: Tensor, **kwargs: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The library initializes attention with two positional tensors and states by keyword."""
        if args:
            GrowingLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)  # pyright: ignore[reportArgumentType]

    def crop(self, tokens_to_remove: int) -> None:
        """Always raises RuntimeError: a recurrent state cannot be taken back token by token."""
        raise RuntimeError("a layer with a recurrent state cannot be cropped")

    def reset(self) -> None:
        """Forget everything and free the buffers."""
        self.__init__(self.growth_step, self.number_of_states)


def _grown(buffer: Tensor, capacity: int, num_tokens: int) -> Tensor:
    grown = buffer.new_empty(*buffer.shape[:2], capacity, buffer.shape[-1])
    grown[:, :, :num_tokens] = buffer[:, :, :num_tokens]
    return grown


def layer_nbytes(layer: object) -> int:
    """Bytes of any cache layer: ours by its buffers, a stock one by the tensors it holds."""
    if isinstance(layer, GrowingHybridLayer):
        return layer.nbytes + _tensor_bytes(layer.conv_states) + _tensor_bytes(layer.recurrent_states)
    if isinstance(layer, GrowingLayer):
        return layer.nbytes
    return sum(_tensor_bytes(value) for value in vars(layer).values())


def _tensor_bytes(value: object) -> int:
    if isinstance(value, Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, dict):
        return sum(_tensor_bytes(item) for item in value.values())  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, (list, tuple)):
        return sum(_tensor_bytes(item) for item in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return 0

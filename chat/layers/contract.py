"""What every cache layer of ours promises: one row per token, in buffers with room to grow.

A row is what one token leaves in one layer. Its parts have names of their own (a dense layer has `keys`
and `values`), and each part is a tensor `[kv_heads, num_tokens, width]`: that is how rows are copied, sent to
the disk and taken back, whatever they are made of. Batch size is 1: one cache belongs to one conversation.

Invariant: `get_seq_length() == num_tokens <= capacity`, and a row never changes once it is appended, except
as `rows_out` says.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin, LinearAttentionLayer


class RowLayer(DynamicLayer):
    """See the module. A subclass holds the buffers and answers for what is abstract here."""

    def __init__(self, growth_step: int) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.growth_step = growth_step
        self.num_tokens = 0

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Tokens that fit before the next allocation."""

    @property
    @abstractmethod
    def buffers(self) -> tuple[Tensor, ...]:
        """What is allocated for rows; each grows by itself while the others stand."""

    @property
    @abstractmethod
    def part_names(self) -> frozenset[str]:
        """The names of a row's parts."""

    @abstractmethod
    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Add the rows of new tokens, `[1, kv_heads, n, head_dim]` each."""

    @abstractmethod
    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` in all; before the first rows, when there is no shape yet, remember to
        do so then."""

    @abstractmethod
    def crop_to(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` rows, byte for byte. Raises ValueError when there are fewer."""

    @abstractmethod
    def rows_out(self, start: int) -> dict[str, Tensor]:
        """The rows from `start` on by part, as views of the buffers. What is handed out is what is held from
        now on: a layer that keeps its newest rows in another form first gives them their final one."""

    @abstractmethod
    def prepare(self, like: Mapping[str, Tensor], num_tokens: int) -> None:
        """Make room for `num_tokens` rows in all whose new ones come from elsewhere, with parts shaped and
        typed like these `[kv_heads, 0, width]`; a layer that holds rows already keeps their shape."""

    @abstractmethod
    def room(self, start: int, end: int) -> dict[str, Tensor]:
        """Views of the rows `[start, end)` by part, also where they hold nothing yet: to be filled."""

    @abstractmethod
    def adopt(self, num_tokens: int) -> None:
        """Declare the first `num_tokens` rows valid: they were filled through `room`. Raises ValueError when
        so many do not fit."""

    @abstractmethod
    def copy_from(self, source: RowLayer, num_tokens: int) -> None:
        """Take, into an empty layer, the first rows of another one of the same class and settings."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated for rows, used or not."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def take_copies(self, rows: Mapping[str, Tensor], device: torch.device) -> None:
        """Append copies of rows that another layer holds in this form, wherever that is; passes will run on
        `device`."""
        num_tokens = self.num_tokens + next(iter(rows.values())).shape[1]
        self.prepare({name: part[:, :0].to(device) for name, part in rows.items()}, num_tokens)
        for name, room in self.room(self.num_tokens, num_tokens).items():
            room.copy_(rows[name])
        self.adopt(num_tokens)

    def capacity_for(self, num_tokens: int) -> int:
        """The capacity after growing to hold `num_tokens`: whole steps, with an eighth to spare, so that
        a chat of any length is copied O(1) times per token and at most an eighth and a step stand empty.
        Raises MemoryLimit where a layer does not grow so far."""
        if num_tokens <= self.capacity:
            return self.capacity
        spare = self.capacity // 8
        steps = -(-(num_tokens + spare) // self.growth_step)
        return steps * self.growth_step

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.num_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (the library's sign); more than all removes all.

        Raises ValueError for a positive number, as the stock layers do.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens to remove, not {tokens_to_remove}")
        self.crop_to(max(0, self.num_tokens + tokens_to_remove))

    def check_crop(self, num_tokens: int) -> None:
        """Raises ValueError when a crop to `num_tokens` would keep more than there is."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot crop {self.num_tokens} tokens to {num_tokens}")

    def check_adoption(self, num_tokens: int) -> None:
        """Raises ValueError when `num_tokens` rows cannot have been filled."""
        if not self.num_tokens <= num_tokens <= self.capacity:
            raise ValueError(f"cannot adopt {num_tokens} rows of {self.capacity}")


class StateBesideRows(LinearAttentionLayer):
    """For layers that run attention and a recurrence side by side; comes before a `RowLayer` among the bases.
    The rows could be cropped, the state cannot, so the layer as a whole cannot."""

    is_compileable = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def lazy_initialization(self, *args: Tensor, **kwargs: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The library initializes attention with two positional tensors and states by keyword."""
        if args:
            super(LinearAttentionCacheLayerMixin, self).lazy_initialization(*args)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)  # pyright: ignore[reportArgumentType]

    def crop(self, tokens_to_remove: int) -> None:
        """Always raises RuntimeError: a recurrent state cannot be taken back token by token."""
        raise RuntimeError("a layer with a recurrent state cannot be cropped")


def grown(buffer: Tensor, capacity: int, num_tokens: int) -> Tensor:
    """A buffer with room for `capacity` rows, which are the last dimension but one, and the first
    `num_tokens` of the old one; in pinned memory if that one is."""
    shape = *buffer.shape[:-2], capacity, buffer.shape[-1]
    larger = torch.empty(shape, dtype=buffer.dtype, device=buffer.device, pin_memory=buffer.is_pinned())
    larger[..., :num_tokens, :] = buffer[..., :num_tokens, :]
    return larger


def layer_nbytes(layer: object) -> int:
    """Bytes of any cache layer: ours by its buffers, a stock one by the tensors it holds."""
    if not isinstance(layer, RowLayer):
        return sum(_tensor_bytes(value) for value in vars(layer).values())
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return layer.nbytes + _tensor_bytes(layer.conv_states) + _tensor_bytes(layer.recurrent_states)
    return layer.nbytes


def _tensor_bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, dict):
        return sum(_tensor_bytes(item) for item in value.values())  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, (list, tuple)):
        return sum(_tensor_bytes(item) for item in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return 0

"""States of layers that cannot be cropped, kept in RAM from the places people go back to.

A sliding window, a convolution or a recurrence only knows where it stands now. So its state is copied where
decoding begins and where a reply ends: to go back is to take the newest state at or below the wanted length,
together with the rows, up to there, of a live cache for the layers that have rows.

What did not change is kept once: a window shares with the boundary before it on its path all tokens that both
look back on, and equal tensors are one tensor. Only the newest few boundaries of a chat are kept; older ones
are on disk, if anywhere. Bytes count against the budget of `LiveCaches`, which also holds the lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cache_store.file_header import STATE_PREFIX, TensorInfo
from chat.divergence import num_common
from chat.kv_cache import KVCache
from chat.layers.kinds import have_same_rows
from chat.settings import CacheSettings

NUM_KEPT = 8
"""Boundaries of one chat: four turns, or one question with several answers."""

_WINDOWS = ("window_keys", "window_values")
Pieces = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Boundary:
    """The states after `token_ids`. Of each tensor there are pieces, which make it up when put together along
    the last dimension but one, as far as its shape asks for; most have one piece. `needs_rows`: other layers
    of the cache have rows, without which the states are of no use. `settings`: the kind of cache; neither
    rows nor states of a kind that has others belong to them."""

    owner: str
    settings: CacheSettings
    token_ids: tuple[int, ...]
    needs_rows: bool
    shapes: Mapping[str, tuple[int, ...]]
    pieces: Mapping[str, Pieces]

    def __len__(self) -> int:
        return len(self.token_ids)

    def tensors(self) -> dict[str, Tensor]:
        """The states whole."""
        return {name: _whole(pieces, self.shapes[name]) for name, pieces in self.pieces.items()}


class BoundaryStates:
    """See the module. Not locked by itself."""

    def __init__(self, num_kept: int = NUM_KEPT) -> None:
        self._num_kept = num_kept
        self._kept: OrderedDict[tuple[str, tuple[int, ...]], Boundary] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all states, what several share counted once."""
        tensors = {
            id(piece): piece.nbytes
            for boundary in self._kept.values()
            for pieces in boundary.pieces.values()
            for piece in pieces
        }
        return sum(tensors.values())

    def note(self, conversation_id: str, owner: str, cache: KVCache) -> None:
        """Keep the states that a cache with states has now, as the newest ones of this conversation."""
        key = (conversation_id, cache.token_ids)
        if key in self._kept and have_same_rows(self._kept[key].settings, cache.settings):
            self._kept.move_to_end(key)
            return
        self._kept[key] = self._boundary(conversation_id, owner, cache)
        mine = [each for each in self._kept if each[0] == conversation_id]
        for old in mine[: -self._num_kept]:
            del self._kept[old]

    def best(
        self, owner: str, settings: CacheSettings, token_ids: Sequence[int], num_rows: int
    ) -> Boundary | None:
        """The longest of an owner's boundaries of a kind that is a beginning of `token_ids`, when there are
        rows for the first `num_rows` of these tokens."""
        fitting = (
            boundary
            for boundary in self._kept.values()
            if boundary.owner == owner
            and have_same_rows(boundary.settings, settings)
            and len(boundary) <= (num_rows if boundary.needs_rows else len(token_ids))
            and tuple(token_ids[: len(boundary)]) == boundary.token_ids
        )
        return max(fitting, key=len, default=None)

    def keep_paths(self, conversation_id: str, paths: Sequence[Sequence[int]]) -> None:
        """Forget this conversation's boundaries that are no beginnings of one of these paths."""
        for key in [each for each in self._kept if each[0] == conversation_id]:
            if all(num_common(key[1], path) < len(key[1]) for path in paths):
                del self._kept[key]

    def forget(self, conversation_id: str) -> None:
        """Forget all boundaries of this conversation."""
        self.keep_paths(conversation_id, ())

    def drop_oldest(self) -> bool:
        """Forget the boundary noted longest ago; False when there is none."""
        if not self._kept:
            return False
        self._kept.popitem(last=False)
        return True

    def _boundary(self, conversation_id: str, owner: str, cache: KVCache) -> Boundary:
        token_ids, settings = cache.token_ids, cache.settings
        tensors = cache.rows_out(len(cache))
        base = self._base(conversation_id, settings, token_ids)
        states = {name: state for name, state in tensors.items() if name.startswith(STATE_PREFIX)}
        return Boundary(
            owner,
            settings,
            token_ids,
            len(states) < len(tensors),
            {name: tuple(state.shape) for name, state in states.items()},
            {name: _pieces(name, state, base, len(token_ids)) for name, state in states.items()},
        )

    def _base(
        self, conversation_id: str, settings: CacheSettings, token_ids: tuple[int, ...]
    ) -> Boundary | None:
        """The boundary before this one on its path."""
        above = (
            boundary
            for (name, ids), boundary in self._kept.items()
            if name == conversation_id
            and have_same_rows(boundary.settings, settings)
            and token_ids[: len(ids)] == ids
        )
        return max(above, key=len, default=None)


def rebuilt(boundary: Boundary, source: KVCache | None, cache: KVCache) -> KVCache:
    """Fill a new, empty cache with what was held at a boundary: its states, and the first rows of `source`,
    which holds at least these tokens (None: no layer has rows). Raises CacheMismatch when they do not fit."""
    tensors = boundary.tensors()
    rows = source.rows_out(0) if source is not None else {}
    tensors.update(
        {name: each[:, : len(boundary)] for name, each in rows.items() if not name.startswith(STATE_PREFIX)}
    )
    cache.take_rows(_InMemory(tensors), boundary.token_ids, with_state=True)
    return cache


class _InMemory:
    """Tensors as a source of rows (see `RowSource`)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.tensors = tuple(
            TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
        )

    def read_into(self, info: TensorInfo, destination: Tensor) -> None:
        """Copy one tensor whole."""
        destination.copy_(self._tensors[info.name])

    def skip(self, info: TensorInfo) -> None:
        """Nothing stands in the way of the next one."""

    def verify(self) -> None:
        """There is nothing that could have been damaged."""


def _pieces(name: str, state: Tensor, base: Boundary | None, num_tokens: int) -> Pieces:
    if base is None or name not in base.pieces:
        return (state,)
    if name.endswith(_WINDOWS):
        num_new, num_rows = num_tokens - len(base), state.shape[-2]
        if num_new >= num_rows:
            return (state,)
        older = _newest(base.pieces[name], num_rows - num_new)
        return (*older, state[..., num_rows - num_new :, :].clone())
    old = base.pieces[name]
    return old if len(old) == 1 and torch.equal(old[0], state) else (state,)


def _newest(pieces: Pieces, num_rows: int) -> Pieces:
    """The last pieces that hold at least so many rows."""
    kept: list[Tensor] = []
    for piece in reversed(pieces):
        if num_rows <= 0:
            break
        kept.append(piece)
        num_rows -= piece.shape[-2]
    return tuple(reversed(kept))


def _whole(pieces: Pieces, shape: tuple[int, ...]) -> Tensor:
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces, dim=-2)[..., -shape[-2] :, :]

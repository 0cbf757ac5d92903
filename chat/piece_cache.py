"""Token ids of prompt pieces that were encoded before, so that a turn tokenizes only what is new.

Bounded by the number of ids it holds; the texts themselves are not kept, only a digest of each, so that a
message that was refused or deleted does not live on here.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict

MAX_IDS = 250_000
"""Four bytes each."""


class PieceCache:
    """Maps (text, whether something stands before it) to ids; the least recently used go first."""

    def __init__(self, max_ids: int = MAX_IDS) -> None:
        self._max_ids = max_ids
        self._num_ids = 0
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()

    def get(self, text: str, follows: bool) -> array[int] | None:
        """The ids of a piece seen before, or None."""
        key = _key(text, follows)
        ids = self._kept.get(key)
        if ids is not None:
            self._kept.move_to_end(key)
        return ids

    def put(self, text: str, follows: bool, ids: array[int]) -> None:
        """Remember a piece; one that is larger than the whole cache is not kept."""
        if len(ids) > self._max_ids:
            return
        self._kept[_key(text, follows)] = ids
        self._num_ids += len(ids)
        while self._num_ids > self._max_ids:
            _, dropped = self._kept.popitem(last=False)
            self._num_ids -= len(dropped)


def _key(text: str, follows: bool) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), salt=b"+" if follows else b"-").digest()

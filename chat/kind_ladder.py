"""Where a reply goes on when memory runs out: one step down, to a kind of cache that takes less.

Only for people who allowed it, because a smaller cache may answer differently. The chat keeps the smaller
kind, since its next reply would run out of memory again; dense rows are converted on the way, anything else
is read again.
"""

from __future__ import annotations

from collections.abc import Mapping

from chat.errors import MemoryLimit
from chat.failure import is_out_of_memory
from chat.kind_names import name_of
from chat.settings import CacheKind

LADDER: tuple[CacheKind, ...] = ("dynamic", "native8", "native4")
"""From the best answers to the least memory; every machine has these."""


def is_short_of_memory(error: BaseException) -> bool:
    """Whether a smaller cache might have helped: a budget or the memory itself was used up."""
    return isinstance(error, MemoryLimit) or is_out_of_memory(error)


def next_smaller(kind: CacheKind, bytes_per_token: Mapping[CacheKind, int]) -> CacheKind | None:
    """The best kind of the ladder that takes less than `kind`; None at its foot."""
    taken = bytes_per_token[kind]
    return next((each for each in LADDER if bytes_per_token[each] < taken), None)


def note_of(kind: CacheKind) -> str:
    """What the reply says about the step."""
    return (
        f"Memory ran out, so this chat's cache is kept as {name_of(kind)} from now on; nothing was lost, and"
        " the drawer's Cache section changes it back"
    )

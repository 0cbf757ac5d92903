"""Where a reply goes on when memory runs out: one step down, to a kind of cache that takes less.

Only for people who allowed it, because a smaller cache may answer differently, and an offloaded one slowly.
The chat keeps the smaller kind, since its next reply would run out of memory again; dense rows are converted
on the way, anything else is read again. Every step goes down, so that no chat goes round in circles.
"""

from __future__ import annotations

from collections.abc import Mapping

from chat.errors import MemoryLimit
from chat.failure import is_out_of_memory
from chat.kind_names import name_of
from chat.layers.kinds import is_offloaded
from chat.settings import CacheKind

LADDER: tuple[CacheKind, ...] = ("dynamic", "native8", "native4")
"""From the best answers to the least memory; every machine has these."""

OFFLOADED: CacheKind = "offloaded"
"""At its foot, where the machine has it: takes none of the device's memory, but more of the budget."""

GROWING: Mapping[CacheKind, CacheKind] = {"static": "dynamic", "offloaded_static": "offloaded"}
"""Kinds that take all their room at once, and those that take it step by step."""


def is_short_of_memory(error: BaseException) -> bool:
    """Whether a smaller cache might have helped: a budget or the memory itself was used up."""
    return is_budget(error) or is_out_of_memory(error)


def is_budget(error: BaseException) -> bool:
    """Whether it was a budget, which counts all memory alike."""
    return isinstance(error, MemoryLimit)


def next_smaller(
    kind: CacheKind, bytes_per_token: Mapping[CacheKind, int], *, may_offload: bool
) -> CacheKind | None:
    """The best kind of the ladder that takes less than `kind`; None at its foot. `may_offload`: the machine
    can, and it is the device's memory that ran out."""
    if kind in GROWING:
        return GROWING[kind]
    if is_offloaded(kind):
        return None
    taken = bytes_per_token[kind]
    for smaller in LADDER:
        if bytes_per_token[smaller] < taken:
            return smaller
    return OFFLOADED if may_offload else None


def note_of(kind: CacheKind) -> str:
    """What the reply says about the step."""
    return (
        f"Memory ran out, so this chat's cache is kept as {name_of(kind)} from now on; nothing was lost, and"
        " “Cache of this chat” in the drawer changes it back"
    )

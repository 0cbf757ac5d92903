"""Where two runs of token ids part, told in words: why a turn had to read what it read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chat.stats import Divergence

NUM_BEFORE = 8
NUM_AFTER = 16
"""Tokens of text shown on either side of the place: enough to find it in the chat."""

Decode = Callable[[Sequence[int]], str]


def num_common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    limit = min(len(ids), len(others))
    return next((index for index in range(limit) if ids[index] != others[index]), limit)


def divergence_of(old: Sequence[int], new: Sequence[int], decode: Decode) -> Divergence | None:
    """Where `new` departs from `old`; None when it does not: one of them only goes on from the other."""
    position = num_common(old, new)
    if position in (len(old), len(new)):
        return None
    start, end = max(0, position - NUM_BEFORE), position + NUM_AFTER
    return Divergence(
        position, decode(new[start:position]), decode(old[position:end]), decode(new[position:end])
    )

"""How far the tokens of a live cache run through the segment tree. Ids only; no tensor is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cache_store.records import Segment
from chat.divergence import num_common


@dataclass(frozen=True, slots=True)
class LiveMatch:
    """`ends[segment_id]`: how many tokens of the path the cache shares with the path to that segment, where
    it shares some of the segment's own. Beyond `end`, within `last_id`, the cache is alone."""

    ends: Mapping[str, int]
    end: int
    last_id: str | None


def match_path(
    path: Sequence[int], segments: Iterable[Segment], ids: Mapping[str, Sequence[int]]
) -> LiveMatch:
    """Follow `path` through segments that come parents first; `ids` holds the tokens of each of them."""
    ends: dict[str, int] = {}
    for segment in segments:
        above = 0 if segment.parent_id is None else ends.get(segment.parent_id, 0)
        if above >= segment.start:
            shared = num_common(ids[segment.id], path[segment.start : segment.end])
            if shared:
                ends[segment.id] = segment.start + shared
    last_id = max(ends, key=lambda segment_id: ends[segment_id], default=None)
    return LiveMatch(ends, ends[last_id] if last_id else 0, last_id)

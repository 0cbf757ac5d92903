"""Going back to a boundary: a new cache from the states kept there and the rows of a live cache.

The rows pass through the computer's memory, so the cost is that of copying them, never that of reading the
tokens again. Room for both copies is made first; where there is none, nothing is done and the caller reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from chat.boundary_states import Boundary, rebuilt
from chat.errors import CacheMismatch, MemoryLimit
from chat.kv_cache import KVCache
from chat.live_caches import LiveCache, LiveCaches

log = logging.getLogger(__name__)

Target = tuple[Boundary, KVCache | None]
"""What `LiveCaches.boundary` found: the states, and the cache whose rows belong to them, if any do."""


def rolled_back(
    live: LiveCaches, target: Target, lent: LiveCache | None, new_cache: Callable[[], KVCache], room_for: int
) -> KVCache | None:
    """A cache that holds exactly the boundary's tokens, with room for `room_for`. None when there is no room,
    or when the states do not belong to this model."""
    boundary, source = target
    cache = new_cache()
    needed = cache.nbytes_for(room_for)
    is_lent = lent is not None and source is lent.cache
    if source is not None:
        needed += source.nbytes * (2 if is_lent else 1)
    try:
        live.make_room(needed, beside=None if is_lent else source)
        cache.reserve(room_for)
        return rebuilt(boundary, source, cache)
    except (MemoryLimit, CacheMismatch) as reason:
        log.info("a chat is not rolled back in memory: %s", reason)
        return None

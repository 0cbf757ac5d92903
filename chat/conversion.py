"""A conversation's live cache becomes one of another kind, without its tokens being read again.

Only dense rows can become others; what they become is what packing them one by one gives, or themselves in
another place. Where the disk has
rows of the wanted kind for the beginning, those come first, because they are what a restart would bring back;
only what is behind them is converted. The old cache is used up on the way, so that a conversion needs little
more memory than the larger of the two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from cache_store.records import Conversation
from chat.disk import DiskCaches, states_at_ends
from chat.errors import MemoryLimit
from chat.kv_cache import KVCache
from chat.layers.kinds import have_same_rows
from chat.live_caches import LiveCache, LiveCaches

log = logging.getLogger(__name__)


def converted(
    live: LiveCaches,
    disk: DiskCaches | None,
    new_cache: Callable[[], KVCache],
    lent: LiveCache,
    conversation: Conversation,
) -> LiveCache | None:
    """What a lent cache becomes in the kind of `new_cache`; None, and nothing is done, when its rows cannot
    be converted or the budget has no room for it. Whatever is raised on the way leaves no usable cache."""
    cache = new_cache()
    if not lent.cache.can_convert_to(cache.settings):
        return None
    num_saved, num_loaded, lacks_states = 0, 0, False
    if have_same_rows(cache.settings, lent.cache.settings):
        num_saved = lent.num_saved  # what the disk has of it is what it holds itself
    elif disk is not None:
        cache, num_loaded, lacks_states = _with_saved_rows(live, disk, cache, lent, conversation, new_cache)
        num_saved = num_loaded
    if len(cache) < len(lent.cache) or lacks_states:
        try:
            live.make_room(lent.cache.nbytes_to_turn(cache))
        except MemoryLimit as limit:
            log.info("a cache is not converted: %s", limit)
            return None
        cache = lent.cache.turned_into(cache)
    num_from_disk = max(num_loaded, lent.num_from_disk)
    return replace(lent, cache=cache, num_saved=num_saved, num_from_disk=num_from_disk)


def _with_saved_rows(
    live: LiveCaches,
    disk: DiskCaches,
    cache: KVCache,
    lent: LiveCache,
    conversation: Conversation,
    new_cache: Callable[[], KVCache],
) -> tuple[KVCache, int, bool]:
    """The empty cache with what the disk has of the wanted kind; how many tokens that is; and whether states
    are still to come from the lent cache: the disk has those of its very end, or none that are of use."""
    token_ids = lent.cache.token_ids
    chain = disk.find(conversation.owner, conversation.id, token_ids, wait=True)
    if not chain.num_tokens:
        return cache, 0, False
    try:
        live.make_room(lent.cache.nbytes + cache.nbytes_for(len(token_ids)))
    except MemoryLimit:
        return cache, 0, False
    cache.reserve(len(token_ids))
    rows_only = not cache.has_rows() and states_at_ends(chain).num_tokens < len(token_ids)
    loaded = disk.load(cache, chain, token_ids, conversation.id, new_cache, rows_only=rows_only).cache
    return loaded, len(loaded), rows_only

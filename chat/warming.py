"""Warming a chat that somebody opened: its saved rows come back into memory before the next message asks.

Only what the selected path held after its last reply is loaded, as one `LiveCache`. Nothing is computed, and
the next turn's stats still say that these tokens came from disk.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from cache_store.records import Conversation, Message
from chat.disk import states_at_ends
from chat.errors import MemoryLimit
from chat.live_caches import LiveCache
from chat.places import Places
from chat.prompt import PromptRenderer

log = logging.getLogger(__name__)


def path_held(path: Sequence[Message]) -> Sequence[Message]:
    """The path up to its last reply with ids: what a cache held after that turn. Empty when there is none."""
    last = next((index for index in range(len(path) - 1, 0, -1) if path[index].token_ids), 0)
    return path[: last + 1] if last else ()


def warm(
    places: Places, renderer: PromptRenderer, conversation: Conversation, path: Sequence[Message]
) -> LiveCache | None:
    """The conversation's cache from disk, to be kept; None when there is none, or no room in memory."""
    held = path_held(path)
    if places.disk is None or not held:
        return None
    *past, reply = held
    prompt_ids = renderer.render(past, conversation.system_prompt).token_ids
    token_ids = (*prompt_ids, *(reply.token_ids or ()))
    chain = places.disk.find(conversation.owner, conversation.id, token_ids, wait=False)
    cache = places.new_cache()
    chain = chain if cache.has_rows() else states_at_ends(chain)
    if not chain.num_tokens:
        return None
    try:
        places.live.make_room(cache.nbytes_for(chain.num_tokens))
    except MemoryLimit as limit:
        log.info("a chat was opened without warming it: %s", limit)
        return None
    cache.reserve(chain.num_tokens)
    loaded = places.disk.load(cache, chain, token_ids, conversation.id, places.new_cache)
    return LiveCache(
        conversation.owner,
        loaded.cache,
        conversation.system_prompt,
        reply.id,
        reply.parent_id or "",
        num_saved=len(loaded.cache),
        is_warmed=True,
        num_from_disk=len(loaded.cache),
        num_damaged_files=loaded.num_damaged_files,
    )

"""Where caches of one kind come from, and how much of a prompt the disk has in that kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache_store.records import Chain, Conversation
from chat.disk import NOTHING, DiskCaches, states_at_ends
from chat.divergence import Decode
from chat.kv_cache import KVCache
from chat.live_caches import LiveCaches
from chat.settings import CacheSettings


@dataclass(frozen=True, slots=True)
class Places:
    """Where caches of one kind come from: those in RAM, those on disk (None: saving is off), and new ones.
    `decode` turns ids into the text shown for a divergence. `dense`: where dense ones come from, of which
    these can be made; None where these are dense themselves."""

    live: LiveCaches
    disk: DiskCaches | None
    new_cache: Callable[[], KVCache]
    decode: Decode
    settings: CacheSettings
    dense: Places | None = None


def saved_beginning(
    places: Places, conversation: Conversation, token_ids: Sequence[int], own: int, *, wait: bool
) -> Chain:
    """What the disk holds of the prompt; not asked when the conversation's own cache has all of it."""
    if places.disk is None or own == len(token_ids):
        return NOTHING
    chain = places.disk.find(conversation.owner, conversation.id, token_ids, wait=wait)
    return chain if places.new_cache().has_rows() else states_at_ends(chain)

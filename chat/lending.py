"""A conversation's live cache, lent to a turn in the kind that is wanted now.

One of another kind is converted, where it can be; where memory has less of use than the disk has dense rows,
those are loaded and converted instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cache_store.records import Chain, Conversation, Message
from chat.conversion import converted
from chat.disk import changed
from chat.errors import MemoryLimit
from chat.layers.kinds import rows_of
from chat.live_caches import LiveCache
from chat.places import Places, saved_beginning
from chat.prompt import Prompt
from chat.stats import CACHE_KIND, Reason, TurnStats


def take(
    places: Places, conversation: Conversation, path: Sequence[Message], prompt: Prompt
) -> tuple[LiveCache | None, str]:
    """The conversation's cache, lent, in the kind that is wanted now; and how the kind changed since its last
    turn, in words. Where there is none, dense rows on disk become one. A cache of another kind that cannot be
    converted is given up, once the prompt's cache is known to fit. Raises MemoryLimit."""
    lent = places.live.take(conversation.id)
    if is_to_be_made(places, lent):
        lent = _saved_dense(places, conversation, prompt.token_ids[:-1], lent)
    if lent is None or lent.cache.settings == places.settings:
        return lent, _kind_changed(places, _kind_before(path))
    setting = _kind_changed(places, lent.cache.settings.kind)
    try:
        turned = converted(places.live, places.disk, places.new_cache, lent, conversation)
        if turned is None:
            places.live.make_room(places.new_cache().nbytes_for(len(prompt)))
            turned = _converted_beginning(places, lent, conversation, path, prompt)
    except MemoryLimit:
        places.live.keep(conversation.id, lent)
        raise
    except BaseException:  # whatever it was, it may have struck half-way
        places.live.forget(conversation.id, "failed")
        raise
    return turned, setting


def _converted_beginning(
    places: Places, lent: LiveCache, conversation: Conversation, path: Sequence[Message], prompt: Prompt
) -> LiveCache | None:
    """A cache that cannot be converted whole, because the other kind has no room for all of it, goes back to
    what the prompt has of it first."""
    common = lent.num_common(prompt.token_ids[:-1])
    if not 0 < common < len(lent.cache) or not lent.cache.can_crop_to(common):
        return None
    lost = why_left(lent, conversation, path)
    lent.cache.crop_to(common)
    cut = replace(lent, num_saved=min(lent.num_saved, common), num_allowed=None, lost=lost)
    return converted(places.live, places.disk, places.new_cache, cut, conversation)


def is_to_be_made(places: Places, live: LiveCache | None) -> bool:
    """Whether the conversation has no cache of the wanted kind yet."""
    return live is None or live.cache.settings != places.settings


def _saved_dense(
    places: Places, conversation: Conversation, usable_ids: Sequence[int], lent: LiveCache | None
) -> LiveCache | None:
    """Dense rows from the disk, where it has more of them than there are of the wanted kind or to be had of
    the lent cache, and memory has room; else the lent cache."""
    chain = dense_chain(places, conversation, usable_ids, wait=True)
    common = lent.num_common(usable_ids) if lent is not None else 0
    own = common if lent is not None and _can_give(places, lent, common) else 0
    if chain is None or chain.num_tokens <= own or places.dense is None or places.dense.disk is None:
        return lent
    cache = places.dense.new_cache()
    try:
        needed = cache.nbytes_for(chain.num_tokens) + (lent.cache.nbytes if lent is not None else 0)
        places.live.make_room(needed)
    except MemoryLimit:
        return lent
    cache.reserve(chain.num_tokens)
    loaded = places.dense.disk.load(cache, chain, usable_ids, conversation.id, places.dense.new_cache)
    if len(loaded.cache) < own:
        return lent
    return LiveCache(
        conversation.owner,
        loaded.cache,
        conversation.system_prompt,
        is_warmed=True,
        num_from_disk=len(loaded.cache),
        num_damaged_files=loaded.num_damaged_files,
    )


def _can_give(places: Places, lent: LiveCache, num_tokens: int) -> bool:
    """Whether a lent cache can become one of the wanted kind that is cut to so many tokens."""
    return lent.cache.can_convert_to(places.settings) and lent.cache.can_crop_to(num_tokens)


def dense_chain(
    places: Places, conversation: Conversation, usable_ids: Sequence[int], *, wait: bool
) -> Chain | None:
    """What the disk has of these tokens in dense rows; None when there is no less of the wanted kind."""
    if places.dense is None:
        return None
    dense = saved_beginning(places.dense, conversation, usable_ids, 0, wait=wait)
    live = places.live.num_usable(conversation.owner, places.settings, conversation.id, usable_ids)
    packed = saved_beginning(places, conversation, usable_ids, live, wait=False)
    return dense if dense.num_tokens > max(live, packed.num_tokens) else None


def _kind_before(path: Sequence[Message]) -> str:
    """The kind of cache that the last turn on this path used; empty when nobody wrote it down."""
    for message in reversed(path):
        if message.role == "assistant" and message.stats:
            return TurnStats.from_json(message.stats).cache_kind
    return ""


def _kind_changed(places: Places, before: str) -> str:
    """In words; no change between kinds that have the same rows, because nothing is lost by it."""
    kind = places.settings.kind
    return changed(CACHE_KIND, before, kind) if before and rows_of(before) != rows_of(kind) else ""


def why_left(lent: LiveCache, conversation: Conversation, path: Sequence[Message]) -> Reason:
    """Why the prompt departs from a conversation's cache. One whose last reply is on the path was read for
    this very past: then only the template can have rendered it differently. Otherwise it belongs to another
    branch."""
    if lent.system_prompt != conversation.system_prompt:
        return "system_prompt"
    return "template" if lent.was_read_for(path) else "evicted"

"""Where a turn starts from: the longest beginning of its prompt that need not be read, and why the rest is.

Three places are asked: the conversation's own live cache, cropped where the prompt departs from it; the
other live caches of the same owner, whose rows are copied; and the disk, whose rows are loaded behind what a
live cache already holds. The longest wins. At least one token is always left to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from cache_store.records import EDITED, Chain, Conversation, Message
from chat.conversion import converted
from chat.disk import NOTHING, DiskCaches, changed, states_at_ends
from chat.divergence import Decode, divergence_of
from chat.errors import MemoryLimit
from chat.kv_cache import KVCache
from chat.layers.kinds import rows_of
from chat.live_caches import LiveCache, LiveCaches
from chat.prompt import Prompt
from chat.rollback import rolled_back
from chat.settings import CacheSettings
from chat.stats import CACHE_KIND, Divergence, Reason, TurnStats

ONLY_NEW: frozenset[Reason] = frozenset({"new", "boundary"})
"""Reasons that need no explanation: nothing that was read before was changed or lost."""


@dataclass(frozen=True, slots=True)
class Origin:
    """How a reply came to be due: `regenerated` when it is not the first to its question; `replaced` is the
    path down to the question that the last message is an edited version of. `num_read_before`: how many
    tokens of the same prompt, or of the replaced one, earlier turns had read."""

    regenerated: bool = False
    replaced: tuple[Message, ...] = ()
    num_read_before: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """A cache that holds exactly the first `num_live + num_disk` prompt tokens, of which `num_saved` are on
    disk or on their way there, and why each other one is read (see `TurnStats`)."""

    cache: KVCache
    num_live: int
    num_disk: int
    num_saved: int
    reasons: Mapping[Reason, int]
    divergence: Divergence | None = None
    changed_setting: str = ""
    num_damaged_files: int = 0

    @property
    def num_cached(self) -> int:
        """Prompt tokens that need not be read."""
        return self.num_live + self.num_disk


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


@dataclass(frozen=True, slots=True)
class _Past:
    """What the conversation had computed when the turn began, asked before its cache is cut. `common`: the
    prompt's beginning that its live cache holds; `own`: as much of it as the cache can be cut to. `extends`:
    that cache was a plain beginning of the prompt, so it held all that was ever computed of it. `again`: why
    anything else that was computed once is read again, when no loss on disk explains it."""

    common: int
    own: int
    extends: bool
    again: Reason
    token_ids: tuple[int, ...]
    changed_setting: str


@dataclass(frozen=True, slots=True)
class _Beginning:
    """The cache a turn goes on with, and where its rows came from."""

    cache: KVCache
    num_live: int
    num_saved: int
    num_damaged_files: int
    is_evicted: bool
    is_damaged: bool


def start_turn(
    places: Places,
    conversation: Conversation,
    path: Sequence[Message],
    prompt: Prompt,
    *,
    num_old: int,
    origin: Origin,
) -> Start:
    """Lend the best cache out of `places.live`, cut it to what `prompt` begins with, and bring it as much
    further as the disk can.

    `num_old`: how many prompt tokens an earlier turn on this path computed. Raises MemoryLimit when the
    prompt's cache would exceed the budget alone; the conversation then keeps the cache it had.
    """
    lent, setting = _take(places, conversation, path, prompt)
    limit = len(prompt) - 1
    past = _past(places, lent, conversation, path, prompt, setting)
    owned = [lent]
    del lent  # handed over, so that its memory is free as soon as `_beginning` gives it up
    try:
        found = _beginning(places, owned, past.own, conversation, prompt, min(num_old, limit))
    except BaseException:
        if (kept := owned.pop()) is not None:
            places.live.keep(conversation.id, kept)
        raise
    num_cached = len(found.cache)
    num_again = 0 if past.extends else max(0, min(num_old, limit) - num_cached)
    if origin.regenerated and num_old >= len(prompt) and num_cached + num_again == limit:
        reasons: dict[Reason, int] = {"boundary": 1}
    else:
        reasons = _why_fresh(origin, path, prompt, num_cached + num_again)
    num_damaged_files = found.num_damaged_files
    if num_again:
        num_damaged_files = max(num_damaged_files, int(found.is_damaged))
        for why, count in _why_again(past, found, num_cached, num_again, is_damaged=num_damaged_files > 0):
            reasons[why] = reasons.get(why, 0) + count
    return Start(
        found.cache,
        found.num_live,
        num_cached - found.num_live,
        found.num_saved,
        reasons,
        divergence_of(past.token_ids, prompt.token_ids, places.decode) if reasons.keys() - ONLY_NEW else None,
        past.changed_setting if reasons.get("fingerprint") else "",
        num_damaged_files,
    )


def _take(
    places: Places, conversation: Conversation, path: Sequence[Message], prompt: Prompt
) -> tuple[LiveCache | None, str]:
    """The conversation's cache, lent, in the kind that is wanted now; and how the kind changed since its last
    turn, in words. Where there is none, dense rows on disk become one. A cache of another kind that cannot be
    converted is given up, once the prompt's cache is known to fit. Raises MemoryLimit."""
    lent = places.live.take(conversation.id)
    if _is_to_be_made(places, lent):
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
    lost = _why_left(lent, conversation, path)
    lent.cache.crop_to(common)
    cut = replace(lent, num_saved=min(lent.num_saved, common), num_allowed=None, lost=lost)
    return converted(places.live, places.disk, places.new_cache, cut, conversation)


def _is_to_be_made(places: Places, live: LiveCache | None) -> bool:
    """Whether the conversation has no cache of the wanted kind yet."""
    return live is None or live.cache.settings != places.settings


def _saved_dense(
    places: Places, conversation: Conversation, usable_ids: Sequence[int], lent: LiveCache | None
) -> LiveCache | None:
    """Dense rows from the disk, where it has more of them than there are of the wanted kind or to be had of
    the lent cache, and memory has room; else the lent cache."""
    chain = _dense_chain(places, conversation, usable_ids, wait=True)
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


def _dense_chain(
    places: Places, conversation: Conversation, usable_ids: Sequence[int], *, wait: bool
) -> Chain | None:
    """What the disk has of these tokens in dense rows; None when there is no less of the wanted kind."""
    if places.dense is None:
        return None
    dense = _saved_beginning(places.dense, conversation, usable_ids, 0, wait=wait)
    live = places.live.num_usable(conversation.owner, places.settings, conversation.id, usable_ids)
    packed = _saved_beginning(places, conversation, usable_ids, live, wait=False)
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


def _past(
    places: Places,
    lent: LiveCache | None,
    conversation: Conversation,
    path: Sequence[Message],
    prompt: Prompt,
    setting: str,
) -> _Past:
    """`setting`: how the kind of cache changed since the conversation's last turn, if it did."""
    if lent is None:
        if not setting and places.disk is not None:
            setting = places.disk.changed_field(conversation.id)
        saved = places.disk.last_path(conversation.id) if places.disk is not None else ()
        return _Past(0, 0, False, _why_gone(places, conversation, setting), saved, setting)
    common = lent.num_common(prompt.token_ids[:-1])
    own = common if lent.cache.can_crop_to(common) else 0
    if lent.is_warmed and common == len(lent.cache):  # what warming did not bring back was lost before it
        return _Past(common, own, False, _why_gone(places, conversation, setting), lent.token_ids, setting)
    if lent.lost is not None and common == len(lent.cache):
        return _Past(common, own, False, lent.lost, lent.token_ids, "")
    extends = common == len(lent.cache) and lent.was_read_for(path)
    return _Past(common, own, extends, _why_left(lent, conversation, path), lent.token_ids, "")


def _beginning(
    places: Places,
    owned: list[LiveCache | None],
    own: int,
    conversation: Conversation,
    prompt: Prompt,
    num_old: int,
) -> _Beginning:
    """The longest beginning of the prompt, one token short of it, that need not be read. `owned` holds the
    lent cache, or what is left of it: nothing, once it was given up."""
    (lent,) = owned
    usable_ids = prompt.token_ids[:-1]
    target = places.live.boundary(conversation.owner, places.settings, usable_ids, lent)
    reach = max(own, len(target[0]) if target else 0)
    chain = _saved_beginning(places, conversation, usable_ids, reach, wait=reach < num_old)
    num_files = lent.num_damaged_files if lent else 0
    num_saved = min(lent.num_saved, lent.num_common(usable_ids)) if lent else 0
    other, shared = _longer_beginning(places, conversation, prompt, max(own + 1, chain.num_tokens))
    rolled: KVCache | None = None
    if target is not None and len(target[0]) >= max(own + 1, chain.num_tokens):
        rolled = rolled_back(places.live, target, lent, places.new_cache, len(prompt))
    if rolled is not None:
        cache = rolled
    elif other is not None:
        owned[0], lent, num_saved = None, None, 0  # given up before its successor is allocated
        cache = other.copy_prefix(shared, len(prompt), places.settings)
    else:
        cache = lent.cache if lent is not None and own else places.new_cache()
        places.live.make_room(cache.nbytes_for(len(prompt)))
        cache.crop_to(own)
        cache.reserve(len(prompt))
    num_saved = min(num_saved, len(cache))
    num_live = len(cache) - (min(own, len(cache), lent.num_from_disk) if lent is not None else 0)
    if places.disk is not None and chain.num_tokens > len(cache):
        loaded = places.disk.load(cache, chain, usable_ids, conversation.id, places.new_cache)
        num_live = 0 if loaded.cache is not cache else min(num_live, loaded.num_kept)
        cache, num_files = loaded.cache, num_files + loaded.num_damaged_files
    num_saved = max(num_saved, min(chain.num_tokens, len(cache)))
    return _Beginning(cache, num_live, num_saved, num_files, chain.evicted, chain.damaged)


def num_remembered(places: Places, conversation: Conversation, usable_ids: Sequence[int]) -> int:
    """How many of these tokens, a prompt without its last one, `start_turn` would find, without lending or
    loading anything. What is lent to a reply that is being written is not seen. From any thread."""
    live = places.live.num_usable(conversation.owner, places.settings, conversation.id, usable_ids)
    saved = _saved_beginning(places, conversation, usable_ids, live, wait=False)
    if _is_to_be_made(places, places.live.kept().get(conversation.id)):
        saved = _dense_chain(places, conversation, usable_ids, wait=False) or saved
    return max(live, saved.num_tokens)


def _saved_beginning(
    places: Places, conversation: Conversation, token_ids: Sequence[int], own: int, *, wait: bool
) -> Chain:
    """What the disk holds of the prompt; not asked when the conversation's own cache has all of it."""
    if places.disk is None or own == len(token_ids):
        return NOTHING
    chain = places.disk.find(conversation.owner, conversation.id, token_ids, wait=wait)
    return chain if places.new_cache().has_rows() else states_at_ends(chain)


def _longer_beginning(
    places: Places, conversation: Conversation, prompt: Prompt, least: int
) -> tuple[KVCache | None, int]:
    """Another of the owner's caches that shares a beginning of at least `least` tokens with the prompt, if
    a copy fits the budget beside it; and how long that beginning is."""
    other, shared = places.live.longest_prefix(conversation.owner, places.settings, prompt.token_ids[:-1])
    if other is None or shared < least:
        return None, 0
    try:
        needed = places.new_cache().nbytes_for(len(prompt))
        places.live.make_room(needed, beside=other)
    except MemoryLimit:
        return None, 0
    return other, shared


def num_computed_before(path: Sequence[Message]) -> int:
    """Prompt tokens that earlier turns on this path computed and kept, as their stored stats say."""
    for message in reversed(path):
        if message.role == "assistant" and message.stats:
            return TurnStats.from_json(message.stats).num_cached_tokens
    return 0


def _why_fresh(origin: Origin, path: Sequence[Message], prompt: Prompt, start: int) -> dict[Reason, int]:
    """Why the tokens from `start` on are read, which no earlier turn had read."""
    end = len(prompt) if origin.replaced else _num_edited(path, prompt)
    num_edited = max(0, end - start)
    reasons: dict[Reason, int] = {"edited": num_edited, "new": len(prompt) - start - num_edited}
    return {reason: count for reason, count in reasons.items() if count}


def _num_edited(path: Sequence[Message], prompt: Prompt) -> int:
    """How far the prompt reaches that a person changed by editing a reply, as long as no turn has read it
    since: up to the end of the last reply, what is behind is new."""
    unread = takewhile(lambda message: not message.stats, reversed(path))
    was_edited = any(message.finish_reason == EDITED for message in unread)
    return prompt.reply_spans[-1][1] if was_edited and prompt.reply_spans else 0


def _why_gone(places: Places, conversation: Conversation, changed_setting: str) -> Reason:
    """Why a conversation has no cache in memory."""
    if changed_setting:
        return "fingerprint"
    return places.live.why_missing(conversation.id) or ("off" if places.disk is None else "restart")


def _why_again(
    past: _Past, found: _Beginning, num_cached: int, num_again: int, *, is_damaged: bool
) -> list[tuple[Reason, int]]:
    """Why tokens that were computed once are read again: what the conversation's cache has in common with the
    prompt because it cannot be cut there, what is behind because the prompt departs from it."""
    if is_damaged or found.is_evicted:
        return [("damaged" if is_damaged else "evicted", num_again)]
    num_held = min(num_again, max(0, past.common - num_cached)) if past.own < past.common else 0
    counts: list[tuple[Reason, int]] = [("not_croppable", num_held), (past.again, num_again - num_held)]
    return [each for each in counts if each[1]]


def _why_left(lent: LiveCache, conversation: Conversation, path: Sequence[Message]) -> Reason:
    """Why the prompt departs from a conversation's cache. One whose last reply is on the path was read for
    this very past: then only the template can have rendered it differently. Otherwise it belongs to another
    branch."""
    if lent.system_prompt != conversation.system_prompt:
        return "system_prompt"
    return "template" if lent.was_read_for(path) else "evicted"

"""Where a turn starts from: the longest beginning of its prompt that need not be read, and why the rest is.

Three places are asked: the conversation's own live cache, cropped where the prompt departs from it; the
other live caches of the same owner, whose rows are copied; and the disk, whose rows are loaded behind what a
live cache already holds. The longest wins. At least one token is always left to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from cache_store.records import EDITED, Conversation, Message
from chat.divergence import divergence_of
from chat.errors import MemoryLimit
from chat.kv_cache import KVCache
from chat.lending import dense_chain, is_to_be_made, take, why_left
from chat.live_caches import LiveCache
from chat.places import Places, saved_beginning
from chat.prompt import Prompt
from chat.rollback import rolled_back
from chat.stats import Divergence, Reason, TurnStats

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
    lent, setting = take(places, conversation, path, prompt)
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
    return _Past(common, own, extends, why_left(lent, conversation, path), lent.token_ids, "")


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
    chain = saved_beginning(places, conversation, usable_ids, reach, wait=reach < num_old)
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
    saved = saved_beginning(places, conversation, usable_ids, live, wait=False)
    if is_to_be_made(places, places.live.kept().get(conversation.id)):
        saved = dense_chain(places, conversation, usable_ids, wait=False) or saved
    return max(live, saved.num_tokens)


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

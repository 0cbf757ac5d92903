"""Where a turn starts from: the longest beginning of its prompt that need not be read, and why the rest is.

Three places are asked: the conversation's own live cache, cropped where the prompt departs from it; the
other live caches of the same owner, whose rows are copied; and the disk, whose rows are loaded behind what a
live cache already holds. The longest wins. At least one token is always left to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cache_store.records import Chain, Conversation, Message
from chat.disk import NOTHING, DiskCaches, states_at_ends
from chat.divergence import Decode, divergence_of
from chat.errors import MemoryLimit
from chat.kv_cache import KVCache
from chat.live_caches import LiveCache, LiveCaches
from chat.prompt import Prompt
from chat.stats import Divergence, Reason, TurnStats

ONLY_NEW: frozenset[Reason] = frozenset({"new", "boundary"})
"""Reasons that need no explanation: nothing that was read before was changed or lost."""


@dataclass(frozen=True, slots=True)
class Origin:
    """How a reply came to be due: `question_edited` when the last message replaced another one;
    `regenerated` when the reply is not the first to its question, of whose prompt earlier ones had read
    `num_read_before` tokens."""

    question_edited: bool = False
    regenerated: bool = False
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
    """Where caches come from: those in RAM, those on disk (None: saving is off), and new ones, which take
    `bytes_per_token` once they hold something. `decode` turns ids into the text shown for a divergence."""

    live: LiveCaches
    disk: DiskCaches | None
    new_cache: Callable[[], KVCache]
    bytes_per_token: int
    decode: Decode


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
    live = places.live
    limit = len(prompt) - 1
    usable_ids = prompt.token_ids[:limit]
    lent = live.take(conversation.id)
    common = lent.cache.num_common(usable_ids) if lent else 0
    own = common if lent and lent.cache.can_crop_to(common) else 0
    extends = lent is not None and common == len(lent.cache) and lent.was_read_for(path)
    old_ids = lent.cache.token_ids if lent else _saved_past(places, conversation)
    changed_setting = _changed_setting(places, conversation) if lent is None else ""
    again = _why_again(places, lent, common, conversation, path, changed_setting)
    num_saved = min(lent.num_saved, own) if lent else 0
    try:
        chain = _saved_beginning(places, conversation, usable_ids, own, wait=own < min(num_old, limit))
        other, shared = _longer_beginning(places, conversation, prompt, max(own, chain.num_tokens))
        if other is not None:
            lent = None  # given up before its successor is allocated
            cache = other.copy_prefix(shared, len(prompt))
            num_saved = 0
        else:
            cache = lent.cache if lent is not None and own else places.new_cache()
            live.make_room(cache.nbytes_for(len(prompt), places.bytes_per_token))
            cache.crop_to(own)
            cache.reserve(len(prompt))
        num_live, num_damaged, num_files = len(cache), 0, 0
        if places.disk is not None and chain.num_tokens > num_live:
            loaded = places.disk.load(cache, chain, usable_ids, conversation.id, places.new_cache)
            num_live = 0 if loaded.cache is not cache else min(num_live, loaded.num_kept)
            cache, num_damaged, num_files = loaded.cache, loaded.num_damaged, loaded.num_damaged_files
    except BaseException:
        if lent is not None:
            live.keep(conversation.id, lent)
        raise
    num_saved = max(num_saved, min(chain.num_tokens, len(cache)))
    # A cache that was a plain beginning of the prompt held all that was ever computed of it.
    num_again = 0 if extends else max(0, min(num_old, limit) - len(cache))
    num_fresh = len(prompt) - len(cache) - num_again
    reasons: dict[Reason, int] = {_why_fresh(origin, len(cache) == limit): num_fresh}
    if num_again:
        why = "damaged" if num_damaged else "evicted" if chain.evicted else again
        reasons[why] = reasons.get(why, 0) + num_again
    return Start(
        cache,
        num_live,
        len(cache) - num_live,
        num_saved,
        reasons,
        divergence_of(old_ids, prompt.token_ids, places.decode) if reasons.keys() - ONLY_NEW else None,
        changed_setting if reasons.get("fingerprint") else "",
        num_files,
    )


def _saved_beginning(
    places: Places, conversation: Conversation, token_ids: Sequence[int], own: int, *, wait: bool
) -> Chain:
    """What the disk holds of the prompt; not asked when the conversation's own cache has all of it."""
    if places.disk is None or own == len(token_ids):
        return NOTHING
    chain = places.disk.find(conversation.owner, conversation.id, token_ids, wait=wait)
    return chain if places.new_cache().has_rows() else states_at_ends(chain)


def _longer_beginning(
    places: Places, conversation: Conversation, prompt: Prompt, known: int
) -> tuple[KVCache | None, int]:
    """Another of the owner's caches that shares a longer beginning with the prompt than the `known` one, if
    a copy fits the budget beside it; and how long that beginning is."""
    other, shared = places.live.longest_prefix(conversation.owner, prompt.token_ids[:-1])
    if other is None or shared <= known:
        return None, 0
    try:
        needed = places.new_cache().nbytes_for(len(prompt), places.bytes_per_token)
        places.live.make_room(needed, beside=other)
    except MemoryLimit:
        return None, 0
    return other, shared


def num_computed_before(path: Sequence[Message], origin: Origin) -> int:
    """Prompt tokens that earlier turns on this path computed and kept, as their stored stats say."""
    if origin.regenerated:
        return origin.num_read_before
    for message in reversed(path):
        if message.role == "assistant" and message.stats:
            return TurnStats.from_json(message.stats).num_cached_tokens
    return 0


def _why_fresh(origin: Origin, only_the_last: bool) -> Reason:
    if origin.regenerated and only_the_last:
        return "boundary"
    return "edited" if origin.question_edited else "new"


def _saved_past(places: Places, conversation: Conversation) -> tuple[int, ...]:
    """The ids that the conversation's last saved turn had read; empty when none is known."""
    return places.disk.last_path(conversation.id) if places.disk is not None else ()


def _changed_setting(places: Places, conversation: Conversation) -> str:
    return places.disk.changed_field(conversation.id) if places.disk is not None else ""


def _why_again(
    places: Places,
    lent: LiveCache | None,
    common: int,
    conversation: Conversation,
    path: Sequence[Message],
    changed_setting: str,
) -> Reason:
    """A cache whose last reply is on the path was read for this very past: then only the template can have
    rendered it differently. Otherwise it belongs to another branch."""
    if lent is None:
        if changed_setting:
            return "fingerprint"
        return places.live.why_missing(conversation.id) or ("off" if places.disk is None else "restart")
    if lent.system_prompt != conversation.system_prompt:
        return "edited"
    if not lent.cache.can_crop_to(common):
        return "not_croppable"
    return "template" if lent.was_read_for(path) else "evicted"

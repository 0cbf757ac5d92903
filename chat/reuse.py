"""Where a turn starts from: the longest beginning of its prompt that need not be read, and why the rest is.

Two places are asked: the conversation's own live cache, cropped where the prompt departs from it, and the
other live caches of the same owner, whose rows are copied. At least one token is always left to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cache_store.records import Conversation, Message
from chat.errors import MemoryLimit
from chat.kv_cache import KVCache
from chat.live_caches import LiveCache, LiveCaches
from chat.prompt import Prompt
from chat.stats import Reason, TurnStats


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
    """A cache that holds exactly the first `num_cached` prompt tokens, and why each other one is read."""

    cache: KVCache
    num_cached: int
    reasons: Mapping[Reason, int]


def start_turn(
    live: LiveCaches,
    conversation: Conversation,
    path: Sequence[Message],
    prompt: Prompt,
    *,
    num_old: int,
    origin: Origin,
    new_cache: Callable[[], KVCache],
    bytes_per_token: int,
) -> Start:
    """Lend the best cache out of `live` and cut it to what `prompt` begins with.

    `num_old`: how many prompt tokens an earlier turn on this path computed. Raises MemoryLimit when the
    prompt's cache would exceed the budget alone; the conversation then keeps the cache it had.
    """
    limit = len(prompt) - 1
    usable_ids = prompt.token_ids[:limit]
    lent = live.take(conversation.id)
    common = lent.cache.num_common(usable_ids) if lent else 0
    own = common if lent and lent.cache.can_crop_to(common) else 0
    extends = lent is not None and common == len(lent.cache) and lent.was_read_for(path)
    again = _why_again(live, lent, common, conversation, path)
    try:
        other, shared = _longer_beginning(live, conversation, prompt, own, new_cache, bytes_per_token)
        if other is not None:
            lent = None  # given up before its successor is allocated
            cache = other.copy_prefix(shared, len(prompt))
        else:
            cache = lent.cache if lent is not None and own else new_cache()
            live.make_room(cache.nbytes_for(len(prompt), bytes_per_token))
            cache.crop_to(own)
            cache.reserve(len(prompt))
    except BaseException:
        if lent is not None:
            live.keep(conversation.id, lent)
        raise
    # A cache that was a plain beginning of the prompt held all that was ever computed of it.
    num_again = 0 if extends else max(0, min(num_old, limit) - len(cache))
    num_fresh = len(prompt) - len(cache) - num_again
    reasons: dict[Reason, int] = {_why_fresh(origin, len(cache) == limit): num_fresh}
    if num_again:
        reasons[again] = reasons.get(again, 0) + num_again
    return Start(cache, len(cache), reasons)


def _longer_beginning(
    live: LiveCaches,
    conversation: Conversation,
    prompt: Prompt,
    own: int,
    new_cache: Callable[[], KVCache],
    bytes_per_token: int,
) -> tuple[KVCache | None, int]:
    """Another of the owner's caches that shares a longer beginning with the prompt than our `own`, if a copy
    fits the budget beside it; and how long that beginning is."""
    other, shared = live.longest_prefix(conversation.owner, prompt.token_ids[:-1])
    if other is None or shared <= own:
        return None, 0
    try:
        live.make_room(new_cache().nbytes_for(len(prompt), bytes_per_token), beside=other)
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


def _why_again(
    live: LiveCaches,
    lent: LiveCache | None,
    common: int,
    conversation: Conversation,
    path: Sequence[Message],
) -> Reason:
    """A cache whose last reply is on the path was read for this very past: then only the template can have
    rendered it differently. Otherwise it belongs to another branch."""
    if lent is None:
        return live.why_missing(conversation.id) or "restart"
    if lent.system_prompt != conversation.system_prompt:
        return "edited"
    if not lent.cache.can_crop_to(common):
        return "not_croppable"
    return "template" if lent.was_read_for(path) else "evicted"

"""Where a turn starts from: the longest beginning of its prompt that need not be read, and why the rest is.

Two places are asked: the conversation's own live cache, cropped where the prompt departs from it, and the
other live caches of the same owner, whose rows are copied. At least one token is always left to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cache_store.records import Conversation, Message
from chat.kv_cache import KVCache
from chat.live_caches import LiveCache, LiveCaches
from chat.prompt import Prompt
from chat.stats import Reason


@dataclass(frozen=True, slots=True)
class Origin:
    """How a reply came to be due: `question_edited` when the last message replaced another one,
    `regenerated` when the reply is not the first to its question."""

    question_edited: bool = False
    regenerated: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """A cache that holds exactly the first `num_cached` prompt tokens, and why each other one is read."""

    cache: KVCache
    num_cached: int
    reasons: Mapping[Reason, int]


def start_turn(
    live: LiveCaches,
    conversation: Conversation,
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
    extends = lent is not None and common == len(lent.cache)
    again = _why_again(live, lent, common, conversation, prompt)
    other, shared = live.longest_prefix(conversation.owner, usable_ids)
    try:
        live.make_room((lent.cache if lent else new_cache()).nbytes_for(len(prompt), bytes_per_token))
        if other is not None and shared > own:
            cache = other.copy_prefix(shared)
        elif lent is not None and own:
            cache = lent.cache
            cache.crop_to(own)
        else:
            cache = new_cache()
    except BaseException:
        if lent is not None:
            live.keep(conversation.id, lent)
        raise
    # A cache that was a plain beginning of the prompt held all that was ever computed of it.
    num_again = 0 if extends else max(0, min(num_old, limit) - len(cache))
    num_fresh = len(prompt) - len(cache) - num_again
    reasons: dict[Reason, int] = {_why_fresh(origin, len(cache) == limit): num_fresh}
    if num_again:
        reasons[again] = num_again
    return Start(cache, len(cache), reasons)


def num_computed_before(
    path: Sequence[Message], prompt: Prompt, origin: Origin, eos_token_ids: frozenset[int]
) -> int:
    """Prompt tokens that earlier turns on this path computed: all but the last one for a regenerated
    reply; else up to the last reply's end, whose last sampled token was never fed unless an end-of-turn
    came after it."""
    if origin.regenerated:
        return len(prompt) - 1
    replies = [message for message in path if message.role == "assistant"]
    if not replies:
        return 0
    if not prompt.reply_spans:
        return len(prompt) - 1
    start, end = prompt.reply_spans[-1]
    ids = replies[-1].token_ids
    return end if ids and ids[-1] in eos_token_ids else max(start, end - 1)


def _why_fresh(origin: Origin, only_the_last: bool) -> Reason:
    if origin.regenerated and only_the_last:
        return "boundary"
    return "edited" if origin.question_edited else "new"


def _why_again(
    live: LiveCaches, lent: LiveCache | None, common: int, conversation: Conversation, prompt: Prompt
) -> Reason:
    if lent is None:
        return live.why_missing(conversation.id) or "restart"
    if lent.system_prompt != conversation.system_prompt:
        return "edited"
    if not lent.cache.can_crop_to(common):
        return "not_croppable"
    return "template" if prompt.rewritten else "evicted"

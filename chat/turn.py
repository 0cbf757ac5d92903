"""One reply being read for and written: the loop around prefill and decode.

`read` then `write` are generators; between two of their steps the person's stop, the limits on length and
the memory budget are honoured. `finish_reason` says why the writing ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from chat.engine import decode, prefill
from chat.errors import MemoryLimit
from chat.kv_cache import KVCache
from chat.reply_text import ReplyText
from chat.reuse import Start
from chat.sampler import Sampler
from chat.stats import READ_AGAIN, Reason, TurnStats

FinishReason = Literal["eos", "stop_string", "length", "context", "memory", "stopped"]


@dataclass(frozen=True, slots=True)
class Reading:
    """Prefill progress: `num_read` of `num_to_read` tokens."""

    num_read: int
    num_to_read: int


@dataclass
class Turn:
    """See the module. The last `num_begun` of `prompt_ids` are what the reply begins with.
    `make_room(cache, num_tokens)` raises MemoryLimit when a cache may not grow that far; `began` is the
    `time.perf_counter` at which the job left the queue. `note` goes into the stats."""

    start: Start
    prompt_ids: tuple[int, ...]
    num_begun: int
    text: ReplyText
    sampler: Sampler
    chunk: int
    max_new_tokens: int
    num_context_tokens: int
    make_room: Callable[[KVCache, int], None]
    stop: Callable[[], bool]
    began: float
    queue_s: float
    note: str = ""
    num_saved: int = 0
    finish_reason: FinishReason = "stopped"
    num_read: int = 0
    num_decoded: int = 0
    _first_at: float = 0.0
    _last_at: float = 0.0

    @property
    def cache(self) -> KVCache:
        """The cache this turn works on; lent by `LiveCaches` and to be handed back."""
        return self.start.cache

    def read(self) -> Iterator[Reading]:
        """Prefill what is missing, one token short of the prompt; ends early on stop."""
        missing = self.prompt_ids[self.start.num_cached : -1]
        if self.stop():
            return
        yield Reading(0, len(missing))
        for num_read in prefill(self.cache, missing, self.chunk):
            self.num_read = num_read
            yield Reading(num_read, len(missing))
            if self.stop():
                return

    def write(self) -> Iterator[str]:
        """Decode until something ends the reply; yields text as it becomes certain, often empty."""
        if len(self.cache) != len(self.prompt_ids) - 1:
            return  # reading was stopped
        steps = decode(self.cache, self.prompt_ids[-1], self.sampler)
        while self._may_go_on():
            piece = self.text.push(next(steps))
            self._count()
            yield piece
            if self.text.ended:
                self.finish_reason = "stop_string" if self.text.hit_stop_string else "eos"
                return

    def stats(self, num_cached: int) -> TurnStats:
        """The numbers of this turn as far as it went: a prompt not read to its end counts in part."""
        seconds = self._last_at - self._first_at
        return TurnStats(
            num_prompt_tokens=self.start.num_cached + self.num_read,
            num_live_tokens=self.start.num_live,
            num_disk_tokens=self.start.num_disk,
            num_prefilled_tokens=self.num_read,
            num_reply_tokens=self.num_decoded,
            reasons=_first_of(self.start.reasons, self.num_read),
            queue_s=self.queue_s,
            ttft_s=max(0.0, self._first_at - self.began),
            decode_tokens_per_s=(self.num_decoded - 1) / seconds if seconds > 0 else 0.0,
            num_cached_tokens=num_cached,
            divergence=self.start.divergence,
            changed_setting=self.start.changed_setting,
            num_damaged_files=self.start.num_damaged_files,
            cache_kind=self.cache.settings.kind,
            note=self.note,
        )

    def _may_go_on(self) -> bool:
        if self.stop():
            self.finish_reason = "stopped"
        elif self.num_decoded >= self.max_new_tokens:
            self.finish_reason = "length"
        elif len(self.cache) >= self.num_context_tokens:
            self.finish_reason = "context"
        elif not self._has_room():
            self.finish_reason = "memory"
        else:
            return True
        return False

    def _has_room(self) -> bool:
        if len(self.cache) < self.cache.capacity:
            return True
        try:
            self.make_room(self.cache, len(self.cache) + 1)
        except MemoryLimit:
            return False
        return True

    def _count(self) -> None:
        self._last_at = time.perf_counter()
        if not self.num_decoded:
            self._first_at = self._last_at
            self.num_read += 1  # the step that wrote the first token read the last one of the prompt
        self.num_decoded += 1


def _first_of(reasons: Mapping[Reason, int], num_read: int) -> dict[Reason, int]:
    """The reasons of the first `num_read` tokens: what is read again comes before what is new."""
    left = num_read
    counted: dict[Reason, int] = {}
    for reason, count in sorted(reasons.items(), key=lambda item: item[0] not in READ_AGAIN):
        if taken := min(left, count):
            counted[reason] = taken
            left -= taken
    return counted

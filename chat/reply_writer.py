"""The one operation: bring a conversation's reply from "due" to "there".

Send, edit, regenerate and branch switch only change the message tree; `advance` then renders the selected
path to ids, takes the longest beginning of them that some live cache of the same owner, or the disk, holds,
reads the rest, writes the reply and stores it. Results come up as one generator of events.

Law kept here: whatever happens, the reply's row is finished (done, stopped or failed) and the cache that
goes back to `LiveCaches` holds exactly the ids it names; a cache in doubt is dropped, the text never.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from cache_store.conversations import Conversations
from cache_store.errors import NotFound, StoreError
from cache_store.records import Conversation, Message, Status
from chat.divergence import num_common
from chat.failure import log_and_release, sentence_for
from chat.kind_ladder import is_budget, is_short_of_memory, note_of
from chat.kind_places import KindPlaces
from chat.kv_cache import KVCache
from chat.live_caches import LiveCache, LiveCaches
from chat.model import LoadedModel
from chat.prompt import Prompt
from chat.reply_text import ReplyText
from chat.reuse import Origin, num_computed_before, start_turn
from chat.rollback import rolled_back
from chat.sampler import Sampler
from chat.settings import CacheKind, CacheSettings, SamplingSettings
from chat.stats import TurnStats
from chat.turn import Reading, Turn
from chat.wording import Wording

log = logging.getLogger(__name__)

SHOW_EVERY_S = 0.1
"""New text is stored and shown at most this often: what a person saw is what a crash leaves."""

SAVE_EVERY = 256
"""Rows go to the disk at least once in so many tokens. With as many more on their way there, a crash costs no
more than 512 to be read again, as long as the disk keeps up with the model."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of the reply's text; already stored when it is yielded."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event. `text` is the whole reply; `error` is a sentence when `status` is `failed`."""

    status: Status
    text: str
    error: str | None
    stats: TurnStats | None


Event = Reading | Delta | Ended


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A reply to write, and how. `note` goes into its stats; `is_smaller`: the conversation's kind of cache
    was changed because an earlier attempt ran out of memory."""

    conversation: Conversation
    reply: Message
    origin: Origin
    stop: Callable[[], bool]
    queue_s: float
    began: float
    note: str
    is_smaller: bool = False


class ReplyWriter:
    """See the module. On the inference thread only."""

    def __init__(
        self,
        loaded: LoadedModel,
        store: Conversations,
        live: LiveCaches,
        settings: CacheSettings,
        kinds: KindPlaces,
        wording: Wording,
    ) -> None:
        self.read_s_per_token = 0.0
        """As the newest reading went; 0 before the first."""
        self._loaded = loaded
        self._store = store
        self._live = live
        self._settings = settings
        self._kinds = kinds
        self._wording = wording

    def advance(
        self,
        conversation: Conversation,
        reply: Message,
        *,
        origin: Origin,
        stop: Callable[[], bool],
        queue_s: float = 0.0,
    ) -> Iterator[Event]:
        """Write `reply`, which is a stored, running message. Ends with exactly one `Ended`.

        `stop` is asked between two tokens and between two prefill chunks. Errors do not leave this
        generator: they end the reply as failed, with a sentence. A conversation deleted meanwhile ends it
        as stopped. Out of memory, the reply goes on with a smaller kind of cache where its owner allows that.
        """
        notice = self._kinds.in_use(conversation).notice
        attempt = _Attempt(conversation, reply, origin, stop, queue_s, time.perf_counter(), notice)
        while attempt is not None:
            attempt = yield from self._try(attempt)

    def _try(self, attempt: _Attempt) -> Generator[Event, None, _Attempt | None]:
        """Write a reply to its end; or as far as memory goes, and return how to go on."""
        conversation, reply = attempt.conversation, attempt.reply
        turn: Turn | None = None
        try:
            turn = self._begin(attempt)
            if attempt.is_smaller:
                self._store.set_cache_kind(conversation.owner, conversation.id, conversation.cache_kind)
            yield from self._read(turn, conversation)
            yield from self._show_and_save(turn, conversation, reply)
            if turn.finish_reason == "memory" and (kind := self._smaller_kind(conversation, for_budget=True)):
                return self._with_smaller(attempt, turn, kind)
            yield self._finish(turn, conversation, reply)
        except GeneratorExit:
            raise
        except NotFound:
            self._live.forget(conversation.id)
            yield Ended("stopped", "", None, None)
        except BaseException as error:  # whatever it was: this reply ends, the app goes on
            log_and_release(error)
            is_short = is_short_of_memory(error)
            if is_short and (kind := self._smaller_kind(conversation, for_budget=is_budget(error))):
                return self._with_smaller(attempt, turn, kind)
            yield self._fail(turn, conversation, reply, error)
        return None

    def _smaller_kind(self, conversation: Conversation, *, for_budget: bool) -> CacheKind | None:
        """One step down from the conversation's kind, if its owner allows it."""
        try:
            if not self._store.may_shrink_caches(conversation.owner):
                return None
        except StoreError as error:
            log.warning("whether a smaller cache is allowed could not be read: %s", error)
            return None
        return self._kinds.smaller_than(self._kinds.in_use(conversation).kind, for_budget=for_budget)

    def _with_smaller(self, attempt: _Attempt, turn: Turn | None, kind: CacheKind) -> _Attempt:
        """Go on behind what is written already. The cache, as far as it came, is there to be converted."""
        conversation, reply, num_read = attempt.conversation, attempt.reply, 0
        if turn is not None:
            num_read = len(turn.cache)
            if turn.cache.recover():
                self._live.keep(conversation.id, self._live_cache(turn, conversation, reply))
            else:
                self._live.forget(conversation.id, "failed")
            reply = self._as_far_as_written(reply)
        return replace(
            attempt,
            conversation=replace(conversation, cache_kind=kind),
            reply=reply,
            origin=replace(attempt.origin, num_read_before=max(attempt.origin.num_read_before, num_read)),
            note=note_of(kind),
            is_smaller=True,
        )

    def _as_far_as_written(self, reply: Message) -> Message:
        """The reply with what was shown of it as its beginning, and as many fewer tokens left to write."""
        try:
            begun = self._store.progress(reply.id)
        except NotFound:  # the next attempt will find out, too
            return reply
        sampling = SamplingSettings.from_json(reply.sampling)
        num_given = len(self._wording.begun_ids(reply.text, reply.token_ids))
        num_left = max(1, sampling.max_new_tokens - len(begun.token_ids) + num_given)
        sampling = replace(sampling, max_new_tokens=num_left)
        return replace(reply, text=begun.text, token_ids=begun.token_ids, sampling=sampling.to_json())

    def _begin(self, attempt: _Attempt) -> Turn:
        conversation, reply, origin = attempt.conversation, attempt.reply, attempt.origin
        assert reply.parent_id is not None
        path = self._store.path_to(conversation.owner, reply.parent_id)
        begun_ids = self._wording.begun_ids(reply.text, reply.token_ids)
        prompt = self._wording.renderer.render(path, conversation.system_prompt).followed_by(begun_ids)
        self._wording.check_context(prompt)
        if not reply.token_ids and begun_ids:
            self._store.save_progress(reply.id, 0, begun_ids, "")  # its text is stored already
        loaded = self._loaded
        sampling = SamplingSettings.from_json(reply.sampling)
        seed = reply.seed if reply.seed is not None else secrets.randbits(63)
        text = ReplyText(
            self._wording.decoder, loaded.tokenizer, loaded.eos_token_ids, sampling.stop_strings, begun_ids
        )
        sampler = Sampler(sampling, seed, prompt.token_ids, loaded.device)
        start = start_turn(  # last, because it lends a cache that must come back
            self._kinds.of(conversation),
            conversation,
            path,
            prompt,
            num_old=self._num_computed_before(path, prompt, conversation.system_prompt, origin),
            origin=origin,
        )
        disk = self._kinds.of_kind(start.cache.settings.kind).disk
        if disk is not None and disk.take_lost(conversation.id):  # rows taken for saved were not
            num_stored = disk.num_stored(conversation.owner, conversation.id, start.cache)
            start = replace(start, num_saved=min(start.num_saved, num_stored))
        return Turn(
            start=start,
            num_saved=start.num_saved,
            prompt_ids=prompt.token_ids,
            num_begun=len(begun_ids),
            text=text,
            sampler=sampler,
            chunk=self._settings.prefill_chunk,
            max_new_tokens=sampling.max_new_tokens,
            num_context_tokens=loaded.num_context_tokens,
            make_room=self._make_room,
            stop=attempt.stop,
            began=attempt.began,
            queue_s=attempt.queue_s,
            note=attempt.note,
        )

    def _num_computed_before(
        self, path: Sequence[Message], prompt: Prompt, system_prompt: str, origin: Origin
    ) -> int:
        """Prompt tokens that earlier turns computed and kept, on this path or, before an edit, beside it."""
        on_path, beside = num_computed_before(path), origin.num_read_before
        if prompt.reply_spans:
            on_path = min(on_path, prompt.reply_spans[-1][1])  # what is behind was never asked before
        if origin.replaced:
            old = self._wording.renderer.render(origin.replaced, system_prompt)
            beside = min(beside, num_common(old.token_ids, prompt.token_ids))
        return max(on_path, beside)

    def _make_room(self, cache: KVCache, num_tokens: int) -> None:
        self._live.make_room(cache.nbytes_for(num_tokens))

    def _read(self, turn: Turn, conversation: Conversation) -> Iterator[Reading]:
        began = time.perf_counter()
        for reading in turn.read():
            yield reading
            if reading.num_read:
                self.read_s_per_token = (time.perf_counter() - began) / reading.num_read
            self._save_rows(turn, conversation, at_least=SAVE_EVERY)
        self._save_rows(turn, conversation, at_least=1)
        self._live.note_boundary(conversation.id, conversation.owner, turn.cache)

    def _save_rows(self, turn: Turn, conversation: Conversation, *, at_least: int) -> None:
        """Hand rows that are not on disk yet to the saver, once there are `at_least` that many."""
        num_new = len(turn.cache) - turn.num_saved
        disk = self._kinds.of_kind(turn.cache.settings.kind).disk
        if disk is None or num_new < at_least or not turn.cache.can_be_saved():
            return
        rows = disk.new_rows(
            conversation.owner, conversation.id, turn.cache, turn.num_saved, self.read_s_per_token
        )
        if disk.save(rows):
            turn.num_saved = len(turn.cache)

    def _show_and_save(self, turn: Turn, conversation: Conversation, reply: Message) -> Iterator[Delta]:
        waiting, num_saved, shown_at = "", turn.num_begun, 0.0
        for piece in turn.write():
            self._save_rows(turn, conversation, at_least=SAVE_EVERY)
            waiting += piece
            now = time.perf_counter()
            if waiting and turn.text.is_whole and now - shown_at >= SHOW_EVERY_S:
                certain = turn.text.certain_ids
                self._store.save_progress(reply.id, num_saved, certain[num_saved:], waiting)
                yield Delta(waiting)
                waiting, num_saved, shown_at = "", len(certain), now

    def _finish(self, turn: Turn, conversation: Conversation, reply: Message) -> Ended:
        ending = turn.text.ending(self._wording.renderer.encode_text)
        num_cached = self._give_back(turn, conversation, reply, ending.num_sampled)
        status: Status = "done" if turn.finish_reason in {"eos", "stop_string"} else "stopped"
        stats = turn.stats(num_cached)
        self._store.finish_reply(
            reply.id,
            token_ids=ending.token_ids,
            text=ending.text,
            status=status,
            finish_reason=turn.finish_reason,
            error=None,
            stats=stats.to_json(),
        )
        return Ended(status, ending.text, None, stats)

    def _fail(
        self, turn: Turn | None, conversation: Conversation, reply: Message, error: BaseException
    ) -> Ended:
        sentence = sentence_for(error)
        text, token_ids, stats = reply.text, reply.token_ids, None
        if turn is not None:
            ending = turn.text.ending(self._wording.renderer.encode_text)
            text, token_ids = ending.text, ending.token_ids
            if turn.cache.recover():
                self._give_back(turn, conversation, reply, ending.num_sampled)
            else:
                self._live.forget(conversation.id, "failed")
            stats = turn.stats(len(turn.cache))
        try:
            self._store.finish_reply(
                reply.id,
                token_ids=token_ids,
                text=text,
                status="failed",
                finish_reason="error",
                error=sentence,
                stats=stats.to_json() if stats else {},
            )
        except NotFound:
            self._live.forget(conversation.id)
        except StoreError as store_error:
            log.error("the failed reply could not be stored either: %s", store_error)
            sentence = f"{sentence} {store_error}"
        return Ended("failed", text, sentence, stats)

    def _give_back(
        self, turn: Turn, conversation: Conversation, reply: Message, num_reply_tokens: int
    ) -> int:
        """Hand the cache back, cut to what the conversation keeps of this reply; how many tokens that is."""
        kept = min(len(turn.cache), len(turn.prompt_ids) - turn.num_begun + num_reply_tokens)
        live = replace(self._live_cache(turn, conversation, reply), num_saved=min(turn.num_saved, kept))
        if not turn.cache.can_crop_to(kept):
            self._give_back_less(conversation, live, kept)
            return kept
        turn.cache.crop_to(kept)
        turn.cache.check()
        turn.num_saved = min(turn.num_saved, kept)
        self._save_rows(turn, conversation, at_least=1)
        self._live.note_boundary(conversation.id, conversation.owner, turn.cache)
        self._live.keep(conversation.id, replace(live, num_saved=turn.num_saved))
        return kept

    def _live_cache(self, turn: Turn, conversation: Conversation, reply: Message) -> LiveCache:
        return LiveCache(
            conversation.owner,
            turn.cache,
            conversation.system_prompt,
            reply.id,
            reply.parent_id or "",
            min(turn.num_saved, len(turn.cache)),
        )

    def _give_back_less(self, conversation: Conversation, live: LiveCache, kept: int) -> None:
        """A reply that ended within a character is a step back, which not every layer can take: then the
        cache goes back to the newest boundary before it, or is given up."""
        places = self._kinds.of_kind(live.cache.settings.kind)
        target = self._live.boundary(conversation.owner, places.settings, live.token_ids[:kept], live)
        rolled = None
        if target is not None:
            rolled = rolled_back(self._live, target, live, places.new_cache, len(target[0]))
        if rolled is None:
            self._live.forget(conversation.id, "not_croppable")
            return
        num_saved = min(live.num_saved, len(rolled))
        self._live.keep(
            conversation.id, replace(live, cache=rolled, num_saved=num_saved, lost="not_croppable")
        )

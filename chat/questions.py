"""The verbs after which a reply is due: send, regenerate, edit, continue.

Each checks first what can be checked without stopping anything, then has the conversation to itself: a reply
that is still being written is stopped and stays, as far as it came, on its own branch. Only a plain message
is refused meanwhile, because it would stand below half a reply. The tree changes in one transaction, and the
reply's `Job` is handed to the worker; no verb waits for the model to write.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import unicodedata
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from cache_store.conversations import Conversations
from cache_store.errors import StoreError
from cache_store.records import EDITED, NOTHING_YET, Beginning, Conversation, Message
from chat.errors import EmptyMessage, NothingToDo
from chat.job import Job
from chat.live_caches import LiveCaches
from chat.reuse import Origin
from chat.saver import Saver
from chat.settings import SamplingSettings
from chat.worker import Task, Worker

log = logging.getLogger(__name__)

STOP_PATIENCE_S = 60.0
"""How long a verb waits for the end of a reply that it stopped: one pass of the model."""

NEW_CHAT = "New chat"
"""The title of a conversation that has not been given one."""

_BUSY = "A reply is still being written in this chat; your text is kept, stop the reply or wait for its end."
_STOPPING = "The reply is taking long to stop; nothing was changed, try again in a moment."
_UNANSWERED = (
    "The last message here has no reply; your text is kept: choose “Write a reply” under that message first,"
    " or edit it."
)
_TITLE_LENGTH = 60
_INVISIBLE = frozenset({"Cc", "Cf", "Zs", "Zl", "Zp"})
"""Unicode categories without ink: controls, formats (zero-width ones), spaces and separators."""

_ENDED_BY_ITSELF = frozenset({"eos", "stop_string"})


class Questions:
    """See the module. Raises `ChatError` or `StoreError` subclasses; their text is for people."""

    def __init__(
        self,
        store: Conversations,
        worker: Worker,
        live: LiveCaches,
        *,
        default_system_prompt: str = "",
        saver: Saver | None = None,
    ) -> None:
        self._store = store
        self._worker = worker
        self._live = live
        self._default_system_prompt = default_system_prompt
        self._saver = saver
        self._verb = threading.Lock()

    def send(
        self,
        owner: str,
        text: str,
        *,
        conversation_id: str | None,
        leaf_id: str | None,
        sampling: SamplingSettings,
        begin_with: str = "",
    ) -> Job:
        """Append a message and start its reply. `conversation_id` None makes a new conversation, titled
        after the text. `leaf_id` is the last message that the sender saw: when the chat has moved on
        since, StaleView is raised and nothing is written. The reply begins with `begin_with`, as ordinary
        text. Also raises NotFound, EmptyMessage, ContextFull, NothingToDo (a reply is still being written, or
        missing), QueueFull, and the ModelError of a failed load."""
        refuse_empty(text)
        beginning = Beginning(begin_with)
        if conversation_id is None:
            return self._send_first(owner, text, sampling, beginning)
        conversation, path, _ = self._store.snapshot(owner, conversation_id)
        self._refuse_busy(conversation_id)
        if path and path[-1].role == "user" and path[-1].id == leaf_id:
            raise NothingToDo(_UNANSWERED)
        self._check_fits(conversation, [*path, question(conversation, text)], beginning)
        with self._verb:
            self._refuse_busy(conversation_id)
            self._worker.check_room()
            turn = self._store.add_turn(
                owner,
                conversation_id,
                parent_id=leaf_id,
                leaf_id=leaf_id,
                text=text,
                sampling=sampling.to_json(),
                seed=_seed(sampling),
                beginning=beginning,
            )
            return self._start(self._titled_after(conversation, path, text), turn.reply, Origin())

    def regenerate(
        self, owner: str, message_id: str, sampling: SamplingSettings, *, begin_with: str = ""
    ) -> Job:
        """A new sibling reply. `message_id` names a reply, or a user message whose reply is wanted. The
        reply begins with `begin_with`, as ordinary text."""
        message = self._store.message(owner, message_id)
        question_id = message.id if message.role == "user" else message.parent_id
        if question_id is None:
            raise NothingToDo("This message has no question before it, so there is nothing to regenerate.")
        return self._another_reply(
            owner, self._store.message(owner, question_id), sampling, Beginning(begin_with)
        )

    def edit(self, owner: str, message_id: str, text: str, sampling: SamplingSettings) -> Job:
        """A new sibling of a user message with other text, and a reply to it; the old branch stays.
        Raises NothingToDo when the text is the same or the message is a reply."""
        refuse_empty(text)
        message = self._store.message(owner, message_id)
        if message.role != "user":
            raise NothingToDo("This is a reply, not a message of yours; nothing was changed.")
        _refuse_same(message, text)
        conversation = self._store.get(owner, message.conversation_id)
        above = self._store.path_to(owner, message.parent_id) if message.parent_id else []
        self._check_fits(conversation, [*above, question(conversation, text)])
        with self._alone(conversation.id):
            self._worker.check_room()
            answers = self._store.answers(owner, message.id)
            turn = self._store.branch_turn(
                owner,
                conversation.id,
                parent_id=message.parent_id,
                text=text,
                sampling=sampling.to_json(),
                seed=_seed(sampling),
            )
            origin = Origin(replaced=(*above, message), num_read_before=_most(answers, "num_prompt_tokens"))
            return self._start(conversation, turn.reply, origin)

    def continue_reply(self, owner: str, message_id: str, sampling: SamplingSettings) -> Job:
        """Go on with a reply that was cut: stopped by a person, by a limit or by an error, or edited.

        The longer reply is a new sibling that begins with exactly the ids of the shorter one, and is shown
        in its place: to a person the same text goes on. The row of the shorter one is never touched, so that
        whatever happens while the rest is written loses nothing of it, what was said below it still follows
        from it, and a continuation that went wrong can be left with one click. Nothing but its last token is
        read again. Raises NothingToDo when it came to its end by itself.
        """
        reply = self._store.message(owner, message_id)
        if reply.role != "assistant" or reply.parent_id is None:
            raise NothingToDo("Only a reply can be continued; nothing was changed.")
        asked = self._store.message(owner, reply.parent_id)
        if reply.status == "running":
            with self._alone(reply.conversation_id):
                reply = self._store.message(owner, message_id)
        if reply.finish_reason in _ENDED_BY_ITSELF:
            raise NothingToDo("This reply came to its end by itself, so there is nothing to continue.")
        return self._another_reply(owner, asked, sampling, shorter(reply))

    def _another_reply(
        self, owner: str, asked: Message, sampling: SamplingSettings, beginning: Beginning
    ) -> Job:
        conversation = self._store.get(owner, asked.conversation_id)
        self._check_fits(conversation, self._store.path_to(owner, asked.id), beginning)
        with self._alone(conversation.id):
            self._worker.check_room()
            answers = self._store.answers(owner, asked.id)
            known = [answer for answer in answers if answer.token_ids == beginning.token_ids]
            origin = Origin(
                regenerated=bool(answers),
                num_read_before=max(
                    _most(answers, "num_prompt_tokens"),
                    _most(known if beginning.token_ids else [], "num_cached_tokens"),
                ),
            )
            reply = self._store.add_reply(
                owner, asked.id, sampling=sampling.to_json(), seed=_seed(sampling), beginning=beginning
            )
            return self._start(conversation, reply, origin)

    def _send_first(self, owner: str, text: str, sampling: SamplingSettings, beginning: Beginning) -> Job:
        draft = Conversation("", owner, one_line(text), self._default_system_prompt, 0.0, 0.0)
        self._check_fits(draft, [question(draft, text)], beginning)
        with self._verb:
            self._worker.check_room()
            conversation, turn = self._store.create_with_turn(
                owner,
                title=draft.title,
                system_prompt=draft.system_prompt,
                text=text,
                sampling=sampling.to_json(),
                seed=_seed(sampling),
                beginning=beginning,
            )
            return self._start(conversation, turn.reply, Origin())

    def _titled_after(self, conversation: Conversation, path: Sequence[Message], text: str) -> Conversation:
        """An untitled, empty conversation takes its title from the first message. The message is stored
        already, so a title that could not be written must not keep it from being answered."""
        if path or conversation.title != NEW_CHAT:
            return conversation
        try:
            return self._store.rename(conversation.owner, conversation.id, one_line(text))
        except StoreError as error:
            log.warning("a chat keeps its placeholder title: %s", error)
            return conversation

    # For every verb

    @contextmanager
    def _alone(self, conversation_id: str) -> Generator[None]:
        """Have this conversation to oneself: no other verb at work, no reply being written. One that is, is
        stopped and waited for, outside the lock, so that nothing else waits with us. Raises NothingToDo when
        it does not stop in time."""
        until = time.monotonic() + STOP_PATIENCE_S
        while True:
            self._stop_and_wait(conversation_id, until)
            with self._verb:
                if self._worker.job_of(conversation_id) is None:
                    yield
                    return

    def _stop_and_wait(self, conversation_id: str, until: float) -> None:
        job = self._worker.job_of(conversation_id)
        if job is None:
            return
        self._worker.stop(conversation_id)
        try:
            job.wait_until_ended(max(0.0, until - time.monotonic()))
        except TimeoutError as late:
            raise NothingToDo(_STOPPING) from late

    def _refuse_busy(self, conversation_id: str) -> None:
        if self._worker.job_of(conversation_id) is not None:
            raise NothingToDo(_BUSY)

    def _check_fits(
        self, conversation: Conversation, path: Sequence[Message], beginning: Beginning = NOTHING_YET
    ) -> None:
        """Raises what would refuse the reply before anything is written. Never called with the lock held:
        a long text takes long to tokenize."""
        self._worker.check_room()
        if self._worker.session is not None:
            self._worker.session.check_fits(path, conversation.system_prompt, beginning)

    def _start(self, conversation: Conversation, reply: Message, origin: Origin) -> Job:
        job = Job(conversation.owner, conversation.id, reply.id, reply.text)
        self._worker.submit(Task(job, conversation, reply, origin))
        return job


def refuse_empty(text: str) -> None:
    """Raises EmptyMessage for text without ink."""
    if all(unicodedata.category(character) in _INVISIBLE for character in text):
        raise EmptyMessage("There is nothing to send yet.")


def one_line(text: str) -> str:
    """Text as a title: one line, cut where it is too long."""
    line = " ".join(text.split())
    return line if len(line) <= _TITLE_LENGTH else f"{line[: _TITLE_LENGTH - 1]}…"


def question(conversation: Conversation, text: str) -> Message:
    """A message as it will be, to see what it costs before it is stored."""
    return Message("", conversation.id, None, "user", text, "done", 0.0)


def shorter(reply: Message) -> Beginning:
    """What a continuation of a reply begins with. The end-of-turn of an edited one must go; its text has the
    same ids without it."""
    return Beginning(reply.text, () if reply.finish_reason == EDITED else reply.token_ids)


def _refuse_same(message: Message, text: str) -> None:
    if message.text == text:
        raise NothingToDo("The text is the same as before; nothing was changed.")


def _seed(sampling: SamplingSettings) -> int:
    return secrets.randbits(62) if sampling.seed is None else sampling.seed


def _most(replies: Sequence[Message], name: str) -> int:
    """The highest of a number in the stats of replies, as stored."""
    counts = [reply.stats.get(name, 0) for reply in replies]
    return max((count for count in counts if isinstance(count, int)), default=0)

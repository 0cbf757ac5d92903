"""What a page can ask for: the one door between the user interface and everything below it.

Every method takes the owner first and lets the store check it; an id alone opens nothing. Verbs change
the message tree in one transaction and, when a reply is due, hand a `Job` to the worker; they never
wait for the model.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from cache_store.conversations import ConversationList, Conversations
from cache_store.errors import StoreError
from cache_store.records import Conversation, Message, Siblings
from chat.cache_tree import CacheTree, read_cache_tree
from chat.errors import EmptyMessage, NothingToDo
from chat.job import Job
from chat.live_caches import LiveCaches
from chat.reuse import Origin
from chat.saver import Saver
from chat.settings import SamplingSettings
from chat.worker import Task, Worker

log = logging.getLogger(__name__)

_BUSY = "A reply is still being written in this chat; your text is kept, stop the reply or wait for its end."
_TITLE_LENGTH = 60
_INVISIBLE = frozenset({"Cc", "Cf", "Zs", "Zl", "Zp"})
"""Unicode categories without ink: controls, formats (zero-width ones), spaces and separators."""

SAVING_PATIENCE_S = 1.0
"""How long a look at the caches waits for rows that are on their way to the disk."""

ConversationPath = list[Message]  # inside the class, `list` is the method


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The model as a page shows it. `detail`: a sentence while loading or after a failure.
    `num_context_tokens` and `kv_bytes_per_token` are 0 until it is ready."""

    state: Literal["loading", "ready", "failed"]
    name: str
    detail: str = ""
    device: str = ""
    dtype: str = ""
    num_context_tokens: int = 0
    kv_bytes_per_token: int = 0


@dataclass(frozen=True, slots=True)
class ChatView:
    """One conversation as it stands: the selected path, root first, and the reply on its way if any.

    `siblings` has an entry for every message of the path. `job` is None when nothing is being written.
    """

    conversation: Conversation
    messages: tuple[Message, ...]
    siblings: Mapping[str, Siblings]
    job: Job | None

    @property
    def leaf_id(self) -> str | None:
        """The id of the last message shown; what `Chats.send` compares against."""
        return self.messages[-1].id if self.messages else None


class Chats:
    """See the module. Raises `ChatError` or `StoreError` subclasses; their text is for people."""

    def __init__(
        self,
        store: Conversations,
        worker: Worker,
        live: LiveCaches,
        *,
        model_name: str,
        default_system_prompt: str = "",
        saver: Saver | None = None,
        why_not_saved: str = "",
    ) -> None:
        """Without a `saver` no cache is saved; `why_not_saved` is the sentence for it, empty when that is
        as somebody wished."""
        self._store = store
        self._worker = worker
        self._live = live
        self._model_name = model_name
        self._default_system_prompt = default_system_prompt
        self._saver = saver
        self._why_not_saved = why_not_saved
        self._verb = threading.Lock()

    def model_status(self) -> ModelStatus:
        """How far the model is; cheap enough to poll."""
        error, session = self._worker.load_error, self._worker.session
        if error is not None:
            return ModelStatus("failed", self._model_name, str(error))
        if session is None:
            return ModelStatus("loading", self._model_name, "The model is being loaded.")
        loaded = session.loaded
        return ModelStatus(
            "ready",
            loaded.name,
            device=str(loaded.device),
            dtype=str(loaded.dtype).removeprefix("torch."),
            num_context_tokens=loaded.num_context_tokens,
            kv_bytes_per_token=loaded.kv_bytes_per_token,
        )

    def list(self, owner: str, search: str = "") -> ConversationList:
        """This owner's conversations, last used first; `search` looks in titles and texts."""
        return self._store.list(owner, search)

    def create(self, owner: str, system_prompt: str | None = None) -> Conversation:
        """An empty conversation. `system_prompt` None takes the host's default."""
        prompt = self._default_system_prompt if system_prompt is None else system_prompt
        return self._store.create(owner, title="New chat", system_prompt=prompt)

    def view(self, owner: str, conversation_id: str) -> ChatView:
        """Raises NotFound."""
        view = self._look(owner, conversation_id)
        if view.job is None and any(message.status == "running" for message in view.messages):
            with self._verb:  # a verb may be between storing a message and starting its job
                view = self._look(owner, conversation_id)
        if view.job is None:
            view = replace(view, messages=tuple(map(_not_running, view.messages)))
        return view

    def writing(self, owner: str) -> frozenset[str]:
        """The ids of this owner's conversations whose reply is waiting or being written."""
        return frozenset(job.conversation_id for job in self._worker.jobs_of(owner))

    def send(
        self,
        owner: str,
        text: str,
        *,
        conversation_id: str | None,
        leaf_id: str | None,
        sampling: SamplingSettings,
    ) -> Job:
        """Append a message and start its reply. `conversation_id` None makes a new conversation, titled
        after the text. `leaf_id` is the last message that the sender saw: when the chat has moved on
        since, StaleView is raised and nothing is written. Also raises NotFound, EmptyMessage, ContextFull,
        NothingToDo (a reply is still being written), QueueFull, and the ModelError of a failed load."""
        _refuse_empty(text)
        with self._verb:
            if conversation_id is None:
                return self._send_first(owner, text, sampling)
            conversation, path, _ = self._store.snapshot(owner, conversation_id)
            self._check_can_start(conversation, [*path, _question(conversation, text)])
            seed = _seed(sampling)
            turn = self._store.add_turn(
                owner,
                conversation_id,
                parent_id=leaf_id,
                leaf_id=leaf_id,
                text=text,
                sampling=sampling.to_json(),
                seed=seed,
            )
            return self._start(self._titled_after(conversation, path, text), turn.reply, Origin())

    def regenerate(self, owner: str, message_id: str, sampling: SamplingSettings) -> Job:
        """A new sibling reply. `message_id` names a reply, or a user message whose reply is wanted."""
        with self._verb:
            message = self._store.message(owner, message_id)
            question_id = message.id if message.role == "user" else message.parent_id
            if question_id is None:
                raise NothingToDo(
                    "This message has no question before it, so there is nothing to regenerate."
                )
            conversation = self._store.get(owner, message.conversation_id)
            self._check_can_start(conversation, self._store.path_to(owner, question_id))
            shown = self._store.path(owner, conversation.id)
            answers = [each for each in [message, *shown] if each.parent_id == question_id]
            origin = Origin(
                regenerated=bool(answers),
                num_read_before=max((_num_read(answer) for answer in answers), default=0),
            )
            seed = _seed(sampling)
            reply = self._store.add_reply(owner, question_id, sampling=sampling.to_json(), seed=seed)
            return self._start(conversation, reply, origin)

    def edit(self, owner: str, message_id: str, text: str, sampling: SamplingSettings) -> Job:
        """A new sibling of a user message with other text, and a reply to it; the old branch stays.
        Raises NothingToDo when the text is the same or the message is a reply."""
        _refuse_empty(text)
        with self._verb:
            message = self._store.message(owner, message_id)
            if message.role != "user":
                raise NothingToDo("Only your own messages can be edited; nothing was changed.")
            if message.text == text:
                raise NothingToDo("The text is the same as before; nothing was changed.")
            conversation = self._store.get(owner, message.conversation_id)
            above = self._store.path_to(owner, message.parent_id) if message.parent_id else []
            self._check_can_start(conversation, [*above, _question(conversation, text)])
            turn = self._store.branch_turn(
                owner,
                conversation.id,
                parent_id=message.parent_id,
                text=text,
                sampling=sampling.to_json(),
                seed=_seed(sampling),
            )
            return self._start(conversation, turn.reply, Origin(question_edited=True))

    def select(self, owner: str, message_id: str, step: int) -> ChatView:
        """Show the sibling `step` places further (wrapping round) and the path below it."""
        with self._verb:
            message = self._store.message(owner, message_id)
            self._refuse_busy(message.conversation_id)
            siblings = self._store.siblings(owner, message.conversation_id).get(message_id)
            if siblings is None:
                raise NothingToDo("This message is not shown any more; the page now shows the chat as it is.")
            self._store.select(owner, siblings.ids[(siblings.position + step) % len(siblings.ids)])
        return self.view(owner, message.conversation_id)

    def stop(self, owner: str, conversation_id: str) -> None:
        """Ask the running or queued reply of this conversation to end; nothing to end is fine."""
        self._store.get(owner, conversation_id)
        self._worker.stop(conversation_id)

    def rename(self, owner: str, conversation_id: str, title: str) -> Conversation:
        """An empty title is refused with EmptyMessage."""
        _refuse_empty(title)
        return self._store.rename(owner, conversation_id, _one_line(title))

    def set_system_prompt(self, owner: str, conversation_id: str, text: str) -> Conversation:
        """Takes effect with the next reply; the changed beginning is read again then."""
        return self._store.set_system_prompt(owner, conversation_id, text)

    def delete(self, owner: str, conversation_id: str) -> None:
        """Stops a running reply, then deletes the conversation, its messages and its live cache."""
        with self._verb:
            self._store.get(owner, conversation_id)
            self._worker.stop(conversation_id)
            self._store.delete(owner, conversation_id)
            self._live.forget(conversation_id)
        if self._saver is not None:
            self._saver.forget(conversation_id)

    def saving_notice(self) -> str:
        """Why caches are not being saved right now, as a sentence; empty while all is well."""
        return self._why_not_saved if self._saver is None else self._saver.notice or ""

    def is_saving(self) -> bool:
        """Whether rows are on their way to the disk, so that `saving_notice` may change by itself."""
        return self._saver is not None and not self._saver.is_idle

    def cache_tree(self, owner: str) -> CacheTree:
        """What is kept of this owner's chats in memory and on disk. Rows of a reply that has just ended are
        waited for, for at most `SAVING_PATIENCE_S`."""
        segments = None
        if self._saver is not None:
            segments, until = self._saver.segments, time.monotonic() + SAVING_PATIENCE_S
            for conversation_id in self._live.held_by(owner):
                self._saver.wait_for(conversation_id, max(0.0, until - time.monotonic()))
        return read_cache_tree(owner, self._store, self._live, segments, self._worker.session)

    def close(self) -> None:
        """Stop what is being written, save what is not on disk yet, and end both threads; texts are stored
        by then."""
        self._worker.close()
        if self._saver is not None:
            self._saver.close()

    def _look(self, owner: str, conversation_id: str) -> ChatView:
        job = self._worker.job_of(conversation_id)
        conversation, path, siblings = self._store.snapshot(owner, conversation_id)
        return ChatView(conversation, tuple(path), siblings, job)

    def _send_first(self, owner: str, text: str, sampling: SamplingSettings) -> Job:
        draft = Conversation("", owner, _one_line(text), self._default_system_prompt, 0.0, 0.0)
        self._check_can_start(draft, [_question(draft, text)])
        conversation, turn = self._store.create_with_turn(
            owner,
            title=draft.title,
            system_prompt=draft.system_prompt,
            text=text,
            sampling=sampling.to_json(),
            seed=_seed(sampling),
        )
        return self._start(conversation, turn.reply, Origin())

    def _titled_after(self, conversation: Conversation, path: ConversationPath, text: str) -> Conversation:
        """An untitled, empty conversation takes its title from the first message. The message is stored
        already, so a title that could not be written must not keep it from being answered."""
        if path or conversation.title != "New chat":
            return conversation
        try:
            return self._store.rename(conversation.owner, conversation.id, _one_line(text))
        except StoreError as error:
            log.warning("a chat keeps its placeholder title: %s", error)
            return conversation

    def _check_can_start(self, conversation: Conversation, path: ConversationPath) -> None:
        """Everything that can refuse a reply is asked before anything is written."""
        self._refuse_busy(conversation.id)
        self._worker.check_room()
        if self._worker.session is not None:
            self._worker.session.check_fits(path, conversation.system_prompt)

    def _refuse_busy(self, conversation_id: str) -> None:
        if self._worker.job_of(conversation_id) is not None:
            raise NothingToDo(_BUSY)

    def _start(self, conversation: Conversation, reply: Message, origin: Origin) -> Job:
        job = Job(conversation.owner, conversation.id, reply.id)
        self._worker.submit(Task(job, conversation, reply, origin))
        return job


def _refuse_empty(text: str) -> None:
    if all(unicodedata.category(character) in _INVISIBLE for character in text):
        raise EmptyMessage("There is nothing to send yet.")


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _TITLE_LENGTH else f"{line[: _TITLE_LENGTH - 1]}…"


def _seed(sampling: SamplingSettings) -> int:
    return secrets.randbits(62) if sampling.seed is None else sampling.seed


def _num_read(reply: Message) -> int:
    """Prompt tokens that a reply's turn had in its cache or read, as stored."""
    count = reply.stats.get("num_prompt_tokens", 0)
    return count if isinstance(count, int) else 0


def _question(conversation: Conversation, text: str) -> Message:
    """A message as it will be, to see whether it fits before it is stored."""
    return Message("", conversation.id, None, "user", text, "done", 0.0)


def _not_running(message: Message) -> Message:
    """A row left `running` by a failed write, with nobody writing it, is shown as what it is."""
    return replace(message, status="stopped") if message.status == "running" else message

"""What a page can ask for: the one door between the user interface and everything below it.

Every method takes the owner first and lets the store check it; an id alone opens nothing. The verbs come
from `Questions` (a reply is due), `Branches` (only the tree changes) and `KindChoices` (how a chat's cache is
kept); none of them waits for the model to write.
"""

from __future__ import annotations

import time
from dataclasses import replace

from cache_store.conversations import ConversationList, Conversations
from cache_store.kind_qualities import KindQualities
from cache_store.records import Conversation, Message
from chat.cache_tree import CacheTree, read_cache_tree
from chat.chat_view import ChatView, ModelStatus
from chat.kind_choices import KindChoices
from chat.live_caches import LiveCaches
from chat.questions import NEW_CHAT, one_line, refuse_empty
from chat.saver import Saver
from chat.worker import Worker

SAVING_PATIENCE_S = 1.0
"""How long a look at the caches waits for rows that are on their way to the disk."""


class Chats(KindChoices):
    """See the module. Raises `ChatError` or `StoreError` subclasses; their text is for people."""

    def __init__(
        self,
        store: Conversations,
        worker: Worker,
        live: LiveCaches,
        qualities: KindQualities,
        *,
        model_name: str,
        default_system_prompt: str = "",
        saver: Saver | None = None,
        why_not_saved: str = "",
    ) -> None:
        """Without a `saver` no cache is saved; `why_not_saved` is the sentence for it, empty when that is
        as somebody wished."""
        super().__init__(
            store, worker, live, qualities, default_system_prompt=default_system_prompt, saver=saver
        )
        self._model_name = model_name
        self._why_not_saved = why_not_saved

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
        return self._store.create(owner, title=NEW_CHAT, system_prompt=prompt)

    def view(self, owner: str, conversation_id: str) -> ChatView:
        """Raises NotFound."""
        view = self._look(owner, conversation_id)
        if view.job is None and any(message.status == "running" for message in view.messages):
            with self._verb:  # a verb may be between storing a message and starting its job
                view = self._look(owner, conversation_id)
        if view.job is None:
            view = replace(view, messages=tuple(map(_not_running, view.messages)))
        return view

    def warm(self, owner: str, conversation_id: str) -> None:
        """Somebody looks at this conversation: what is saved of its cache goes back into memory as soon as
        nothing else is to do, so that the next message need not wait for it. Raises NotFound."""
        conversation = self._store.get(owner, conversation_id)
        if not self._live.holds(conversation_id):
            self._worker.warm(conversation)

    def writing(self, owner: str) -> frozenset[str]:
        """The ids of this owner's conversations whose reply is waiting or being written."""
        return frozenset(job.conversation_id for job in self._worker.jobs_of(owner))

    def stop(self, owner: str, conversation_id: str) -> None:
        """Ask the running or queued reply of this conversation to end; nothing to end is fine."""
        self._store.get(owner, conversation_id)
        self._worker.stop(conversation_id)

    def rename(self, owner: str, conversation_id: str, title: str) -> Conversation:
        """An empty title is refused with EmptyMessage."""
        refuse_empty(title)
        return self._store.rename(owner, conversation_id, one_line(title))

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


def _not_running(message: Message) -> Message:
    """A row left `running` by a failed write, with nobody writing it, is shown as what it is."""
    return replace(message, status="stopped") if message.status == "running" else message

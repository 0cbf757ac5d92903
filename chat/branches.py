"""The verbs that only change which messages there are and which are shown: no reply is due after them.

What a verb leaves to be read again is read with the next message; `cost_of` tells beforehand how much that
will be.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

from cache_store.records import NOTHING_YET, Beginning, Conversation, Message
from chat.chat_view import ChatView, Cost, Undone
from chat.errors import NothingToDo
from chat.questions import NEW_CHAT, Questions, one_line, question, refuse_empty, shorter

CostlyVerb = Literal["regenerate", "edit", "edit_reply", "continue", "show"]
"""What `cost_of` knows; `show` is `select` or `redo`, by the message that would be shown."""

_FORK_MARK = " (fork)"
_TITLE_LENGTH = 60


class Branches(Questions):
    """See the module. Raises `ChatError` or `StoreError` subclasses; their text is for people."""

    @abstractmethod
    def view(self, owner: str, conversation_id: str) -> ChatView:
        """The conversation as it stands now. Raises NotFound."""

    def edit_reply(self, owner: str, message_id: str, text: str, *, keep_rest: bool) -> ChatView:
        """A new sibling of a reply with a person's text, marked as edited; the old branch stays.

        `keep_rest`: what follows is kept too, as copies, and read on the corrected words with the next
        message; else the chat ends with the edited reply. Raises NothingToDo when the text is the same or
        the message is not a reply, EmptyMessage, PromptFailed, NotFound.
        """
        refuse_empty(text)
        message = self._store.message(owner, message_id)
        if message.role != "assistant":
            raise NothingToDo("This is a message of yours, not a reply; nothing was changed.")
        if message.text == text and message.status != "running":
            raise NothingToDo("The text is the same as before; nothing was changed.")
        session = self._worker.session
        token_ids = session.wording.ids_of_reply(text) if session is not None else ()
        with self._alone(message.conversation_id):
            self._store.add_edited_reply(
                owner, message_id, text=text, token_ids=token_ids, keep_rest=keep_rest
            )
        return self.view(owner, message.conversation_id)

    def select(self, owner: str, message_id: str, step: int) -> ChatView:
        """Show the sibling `step` places further (wrapping round) and the path below it. A reply on its way
        is written on in its own place, shown or not. Raises NothingToDo when the message is not shown."""
        with self._verb:
            message = self._store.message(owner, message_id)
            siblings = self._store.siblings(owner, message.conversation_id).get(message_id)
            if siblings is None:
                raise NothingToDo("This message is not shown any more; the page now shows the chat as it is.")
            self._store.select(owner, siblings.ids[(siblings.position + step) % len(siblings.ids)])
        return self.view(owner, message.conversation_id)

    def undo(self, owner: str, conversation_id: str) -> Undone:
        """Show the chat as it was before the last question, whose text is handed back; nothing is deleted.
        Raises NothingToDo when there is no question, NotFound."""
        self._store.get(owner, conversation_id)
        with self._alone(conversation_id):
            undone = self._store.undo(owner, conversation_id)
        if undone is None:
            raise NothingToDo("There is no message to undo in this chat.")
        return Undone(self.view(owner, conversation_id), undone.text)

    def redo(self, owner: str, conversation_id: str) -> ChatView:
        """Show again what was undone last, and what followed it. Raises NothingToDo, NotFound."""
        self._store.get(owner, conversation_id)
        with self._alone(conversation_id):
            redone = self._store.redo(owner, conversation_id)
        if redone is None:
            raise NothingToDo("There is nothing to bring back in this chat.")
        return self.view(owner, conversation_id)

    def can_redo(self, owner: str, conversation_id: str) -> bool:
        """Whether `redo` has something to bring back. Raises NotFound."""
        return self._store.undone(owner, conversation_id) is not None

    def delete_branch(self, owner: str, message_id: str) -> ChatView:
        """Delete a message and everything below it for ever: texts, rows in saved caches that no other
        message needs, and what other messages' stats quote of it. A sibling is shown in its place, or the
        chat ends above it. Raises NotFound, and DiskRefused when traces could not be wiped."""
        message = self._store.message(owner, message_id)
        conversation = self._store.get(owner, message.conversation_id)
        session = self._worker.session
        if session is not None:
            session.paths_without(conversation, message_id)  # tokenized here, not with the lock held
        with self._alone(conversation.id):
            title = self._title_without(owner, conversation, message)
            if session is None:
                self._forget_saved(conversation.id)
                self._store.delete_branch(owner, message_id, title)
            else:
                paths = session.paths_without(conversation, message_id)
                session.keep_paths(conversation, paths)
                self._store.delete_branch(owner, message_id, title)
                self._live.keep_paths(conversation.id, paths)  # what was warmed meanwhile, too
        return self.view(owner, conversation.id)

    def fork(self, owner: str, message_id: str) -> Conversation:
        """A new conversation with copies of the path down to this message. Raises NotFound."""
        message = self._store.message(owner, message_id)
        title = self._store.get(owner, message.conversation_id).title.removesuffix(_FORK_MARK)
        title = one_line(title)[: _TITLE_LENGTH - len(_FORK_MARK)] + _FORK_MARK
        if message.status == "running":
            with self._alone(message.conversation_id):
                return self._store.fork(owner, message_id, title=title)
        return self._store.fork(owner, message_id, title=title)

    def cost_of(
        self, owner: str, verb: CostlyVerb, message_id: str, text: str = "", *, keep_rest: bool = True
    ) -> Cost | None:
        """What a verb on this message would make the model read, at once or with the next message; `text`
        and `keep_rest` are those of an edit; a regenerated reply begins with `text`. No tensor is touched.
        None while no model is loaded. Raises NotFound, PromptFailed."""
        session = self._worker.session
        message = self._store.message(owner, message_id)
        if session is None:
            return None
        conversation = self._store.get(owner, message.conversation_id)
        above = self._store.path_to(owner, message.parent_id) if message.parent_id else []
        beginning = NOTHING_YET
        match verb:
            case "regenerate":
                path = above if message.role == "assistant" else [*above, message]
                beginning = Beginning(text)
            case "edit":
                path = [*above, question(conversation, text)]
            case "edit_reply":
                edited = Message("", conversation.id, message.parent_id, "assistant", text, "done", 0.0)
                below = self._store.path_below(owner, message_id) if keep_rest else []
                path = [*above, edited, *below]
            case "continue":
                path, beginning = above, shorter(message)
            case "show":
                path = [*above, message, *self._store.path_below(owner, message_id)]
        return session.cost_of(conversation, path, beginning)

    def _title_without(self, owner: str, conversation: Conversation, message: Message) -> str | None:
        """A new title for a chat that was named after a first message that goes; None: it keeps its own."""
        if message.parent_id is not None or conversation.title != one_line(message.text):
            return None
        left: Sequence[Sequence[Message]] = self._store.leaves(owner, conversation.id, message.id)
        return one_line(left[0][0].text) if left else NEW_CHAT

    def _forget_saved(self, conversation_id: str) -> None:
        """Without the model's tokenizer nobody can tell which saved rows the rest of a chat needs."""
        self._live.forget(conversation_id)
        if self._saver is not None:
            self._saver.keep_paths(conversation_id, [], [])

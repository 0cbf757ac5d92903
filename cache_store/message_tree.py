"""The trees of messages: what is read of them and every way to change one.

Every method takes the owner first. A row that is missing, was deleted, or belongs to somebody else raises
NotFound with one and the same sentence, so an id tells nothing to a stranger. Each method is one
transaction, and it is on the disk when the method returns.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cache_store import tree
from cache_store.branch_removal import remove_branch
from cache_store.database import Database
from cache_store.errors import DiskRefused, NotFound, StaleView
from cache_store.message_copies import copy_run
from cache_store.records import EDITED, NOTHING_YET, Beginning, Conversation, Json, Message, Siblings, Turn
from cache_store.rows import conversation_from_row, message_from_row, row_from_message, storable
from cache_store.running_replies import RunningReplies
from cache_store.tree import NOT_FOUND

_STALE = (
    "This chat has moved on in another window; your message was not stored; "
    "look at the newest messages, then send it again."
)
_TRACES = (
    "The {what} is deleted, but the disk did not let its last traces be wiped; "
    "they go with the next delete, or when Keepwarm is closed."
)


MessageList = list[Message]


class MessageTree(RunningReplies):
    """What `Conversations` does with messages. Safe to use from any thread."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        super().__init__(database)
        self._clock = clock

    def get(self, owner: str, conversation_id: str) -> Conversation:
        """Raises NotFound."""
        row = self._database.row(
            "SELECT * FROM conversations WHERE id = ? AND owner = ?", [conversation_id, owner]
        )
        if row is None:
            raise NotFound(NOT_FOUND)
        return conversation_from_row(row)

    # Reading the tree

    def message(self, owner: str, message_id: str) -> Message:
        """One message, shown or not. Raises NotFound."""
        return message_from_row(self._message_row(owner, message_id))

    def path(self, owner: str, conversation_id: str) -> MessageList:
        """The messages shown, from the first to the leaf. Raises NotFound."""
        with self._database.transaction():
            self.get(owner, conversation_id)
            return tree.selected_path(self._database, conversation_id)

    def siblings(self, owner: str, conversation_id: str) -> dict[str, Siblings]:
        """Where each message of `path` stands among its siblings, in order of creation. Raises NotFound."""
        with self._database.transaction():
            self.get(owner, conversation_id)
            return tree.siblings(self._database, conversation_id)

    def snapshot(
        self, owner: str, conversation_id: str
    ) -> tuple[Conversation, MessageList, dict[str, Siblings]]:
        """`get`, `path` and `siblings` as of one moment, so that they fit together. Raises NotFound."""
        with self._database.transaction():
            return (
                self.get(owner, conversation_id),
                tree.selected_path(self._database, conversation_id),
                tree.siblings(self._database, conversation_id),
            )

    def path_to(self, owner: str, message_id: str) -> MessageList:
        """The messages from the first one down to this one, whatever is shown. Raises NotFound."""
        with self._database.transaction():
            self._message_row(owner, message_id)
            return tree.path_to(self._database, message_id)

    def path_below(self, owner: str, message_id: str) -> MessageList:
        """What is shown below this message whenever it is shown itself, without it. Raises NotFound."""
        with self._database.transaction():
            self._message_row(owner, message_id)
            return tree.path_below(self._database, message_id)

    def answers(self, owner: str, question_id: str) -> MessageList:
        """All replies to a user message, in order of creation. Raises NotFound."""
        with self._database.transaction():
            question = self.message(owner, question_id)
            return tree.children(self._database, question.conversation_id, question.id)

    def leaves(self, owner: str, conversation_id: str, without: str | None = None) -> list[MessageList]:
        """Every path from a first message to one that has nothing below it; `without` this message and all
        below it, if given. Raises NotFound."""
        with self._database.transaction():
            self.get(owner, conversation_id)
            return tree.all_paths(self._database, conversation_id, without)

    def undone(self, owner: str, conversation_id: str) -> Message | None:
        """The question that `redo` would bring back; None when there is none. Raises NotFound."""
        with self._database.transaction():
            self.get(owner, conversation_id)
            return tree.undone(self._database, conversation_id)

    # Changing the tree

    def select(self, owner: str, message_id: str) -> None:
        """Show this message and those above it; what was shown below it comes back. Raises NotFound."""
        with self._database.transaction():
            self._message_row(owner, message_id)
            tree.select(self._database, message_id)

    def add_turn(
        self,
        owner: str,
        conversation_id: str,
        *,
        parent_id: str | None,
        leaf_id: str | None,
        text: str,
        sampling: Mapping[str, Json],
        seed: int | None,
        beginning: Beginning = NOTHING_YET,
    ) -> Turn:
        """A user message below `parent_id` (None: a first message) and a running reply; both are shown.

        `leaf_id` is the last message that the sender saw. Raises NotFound; StaleView when it is not the last
        one any more; ValueError when `parent_id` is a user message.
        """
        with self._database.transaction():
            self.get(owner, conversation_id)
            if tree.leaf_id(self._database, conversation_id) != leaf_id:
                raise StaleView(_STALE)
            return self._add_turn(conversation_id, parent_id, text, sampling, seed, beginning)

    def branch_turn(
        self,
        owner: str,
        conversation_id: str,
        *,
        parent_id: str | None,
        text: str,
        sampling: Mapping[str, Json],
        seed: int | None,
    ) -> Turn:
        """`add_turn` wherever the chat stands now: for an edit, whose parent says where it belongs."""
        with self._database.transaction():
            self.get(owner, conversation_id)
            return self._add_turn(conversation_id, parent_id, text, sampling, seed)

    def add_reply(
        self,
        owner: str,
        parent_id: str,
        *,
        sampling: Mapping[str, Json],
        seed: int | None,
        beginning: Beginning = NOTHING_YET,
    ) -> Message:
        """One more running reply to a user message, shown together with everything above it.

        Raises NotFound; ValueError when `parent_id` is not a user message.
        """
        with self._database.transaction():
            parent = message_from_row(self._message_row(owner, parent_id))
            reply = tree.add_reply(self._database, parent, sampling, seed, self._clock(), beginning)
            self._show(reply)
            return reply

    def add_edited_reply(
        self, owner: str, message_id: str, *, text: str, token_ids: Sequence[int], keep_rest: bool
    ) -> Message:
        """A finished sibling of a reply with a person's text, shown; the reply and all below it stay.

        `keep_rest`: copies of what was shown below the reply follow it. Raises NotFound; ValueError for a
        user message.
        """
        with self._database.transaction():
            old = message_from_row(self._message_row(owner, message_id))
            if old.role != "assistant":
                raise ValueError("only a reply can be edited as one")
            edited = Message(
                id=uuid.uuid4().hex,
                conversation_id=old.conversation_id,
                parent_id=old.parent_id,
                role="assistant",
                text=storable(text),
                status="done",
                created_at=self._clock(),
                token_ids=tuple(token_ids),
                finish_reason=EDITED,
            )
            self._database.insert("messages", row_from_message(edited))
            rest = tree.path_below(self._database, old.id) if keep_rest else []
            copy_run(self._database, rest, edited, with_stats=False)
            self._show(edited)
            return edited

    def undo(self, owner: str, conversation_id: str) -> Message | None:
        """End what is shown above its last user message, which is returned; nothing is deleted.

        None when no user message is shown. Raises NotFound.
        """
        with self._database.transaction():
            path = self.path(owner, conversation_id)
            question = next((message for message in reversed(path) if message.role == "user"), None)
            if question is not None:
                tree.undo(self._database, question.id)
            return question

    def redo(self, owner: str, conversation_id: str) -> Message | None:
        """Show what was undone last at the end of what is shown, and what was shown below it.

        None when nothing was. Raises NotFound.
        """
        with self._database.transaction():
            question = self.undone(owner, conversation_id)
            if question is not None:
                tree.select(self._database, question.id)
            return question

    def delete_branch(self, owner: str, message_id: str, title: str | None = None) -> None:
        """Delete a message and everything below it, overwrite what they left in the file, and empty the log.

        A sibling is shown in its place; where there is none, the path ends above it. `title` is the chat's
        new one, for a chat that was named after what goes. Raises NotFound, and DiskRefused when the rows
        are gone but the log could not be emptied.
        """
        with self._database.transaction():
            message = self.message(owner, message_id)
            remove_branch(self._database, message)
            if title is not None:
                self._database.execute(
                    "UPDATE conversations SET title = ? WHERE id = ?", [title, message.conversation_id]
                )
        self._wipe("branch")

    # Below: inside a transaction of a method above

    def _message_row(self, owner: str, message_id: str) -> dict[str, Any]:
        row = self._database.row(
            "SELECT m.* FROM messages AS m JOIN conversations AS c ON c.id = m.conversation_id "
            "WHERE m.id = ? AND c.owner = ?",
            [message_id, owner],
        )
        if row is None:
            raise NotFound(NOT_FOUND)
        return row

    def _add_turn(
        self,
        conversation_id: str,
        parent_id: str | None,
        text: str,
        sampling: Mapping[str, Json],
        seed: int | None,
        beginning: Beginning = NOTHING_YET,
    ) -> Turn:
        now = self._clock()
        question = tree.add_question(self._database, conversation_id, parent_id, text, now)
        reply = tree.add_reply(self._database, question, sampling, seed, now, beginning)
        self._show(reply)
        return Turn(question, reply)

    def _show(self, reply: Message) -> None:
        tree.select(self._database, reply.id)
        self._database.execute(
            "UPDATE conversations SET updated_at = ? WHERE id = ?", [reply.created_at, reply.conversation_id]
        )

    def _wipe(self, what: str) -> None:
        try:
            self._database.truncate_log()
        except DiskRefused as exc:
            raise DiskRefused(_TRACES.format(what=what)) from exc

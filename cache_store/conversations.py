"""Conversations and their messages: who may see what, and what is written together.

Every method for people takes the owner first. A row that is missing, was deleted, or belongs to somebody
else raises NotFound with one and the same sentence, so an id tells nothing to a stranger. Each method is
one transaction: a turn is there whole, question and reply, or not at all, and it is on the disk when the
method returns. What `RunningReplies` adds takes no owner: only the inference thread and the start of the
app call it.

Checked by `tests/cache_store`: crashes at every point, threads, strangers, a plain-Python model of the tree.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from cache_store import tree
from cache_store.database import Database, Value
from cache_store.errors import DiskRefused, NotFound, StaleView
from cache_store.records import Conversation, Json, Message, Siblings, Turn
from cache_store.rows import conversation_from_row, message_from_row, storable
from cache_store.running_replies import RunningReplies
from cache_store.tree import NOT_FOUND

ConversationList = list[Conversation]  # inside the class, `list` is the method
MessageList = list[Message]

_STALE = (
    "This chat has moved on in another window; your message was not stored; "
    "look at the newest messages, then send it again."
)
_TRACES = (
    "The chat is deleted, but the disk did not let its last traces be wiped; "
    "they go with the next delete, or when Keepwarm is closed."
)


class Conversations(RunningReplies):
    """The store of chats. Safe to use from any thread; raises `StoreError`s. See the module."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        super().__init__(database)
        self._clock = clock

    # Conversations

    def create(self, owner: str, *, title: str, system_prompt: str = "") -> Conversation:
        """A new, empty conversation."""
        now = self._clock()
        values: dict[str, Value] = {
            "id": uuid.uuid4().hex,
            "owner": storable(owner),
            "created_at": now,
            "updated_at": now,
            "title": storable(title),
            "system_prompt": storable(system_prompt),
        }
        self._database.insert("conversations", values)
        return conversation_from_row(values)

    def create_with_turn(
        self,
        owner: str,
        *,
        title: str,
        system_prompt: str,
        text: str,
        sampling: Mapping[str, Json],
        seed: int | None,
    ) -> tuple[Conversation, Turn]:
        """A new conversation together with its first turn."""
        with self._database.transaction():
            conversation = self.create(owner, title=title, system_prompt=system_prompt)
            turn = self._add_turn(conversation.id, None, text, sampling, seed)
            return self.get(owner, conversation.id), turn

    def get(self, owner: str, conversation_id: str) -> Conversation:
        """Raises NotFound."""
        row = self._database.row(
            "SELECT * FROM conversations WHERE id = ? AND owner = ?", [conversation_id, owner]
        )
        if row is None:
            raise NotFound(NOT_FOUND)
        return conversation_from_row(row)

    def list(self, owner: str, search: str = "", limit: int = 500) -> ConversationList:
        """This owner's conversations, last used first, at most `limit` of them.

        `search` keeps those with that text in the title or in any message, whatever its case and script.
        """
        rows = self._database.rows(
            """
            SELECT * FROM conversations AS c
            WHERE owner = :owner AND (
                :needle = '' OR holds(title, :needle) OR EXISTS (
                    SELECT 1 FROM messages AS m WHERE m.conversation_id = c.id AND holds(m.text, :needle)
                )
            )
            ORDER BY updated_at DESC, number DESC LIMIT :limit
            """,
            {"owner": owner, "needle": storable(search).casefold(), "limit": limit},
        )
        return [conversation_from_row(row) for row in rows]

    def rename(self, owner: str, conversation_id: str, title: str) -> Conversation:
        """Raises NotFound. Its place in the list stays."""
        return self._change(owner, conversation_id, "UPDATE conversations SET title = ? WHERE id = ?", title)

    def set_system_prompt(self, owner: str, conversation_id: str, text: str) -> Conversation:
        """Raises NotFound. Its place in the list stays."""
        return self._change(
            owner, conversation_id, "UPDATE conversations SET system_prompt = ? WHERE id = ?", text
        )

    def delete(self, owner: str, conversation_id: str) -> None:
        """Delete it with all its messages, overwrite what they left in the file, and empty the log.

        Raises NotFound, and DiskRefused when the rows are gone but the log could not be emptied.
        """
        deleted = self._database.execute(
            "DELETE FROM conversations WHERE id = ? AND owner = ?", [conversation_id, owner]
        )
        if not deleted:
            raise NotFound(NOT_FOUND)
        try:
            self._database.truncate_log()
        except DiskRefused as exc:
            raise DiskRefused(_TRACES) from exc

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
    ) -> Turn:
        """A user message below `parent_id` (None: a first message) and a running reply; both are shown.

        `leaf_id` is the last message that the sender saw. Raises NotFound; StaleView when it is not the last
        one any more; ValueError when `parent_id` is a user message.
        """
        with self._database.transaction():
            self.get(owner, conversation_id)
            if tree.leaf_id(self._database, conversation_id) != leaf_id:
                raise StaleView(_STALE)
            return self._add_turn(conversation_id, parent_id, text, sampling, seed)

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
        self, owner: str, parent_id: str, *, sampling: Mapping[str, Json], seed: int | None
    ) -> Message:
        """One more running reply to a user message, shown together with everything above it.

        Raises NotFound; ValueError when `parent_id` is not a user message.
        """
        with self._database.transaction():
            parent = message_from_row(self._message_row(owner, parent_id))
            reply = tree.add_reply(self._database, parent, sampling, seed, self._clock())
            self._show(reply)
            return reply

    # Below: inside a transaction of a method above

    def _change(self, owner: str, conversation_id: str, update: str, text: str) -> Conversation:
        with self._database.transaction():
            self.get(owner, conversation_id)
            self._database.execute(update, [text, conversation_id])
            return self.get(owner, conversation_id)

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
    ) -> Turn:
        now = self._clock()
        question = tree.add_question(self._database, conversation_id, parent_id, text, now)
        reply = tree.add_reply(self._database, question, sampling, seed, now)
        self._show(reply)
        return Turn(question, reply)

    def _show(self, reply: Message) -> None:
        tree.select(self._database, reply.id)
        self._database.execute(
            "UPDATE conversations SET updated_at = ? WHERE id = ?", [reply.created_at, reply.conversation_id]
        )

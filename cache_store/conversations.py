"""Conversations and their messages: who may see what, and what is written together.

Every method for people takes the owner first. A row that is missing, was deleted, or belongs to somebody
else raises NotFound with one and the same sentence, so an id tells nothing to a stranger. Each method is
one transaction: a turn is there whole, question and reply, or not at all, and it is on the disk when the
method returns. What `RunningReplies` adds takes no owner: only the inference thread and the start of the
app call it. What is done to messages is in `MessageTree`.

Checked by `tests/cache_store`: crashes at every point, threads, strangers, a plain-Python model of the tree.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from cache_store.database import Value
from cache_store.errors import NotFound
from cache_store.message_copies import copy_run
from cache_store.message_tree import MessageTree
from cache_store.records import NOTHING_YET, Beginning, Conversation, Json, Turn
from cache_store.rows import conversation_from_row, storable
from cache_store.tree import NOT_FOUND

ConversationList = list[Conversation]  # inside the class, `list` is the method


class Conversations(MessageTree):
    """The store of chats. Safe to use from any thread; raises `StoreError`s. See the module."""

    def create(
        self, owner: str, *, title: str, system_prompt: str = "", cache_kind: str | None = None
    ) -> Conversation:
        """A new, empty conversation."""
        now = self._clock()
        values: dict[str, Value] = {
            "id": uuid.uuid4().hex,
            "owner": storable(owner),
            "created_at": now,
            "updated_at": now,
            "title": storable(title),
            "system_prompt": storable(system_prompt),
            "cache_kind": cache_kind,
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
        beginning: Beginning = NOTHING_YET,
    ) -> tuple[Conversation, Turn]:
        """A new conversation together with its first turn."""
        with self._database.transaction():
            conversation = self.create(owner, title=title, system_prompt=system_prompt)
            turn = self._add_turn(conversation.id, None, text, sampling, seed, beginning)
            return self.get(owner, conversation.id), turn

    def fork(self, owner: str, message_id: str, *, title: str) -> Conversation:
        """A new conversation with copies of the path down to this message, all of it shown, the same
        system prompt and the same kind of cache. Raises NotFound."""
        with self._database.transaction():
            path = self.path_to(owner, message_id)
            source = self.get(owner, path[0].conversation_id)
            made = self.create(
                owner, title=title, system_prompt=source.system_prompt, cache_kind=source.cache_kind
            )
            copy_run(self._database, path, made.id, with_stats=True)
            return made

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

    def set_cache_kind(self, owner: str, conversation_id: str, kind: str | None) -> Conversation:
        """Raises NotFound. Its place in the list stays."""
        return self._change(
            owner, conversation_id, "UPDATE conversations SET cache_kind = ? WHERE id = ?", kind
        )

    def may_shrink_caches(self, owner: str) -> bool:
        """Whether this owner allows a smaller kind of cache where a reply runs out of memory."""
        row = self._database.row("SELECT may_shrink_caches FROM owner_settings WHERE owner = ?", [owner])
        return row is not None and bool(row["may_shrink_caches"])

    def allow_shrinking_caches(self, owner: str, allowed: bool) -> None:
        """What `may_shrink_caches` says from now on."""
        self._database.execute(
            "INSERT INTO owner_settings (owner, may_shrink_caches) VALUES (?, ?) "
            "ON CONFLICT DO UPDATE SET may_shrink_caches = excluded.may_shrink_caches",
            [owner, int(allowed)],
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
        self._wipe("chat")

    def _change(self, owner: str, conversation_id: str, update: str, text: str | None) -> Conversation:
        with self._database.transaction():
            self.get(owner, conversation_id)
            self._database.execute(update, [text, conversation_id])
            return self.get(owner, conversation_id)

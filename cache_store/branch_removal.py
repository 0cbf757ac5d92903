"""Taking a message and all that hangs below it out of a chat.

Gone are the rows, which of them was shown, the pieces of replies, and the short texts of them that may
stand in the stats of the messages that remain. SQLite overwrites what it deletes (`secure_delete`); whoever
calls this empties the log afterwards.

Nothing in this module checks owners or opens transactions: `Conversations` does both.
"""

from __future__ import annotations

from cache_store import tree
from cache_store.database import Database
from cache_store.message_copies import without_divergence
from cache_store.records import DIVERGENCE, Message
from cache_store.rows import message_from_row, pack_json

_DELETE = """
    WITH RECURSIVE below (id) AS (
        SELECT :id
        UNION ALL
        SELECT m.id FROM below JOIN messages AS m ON m.conversation_id = :chat AND m.parent_id = below.id
    )
    DELETE FROM messages WHERE id IN (SELECT id FROM below)
"""


def remove_branch(database: Database, message: Message) -> None:
    """Delete the message and everything below it. Where it was the one that is shown, the sibling before
    it is shown then, or the one behind it; where there is none, the path ends at its parent."""
    heir = _heir(database, message)
    database.execute(_DELETE, {"id": message.id, "chat": message.conversation_id})
    if heir is not None:
        tree.show(database, heir)
    _forget_divergences(database, message.conversation_id)


def _heir(database: Database, message: Message) -> Message | None:
    """The sibling that takes its place; None where it was not shown, or is the only child."""
    selected = database.row("SELECT undone FROM selections WHERE child_id = ?", [message.id])
    if selected is None or selected["undone"]:
        return None
    siblings = tree.children(database, message.conversation_id, message.parent_id)
    position = [sibling.id for sibling in siblings].index(message.id)
    others = siblings[:position][::-1] + siblings[position + 1 :]
    return others[0] if others else None


def _forget_divergences(database: Database, conversation_id: str) -> None:
    rows = database.rows(
        "SELECT * FROM messages WHERE conversation_id = ? AND instr(stats, ?)",
        [conversation_id, f'"{DIVERGENCE}":{{'],
    )
    for message in map(message_from_row, rows):
        stats = pack_json(without_divergence(message))
        database.execute("UPDATE messages SET stats = ? WHERE id = ?", [stats, message.id])

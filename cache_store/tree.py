"""The shape of a chat: who is below whom, and which child is shown.

`selections` names the shown child of a parent; the parent of a first message is its conversation. The
selected path follows them from the conversation down; where none is named, the path ends. Every walk is
one recursive query, so a path of thousands of messages costs one round trip and no recursion here.

Nothing in this module checks owners or opens transactions: `Conversations` does both.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from itertools import groupby

from cache_store.database import Database
from cache_store.errors import NotFound
from cache_store.records import Json, Message, Siblings
from cache_store.rows import message_from_row, row_from_message, storable

_SHOWN = """
    WITH RECURSIVE shown (id, depth) AS (
        SELECT child_id, 0 FROM selections WHERE parent_id = ?
        UNION ALL
        SELECT s.child_id, shown.depth + 1 FROM shown JOIN selections AS s ON s.parent_id = shown.id
    )
"""

_ABOVE = """
    WITH RECURSIVE above (id, parent_id, conversation_id, height) AS (
        SELECT id, parent_id, conversation_id, 0 FROM messages WHERE id = ?
        UNION ALL
        SELECT m.id, m.parent_id, m.conversation_id, above.height + 1
        FROM above JOIN messages AS m ON m.id = above.parent_id
    )
"""

# ruff sees strings being joined into SQL; they are these constants and nothing else.
_READ_SHOWN = f"{_SHOWN} SELECT m.* FROM shown JOIN messages AS m ON m.id = shown.id ORDER BY depth"  # noqa: S608
_READ_LEAF = f"{_SHOWN} SELECT id FROM shown ORDER BY depth DESC LIMIT 1"  # noqa: S608
_READ_ABOVE = f"{_ABOVE} SELECT m.* FROM above JOIN messages AS m ON m.id = above.id ORDER BY height DESC"  # noqa: S608
_READ_SIBLINGS = f"""
    {_SHOWN}
    SELECT shown.id AS shown_id, s.id AS sibling_id
    FROM shown
    JOIN messages AS m ON m.id = shown.id
    JOIN messages AS s ON s.conversation_id = m.conversation_id AND s.parent_id IS m.parent_id
    ORDER BY shown.depth, s.number
"""  # noqa: S608
_SELECT = f"""
    INSERT INTO selections (parent_id, child_id)
    {_ABOVE}
    SELECT coalesce(parent_id, conversation_id), id FROM above
    WHERE NOT EXISTS (SELECT 1 FROM selections WHERE child_id = above.id)
    ON CONFLICT (parent_id) DO UPDATE SET child_id = excluded.child_id
"""  # noqa: S608

NOT_FOUND = "There is no such chat or message here any more; nothing was changed; reload the page."
"""The one sentence of NotFound: the same for a missing row and for somebody else's."""


def selected_path(database: Database, conversation_id: str) -> list[Message]:
    """The messages shown, first message first."""
    return [message_from_row(row) for row in database.rows(_READ_SHOWN, [conversation_id])]


def leaf_id(database: Database, conversation_id: str) -> str | None:
    """The id of the last message shown; None in an empty chat."""
    row = database.row(_READ_LEAF, [conversation_id])
    return None if row is None else str(row["id"])


def path_to(database: Database, message_id: str) -> list[Message]:
    """The messages from the first one down to this one, whatever is shown."""
    return [message_from_row(row) for row in database.rows(_READ_ABOVE, [message_id])]


def siblings(database: Database, conversation_id: str) -> dict[str, Siblings]:
    """For each message shown, all children of its parent in the order of their creation."""
    rows = database.rows(_READ_SIBLINGS, [conversation_id])
    standing: dict[str, Siblings] = {}
    for shown_id, group in groupby(rows, key=lambda row: str(row["shown_id"])):
        ids = tuple(str(row["sibling_id"]) for row in group)
        standing[shown_id] = Siblings(ids, ids.index(shown_id))
    return standing


def add_question(
    database: Database, conversation_id: str, parent_id: str | None, text: str, now: float
) -> Message:
    """Hang a user message below a reply, or as a first message; the parent's other children stay.

    Raises NotFound when the parent is not in this chat; ValueError when it is a user message.
    """
    if parent_id is not None:
        _require_reply(database, conversation_id, parent_id)
    question = Message(
        id=uuid.uuid4().hex,
        conversation_id=conversation_id,
        parent_id=parent_id,
        role="user",
        text=storable(text),
        status="done",
        created_at=now,
    )
    database.insert("messages", row_from_message(question))
    return question


def add_reply(
    database: Database, question: Message, sampling: Mapping[str, Json], seed: int | None, now: float
) -> Message:
    """Hang a running reply below a user message. Raises ValueError when `question` is a reply itself."""
    if question.role != "user":
        raise ValueError("a reply can only stand below a user message")
    reply = Message(
        id=uuid.uuid4().hex,
        conversation_id=question.conversation_id,
        parent_id=question.id,
        role="assistant",
        text="",
        status="running",
        created_at=now,
        sampling=dict(sampling),
        seed=seed,
    )
    database.insert("messages", row_from_message(reply))
    return reply


def select(database: Database, message_id: str) -> None:
    """Show this message and everything above it; what was shown below it stays. Writes only changes."""
    database.execute(_SELECT, [message_id])


def _require_reply(database: Database, conversation_id: str, message_id: str) -> None:
    row = database.row(
        "SELECT role FROM messages WHERE id = ? AND conversation_id = ?", [message_id, conversation_id]
    )
    if row is None:
        raise NotFound(NOT_FOUND)
    if row["role"] != "assistant":
        raise ValueError("a user message can only stand below a reply")

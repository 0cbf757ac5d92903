"""The shape of a chat: who is below whom, and which child is shown.

`selections` names the shown child of a parent; the parent of a first message is its conversation. The
selected path follows them from the conversation down; where none is named, or the one that is named was
undone, the path ends. Every walk is one recursive query, so a path of thousands of messages costs one round
trip and no recursion here.

Nothing in this module checks owners or opens transactions: `Conversations` does both.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from itertools import groupby

from cache_store.database import Database
from cache_store.errors import NotFound
from cache_store.records import NOTHING_YET, Beginning, Json, Message, Siblings
from cache_store.rows import message_from_row, row_from_message, storable

_SHOWN = """
    WITH RECURSIVE shown (id, depth) AS (
        SELECT child_id, 0 FROM selections WHERE parent_id = ? AND NOT undone
        UNION ALL
        SELECT s.child_id, shown.depth + 1
        FROM shown JOIN selections AS s ON s.parent_id = shown.id AND NOT s.undone
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
    WHERE NOT EXISTS (SELECT 1 FROM selections WHERE child_id = above.id AND NOT undone)
    ON CONFLICT (parent_id) DO UPDATE SET child_id = excluded.child_id, undone = 0
"""  # noqa: S608
_ALL = "SELECT * FROM messages WHERE conversation_id = ? ORDER BY number"
_CHILDREN = "SELECT * FROM messages WHERE conversation_id = ? AND parent_id IS ? ORDER BY number"
_UNDONE = """
    SELECT m.* FROM selections AS s JOIN messages AS m ON m.id = s.child_id
    WHERE s.parent_id = ? AND s.undone
"""

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


def path_below(database: Database, message_id: str) -> list[Message]:
    """What is shown below a message when it is shown itself, without it."""
    return selected_path(database, message_id)


def all_paths(database: Database, conversation_id: str, without: str | None = None) -> list[list[Message]]:
    """Every path from a first message down to one that has nothing below it, in a tree without the message
    `without` and what is below it."""
    messages: dict[str, Message] = {}
    for row in database.rows(_ALL, [conversation_id]):  # parents come first
        message = message_from_row(row)
        if message.id != without and (message.parent_id is None or message.parent_id in messages):
            messages[message.id] = message
    parents = {message.parent_id for message in messages.values()}
    paths: list[list[Message]] = []
    for leaf in messages.values():
        if leaf.id in parents:
            continue
        path = [leaf]
        while (parent_id := path[-1].parent_id) is not None:
            path.append(messages[parent_id])
        paths.append(path[::-1])
    return paths


def children(database: Database, conversation_id: str, parent_id: str | None) -> list[Message]:
    """Everything that hangs below a message (None: the first messages), in the order of creation."""
    return [message_from_row(row) for row in database.rows(_CHILDREN, [conversation_id, parent_id])]


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
    database: Database,
    question: Message,
    sampling: Mapping[str, Json],
    seed: int | None,
    now: float,
    beginning: Beginning = NOTHING_YET,
) -> Message:
    """Hang a running reply below a user message. Raises ValueError when `question` is a reply itself."""
    if question.role != "user":
        raise ValueError("a reply can only stand below a user message")
    reply = Message(
        id=uuid.uuid4().hex,
        conversation_id=question.conversation_id,
        parent_id=question.id,
        role="assistant",
        text=storable(beginning.text),
        status="running",
        created_at=now,
        token_ids=beginning.token_ids,
        sampling=dict(sampling),
        seed=seed,
    )
    database.insert("messages", row_from_message(reply))
    return reply


def select(database: Database, message_id: str) -> None:
    """Show this message and everything above it; what was shown below it stays. Writes only changes."""
    database.execute(_SELECT, [message_id])


def show(database: Database, message: Message) -> None:
    """Show this message among its siblings, which none of them is yet; what is shown above stays."""
    database.execute(
        "INSERT INTO selections (parent_id, child_id) VALUES (?, ?)",
        [message.parent_id or message.conversation_id, message.id],
    )


def undo(database: Database, message_id: str) -> None:
    """End the path above this message, which is shown; as nothing else changes, `select` brings all back."""
    database.execute("UPDATE selections SET undone = 1 WHERE child_id = ?", [message_id])


def undone(database: Database, conversation_id: str) -> Message | None:
    """The message that was undone at the end of what is shown."""
    row = database.row(_UNDONE, [leaf_id(database, conversation_id) or conversation_id])
    return None if row is None else message_from_row(row)


def _require_reply(database: Database, conversation_id: str, message_id: str) -> None:
    row = database.row(
        "SELECT role FROM messages WHERE id = ? AND conversation_id = ?", [message_id, conversation_id]
    )
    if row is None:
        raise NotFound(NOT_FOUND)
    if row["role"] != "assistant":
        raise ValueError("a user message can only stand below a reply")

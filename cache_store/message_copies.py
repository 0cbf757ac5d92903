"""Copies of messages: the same texts and the same ids in another place of the same or of another chat.

A copy has an id of its own; what it copies stays where it is. Of the stats a copy keeps what is about
itself: texts of other messages that stand in them do not go along, so that deleting those deletes them
everywhere.

Nothing in this module checks owners or opens transactions: `Conversations` does both.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import replace

from cache_store import tree
from cache_store.database import Database
from cache_store.records import DIVERGENCE, Json, Message
from cache_store.rows import row_from_message


def copy_run(
    database: Database, messages: Iterable[Message], below: Message | str, *, with_stats: bool
) -> None:
    """Hang copies of messages, each below the one before, under a message or as the first ones of the empty
    conversation of this id, and show them. `with_stats`: what each cost is true of the copy, too."""
    conversation_id, parent_id = (
        (below, None) if isinstance(below, str) else (below.conversation_id, below.id)
    )
    for message in messages:
        copy = replace(
            message,
            id=uuid.uuid4().hex,
            conversation_id=conversation_id,
            parent_id=parent_id,
            status="stopped" if message.status == "running" else message.status,
            stats=without_divergence(message) if with_stats else {},
        )
        database.insert("messages", row_from_message(copy))
        tree.show(database, copy)
        parent_id = copy.id


def without_divergence(message: Message) -> dict[str, Json]:
    """Its stats without the texts of other messages."""
    return {name: value for name, value in message.stats.items() if name != DIVERGENCE}

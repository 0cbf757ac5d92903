"""Chats from earlier days, put into a data folder before the app opens it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from cache_store.conversations import Conversations
from cache_store.database import Database
from cache_store.folder import DataFolder

OWNER = "local"
LONG_TITLE = "The long one"
"""To look at, and to add to at its end."""

COSTLY_TITLE = "One that nobody has read"
"""To try on it what reads much."""

LONG_TURNS = 120


def seed_long_chats(data_dir: Path) -> None:
    """Conversations of `LONG_TURNS` short turns: question 1 and its reply come first."""
    with DataFolder(data_dir) as folder, closing(Database(folder.database)) as database:
        for title in (COSTLY_TITLE, LONG_TITLE):
            _seed(Conversations(database), title)


def _seed(store: Conversations, title: str) -> None:
    chat = store.create(OWNER, title=title)
    leaf_id: str | None = None
    for number in range(1, LONG_TURNS + 1):
        turn = store.add_turn(
            OWNER,
            chat.id,
            parent_id=leaf_id,
            leaf_id=leaf_id,
            text=f"Question {number}",
            sampling={},
            seed=None,
        )
        leaf_id = turn.reply.id
        store.finish_reply(
            leaf_id,
            token_ids=(),
            text=f"Answer {number}",
            status="done",
            finish_reason="stop",
            error=None,
            stats={},
        )

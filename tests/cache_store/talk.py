"""Short ways to hold a chat with a store, for tests that are about something else."""

from __future__ import annotations

from typing import Any

from cache_store.conversations import Conversations
from cache_store.database import Database
from cache_store.records import Json, Message, Turn

SAMPLING: dict[str, Json] = {"temperature": 0.0, "stop_strings": ["\n\n"]}
SEED = 2**63 - 1

TABLES = ("conversations", "messages", "selections", "reply_pieces")


def begin(store: Conversations, owner: str = "ann", text: str = "Hello") -> Turn:
    """A new conversation with a first turn, whose reply is running."""
    return store.create_with_turn(
        owner, title="Talk", system_prompt="Be kind.", text=text, sampling=SAMPLING, seed=SEED
    )[1]


def say(store: Conversations, conversation_id: str, text: str = "Go on", owner: str = "ann") -> Turn:
    """One more turn at the end of what is shown."""
    path = store.path(owner, conversation_id)
    leaf_id = path[-1].id if path else None
    return store.add_turn(
        owner,
        conversation_id,
        parent_id=leaf_id,
        leaf_id=leaf_id,
        text=text,
        sampling=SAMPLING,
        seed=SEED,
    )


def edit(store: Conversations, message: Message, text: str, owner: str = "ann") -> Turn:
    """A sibling of `message` with another text."""
    return store.branch_turn(
        owner,
        message.conversation_id,
        parent_id=message.parent_id,
        text=text,
        sampling=SAMPLING,
        seed=SEED,
    )


def finish(
    store: Conversations, reply_id: str, text: str = "Well.", token_ids: tuple[int, ...] = (1, 2)
) -> Message:
    """End a running reply as a model would."""
    return store.finish_reply(
        reply_id,
        token_ids=token_ids,
        text=text,
        status="done",
        finish_reason="stop",
        error=None,
        stats={"num_prompt_tokens": 3},
    )


def dump(database: Database) -> dict[str, list[dict[str, Any]]]:
    """Everything that is stored, to compare before and after."""
    return {table: database.rows(f"SELECT * FROM {table}") for table in TABLES}  # noqa: S608

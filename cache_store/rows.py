"""How records lie in the tables: text, token ids and JSON, there and back.

Text comes back exactly as it was stored: NUL characters, white space at either end, any plane of
Unicode. The one exception is decided here: half of a surrogate pair is no character and no encoding can
hold it, so `storable` puts U+FFFD in its place before anything else sees the text; whole pairs, as a
browser may send them, become the character that they stand for.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from cache_store.errors import DatabaseDamaged
from cache_store.records import Conversation, Json, Message

_UNREADABLE = "A message of this chat cannot be read; nothing was changed; put a backup of the database back."


def storable(text: str) -> str:
    """`text` without lone surrogates; any other text is returned as it is."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Four bytes per id, little-endian. Raises ValueError for an id outside [0, 2**32)."""
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as exc:
        raise ValueError(f"token ids must lie in [0, 2**32): {exc}") from exc


def unpack_ids(blob: bytes) -> tuple[int, ...]:
    """The inverse of `pack_ids`. Raises DatabaseDamaged when `blob` is not a whole number of ids."""
    if len(blob) % 4:
        raise DatabaseDamaged(_UNREADABLE)
    return struct.unpack(f"<{len(blob) // 4}I", blob)


def pack_json(values: Mapping[str, Json]) -> str:
    """JSON text in ASCII, so that whatever a string holds can be stored."""
    return json.dumps(dict(values), separators=(",", ":"))


def row_from_message(message: Message) -> dict[str, Any]:
    """The columns of `messages` for this record."""
    return {
        "id": message.id,
        "conversation_id": message.conversation_id,
        "parent_id": message.parent_id,
        "role": message.role,
        "status": message.status,
        "created_at": message.created_at,
        "finish_reason": message.finish_reason,
        "error": message.error,
        "seed": message.seed,
        "sampling": pack_json(message.sampling),
        "stats": pack_json(message.stats),
        "text": message.text,
        "token_ids": pack_ids(message.token_ids),
    }


def message_from_row(row: Mapping[str, Any]) -> Message:
    """The record of a row of `messages`. Raises DatabaseDamaged when the row is not one that we wrote."""
    try:
        return Message(
            id=row["id"],
            conversation_id=row["conversation_id"],
            parent_id=row["parent_id"],
            role=row["role"],
            text=row["text"],
            status=row["status"],
            created_at=row["created_at"],
            token_ids=unpack_ids(row["token_ids"]),
            finish_reason=row["finish_reason"],
            error=row["error"],
            sampling=json.loads(row["sampling"]),
            seed=row["seed"],
            stats=json.loads(row["stats"]),
        )
    except (TypeError, ValueError) as exc:
        raise DatabaseDamaged(_UNREADABLE) from exc


def conversation_from_row(row: Mapping[str, Any]) -> Conversation:
    """The record of a row of `conversations`."""
    return Conversation(
        id=row["id"],
        owner=row["owner"],
        title=row["title"],
        system_prompt=row["system_prompt"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        cache_kind=row["cache_kind"],
    )

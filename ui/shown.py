"""What one tab shows: the small value that travels to the browser and back with every action.

The browser keeps it, so it survives a restart of the app, and two tabs never share one. It holds ids
only and is never trusted: the store checks the owner of each id, and `Chats.send` checks the leaf.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

ROWS_AT_FIRST = 40
"""How many messages a chat shows before somebody asks for earlier ones; bounds the cost of an update."""

MOST_ROWS = 2_000


@dataclass(frozen=True, slots=True)
class Shown:
    """`row_ids[i]` is the message in row `i` of the chat; `limit` is how many rows it may show. `writing`:
    the tab shows a reply on its way, and will until somebody tells it that the reply has ended."""

    conversation_id: str | None = None
    row_ids: tuple[str, ...] = ()
    limit: int = ROWS_AT_FIRST
    writing: bool = False

    @property
    def leaf_id(self) -> str | None:
        """The last message that this tab saw."""
        return self.row_ids[-1] if self.row_ids else None

    def row_id(self, index: object) -> str | None:
        """The message in that row; None when there is no such row."""
        if isinstance(index, int) and 0 <= index < len(self.row_ids):
            return self.row_ids[index]
        return None

    @classmethod
    def from_browser(cls, value: object) -> Shown:
        """Read the JSON text that a browser sent; what is missing or of a wrong type counts as not shown."""
        data = _mapping(value)
        conversation_id, row_ids, limit = data.get("conversation"), data.get("rows"), data.get("limit")
        return cls(
            conversation_id=conversation_id if isinstance(conversation_id, str) and conversation_id else None,
            row_ids=_strings(row_ids),
            limit=min(max(limit, 1), MOST_ROWS) if isinstance(limit, int) else ROWS_AT_FIRST,
            writing=data.get("writing") is True,
        )


def _mapping(text: object) -> Mapping[str, object]:
    try:
        value = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        return {}
    return cast("Mapping[str, object]", value) if isinstance(value, dict) else {}


def _strings(value: object) -> tuple[str, ...]:
    items = cast("list[object]", value) if isinstance(value, list) else []
    return tuple(item for item in items if isinstance(item, str))

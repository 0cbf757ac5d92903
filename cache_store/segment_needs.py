"""Which rows of which segments still belong to a chat.

A chat needs a segment's rows up to the last one that it used, and a segment is needed up to the place where
the last child hangs that is needed itself. What nobody needs is deleted; where only the first rows are
needed, the rest is cut off, so that a deleted chat leaves nothing behind because another one shares its
beginning.
"""

from __future__ import annotations

from cache_store.database import Database
from cache_store.records import Segment
from cache_store.segment_tree import COLUMNS, segment_from_row

_USED = f"""
    SELECT {COLUMNS}, coalesce((SELECT max(num_rows) FROM segment_uses WHERE segment_id = id), 0) AS used
    FROM segments ORDER BY start DESC
"""  # noqa: S608


def superfluous(database: Database) -> list[tuple[Segment, int]]:
    """The segments that have more rows than are needed, and how many are; 0: none. Children come first."""
    rows = database.rows(_USED)
    needed: dict[str, int] = {row["id"]: row["used"] for row in rows}
    starts: dict[str, int] = {row["id"]: row["start"] for row in rows}
    found: list[tuple[Segment, int]] = []
    for row in rows:  # every child stands before its parent, because it starts later
        num_rows = needed[row["id"]]
        if num_rows < row["num_tokens"]:
            found.append((segment_from_row(row), num_rows))
        parent_id = row["parent_id"]
        if num_rows and parent_id is not None:
            needed[parent_id] = max(needed[parent_id], row["start"] - starts[parent_id])
    return found

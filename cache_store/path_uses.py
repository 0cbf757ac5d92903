"""Which of its saved rows a chat still needs after a branch of it was deleted.

What remains of the chat is given as paths of token ids. A use that is a beginning of one of them stays; one
that goes further is drawn back to where the last of them leaves it; one that shares nothing goes. Rows that
were computed with anything but the given fingerprints cannot be compared with these ids, so their uses go,
too: that deleted text is gone counts for more than that rows of another model are still there.

Nothing in this module opens transactions or touches files: `Segments` does both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cache_store.database import Database
from cache_store.segment_tree import num_common

_USED = """
    WITH RECURSIVE used (id) AS (
        SELECT segment_id FROM segment_uses WHERE conversation_id = ?
        UNION
        SELECT s.parent_id FROM used JOIN segments AS s USING (id) WHERE s.parent_id IS NOT NULL
    )
    SELECT id, parent_id, start, fingerprint_id, token_ids FROM used JOIN segments USING (id) ORDER BY start
"""


@dataclass(frozen=True, slots=True)
class _Cover:
    """How many rows of a segment each remaining path (by its number) has, among those that reach it."""

    parent_id: str | None
    start: int
    num_rows: dict[int, int]

    def covered(self, wanted: int) -> int:
        """How many of the first `wanted` rows some path needs."""
        return min(wanted, max(self.num_rows.values(), default=0))


def keep_paths(
    database: Database, conversation_id: str, fingerprint_ids: Collection[int], paths: Sequence[bytes]
) -> None:
    """Draw all uses of this chat back to the packed `paths`."""
    covers = _covers(database, conversation_id, fingerprint_ids, paths)
    uses = database.rows(
        "SELECT segment_id, num_rows, used_at FROM segment_uses WHERE conversation_id = ?", [conversation_id]
    )
    database.execute("DELETE FROM segment_uses WHERE conversation_id = ?", [conversation_id])
    for use in uses:
        segment_id, num_rows = _drawn_back(covers, use["segment_id"], use["num_rows"])
        if segment_id is not None:
            database.execute(
                "INSERT INTO segment_uses (conversation_id, segment_id, num_rows, used_at) "
                "VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "num_rows = max(num_rows, excluded.num_rows), used_at = max(used_at, excluded.used_at)",
                [conversation_id, segment_id, num_rows, use["used_at"]],
            )


def _covers(
    database: Database, conversation_id: str, fingerprint_ids: Collection[int], paths: Sequence[bytes]
) -> dict[str, _Cover]:
    """For every segment that this chat uses and all above it. Parents come first, as they start first."""
    covers: dict[str, _Cover] = {}
    for row in database.rows(_USED, [conversation_id]):
        start, parent_id = row["start"], row["parent_id"]
        if row["fingerprint_id"] not in fingerprint_ids:
            reaching: list[int] = []
        elif parent_id is None:
            reaching = list(range(len(paths)))
        else:
            parent = covers[parent_id]
            reaching = [path for path, n in parent.num_rows.items() if parent.start + n >= start]
        covers[row["id"]] = _Cover(
            parent_id,
            start,
            {path: num_common(paths[path][4 * start :], row["token_ids"]) for path in reaching},
        )
    return covers


def _drawn_back(covers: dict[str, _Cover], segment_id: str | None, num_rows: int) -> tuple[str | None, int]:
    """Where a use ends that some path needs; (None, 0) when none needs any of it."""
    while segment_id is not None:
        cover = covers[segment_id]
        if kept := cover.covered(num_rows):
            return segment_id, kept
        segment_id = cover.parent_id
        num_rows = cover.start - covers[segment_id].start if segment_id is not None else 0
    return None, 0

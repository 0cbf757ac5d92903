"""What to drop when cache files need room: what would be computed again soonest, for its size, stays.

The worth of a segment is the seconds that it saves per byte, halved for every week since it, or anything
below it, was used. Only leaves are dropped, because rows are of no use without all rows before them; when
the last child goes, its parent becomes a leaf. A clock that was set back makes nothing younger than new.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from cache_store import segment_tree as tree
from cache_store.database import Database
from cache_store.errors import DiskRefused, NoRoom
from cache_store.segment_folder import SegmentFolder

HALF_LIFE_S = 7 * 24 * 3600.0


@dataclass(slots=True)
class _Node:
    """A stored segment while victims are chosen. `last_used_at` is the newest of it and all below it."""

    id: str
    parent_id: str | None
    file: str
    checksum: str
    nbytes: int
    seconds: float
    last_used_at: float
    num_children: int = 0

    def worth(self, now: float) -> float:
        age = max(0.0, now - self.last_used_at)
        return self.seconds / self.nbytes * 0.5 ** (age / HALF_LIFE_S)


def evict(
    database: Database, folder: SegmentFolder, max_bytes: int, pinned: Collection[str], now: float
) -> int:
    """Evict until the folder holds at most `max_bytes`; how many segments went. What was set aside goes
    first.

    Raises NoRoom, before anything is evicted, when even all that is not pinned would not be enough;
    DiskRefused when a file could not be removed.
    """
    if folder.nbytes <= max_bytes:
        return 0
    folder.empty_quarantine()
    victims = _enough(database, folder.nbytes - max_bytes, pinned, now)
    with database.transaction():  # before the files: a crash leaves files without rows, never the reverse
        for victim in victims:
            tree.bury(database, victim.id)
    for number, victim in enumerate(victims):
        try:
            folder.remove(victim.file)
        except DiskRefused:  # noqa: PERF203 - the first one ends it
            _dig_up(database, victims[number:])
            raise
    return len(victims)


def _dig_up(database: Database, nodes: Iterable[_Node]) -> None:
    """Take back what was said of nodes whose files are still there, and of all that they hang from."""
    with database.transaction():
        for node in nodes:
            database.execute(
                "UPDATE segments SET state = 'stored', file = ?, checksum = ?, nbytes = ? WHERE id = ?",
                [node.file, node.checksum, node.nbytes, node.id],
            )


def _enough(database: Database, num_bytes: int, pinned: Collection[str], now: float) -> list[_Node]:
    victims: list[_Node] = []
    for victim in _by_worth(_nodes(database), pinned, now):
        if num_bytes <= 0:
            break
        victims.append(victim)
        num_bytes -= victim.nbytes
    if num_bytes > 0:
        raise NoRoom(
            "The cache files of this chat do not fit into --max-disk; they were not saved, the chat is safe; "
            "allow more space, or delete chats."
        )
    return victims


def _by_worth(nodes: dict[str, _Node], pinned: Collection[str], now: float) -> Iterator[_Node]:
    """Leaves, least worth first; a parent follows when all its children did."""
    heap = [
        (node.worth(now), node.id)
        for node in nodes.values()
        if not node.num_children and node.id not in pinned
    ]
    heapq.heapify(heap)
    while heap:
        node = nodes[heapq.heappop(heap)[1]]
        yield node
        if node.parent_id is None:
            continue
        parent = nodes[node.parent_id]
        parent.num_children -= 1
        if not parent.num_children and parent.id not in pinned:
            heapq.heappush(heap, (parent.worth(now), parent.id))


def _nodes(database: Database) -> dict[str, _Node]:
    """All stored segments. Children stand before their parents, whose last use they pass on."""
    rows = database.rows(
        "SELECT id, parent_id, state, file, checksum, nbytes, seconds, last_used_at FROM segments "
        "ORDER BY start DESC"
    )
    newest = {row["id"]: row["last_used_at"] for row in rows}
    num_children: dict[str | None, int] = {}
    for row in rows:
        parent_id = row["parent_id"]
        if parent_id is not None:
            newest[parent_id] = max(newest[parent_id], newest[row["id"]])
        if row["state"] == "stored":
            num_children[parent_id] = num_children.get(parent_id, 0) + 1
    return {
        row["id"]: _Node(
            id=row["id"],
            parent_id=row["parent_id"],
            file=row["file"],
            checksum=row["checksum"],
            nbytes=row["nbytes"],
            seconds=row["seconds"],
            last_used_at=newest[row["id"]],
            num_children=num_children.get(row["id"], 0),
        )
        for row in rows
        if row["state"] == "stored"
    }

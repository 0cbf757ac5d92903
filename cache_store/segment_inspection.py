"""Looking at the segments: opening, checking, listing and measuring them. Changes nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from cache_store import segment_tree as tree
from cache_store.database import Database
from cache_store.errors import SegmentDamaged, SegmentGone
from cache_store.file_header import FileFacts
from cache_store.records import Segment, SegmentCheck, SegmentNode, StoreSize
from cache_store.rows import unpack_ids
from cache_store.segment_file import SegmentFile, open_segment_file
from cache_store.segment_folder import RESERVE_BYTES, SegmentFolder, free_bytes

SegmentList = list[Segment]  # inside the class, `list` is the method
NodeList = list[SegmentNode]


_STORED = f"SELECT {tree.COLUMNS} FROM segments WHERE state = 'stored' ORDER BY number"  # noqa: S608

_NODES = f"""
    SELECT {tree.COLUMNS}, (
        SELECT coalesce(group_concat(conversation_id), '') FROM segment_uses WHERE segment_id = id
    ) AS chats
    FROM segments WHERE :owner IS NULL OR owner = :owner
    ORDER BY owner, fingerprint_id, start, number
"""  # noqa: S608


_IDS = (
    "SELECT id, token_ids FROM segments WHERE owner = :owner AND id IN (SELECT value FROM json_each(:wanted))"
)


class SegmentInspection:
    """The part of `Segments` that only looks. Safe to use from any thread."""

    def __init__(
        self,
        database: Database,
        folder: Path,
        max_bytes: int,
        *,
        clock: Callable[[], float] = time.time,
        disk_free: Callable[[Path], int] = free_bytes,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        """`folder` exists and nobody else writes there; it will never hold more than `max_bytes`.

        Raises DiskRefused when it cannot be looked through.
        """
        self._database = database
        self._folder = SegmentFolder(folder, disk_free=disk_free, reserve_bytes=reserve_bytes)
        self._max_bytes = max_bytes
        self._clock = clock
        # Held by whatever changes files or the tree's shape; looking up and reading need not wait for it.
        self._writing = threading.RLock()

    def open(self, segment: Segment) -> SegmentFile:
        """Open a stored segment for reading; it has `num_tokens` rows.

        Raises SegmentGone when it was evicted, deleted or shortened meanwhile; SegmentDamaged: then call
        `Segments.set_aside`; DiskRefused.
        """
        if segment.file is None or segment.checksum is None:
            raise SegmentGone(tree.GONE)
        try:
            facts = FileFacts(segment.nbytes, segment.checksum)
            file = open_segment_file(self._folder.file(segment.file), facts)
        except SegmentDamaged:
            if not self._is_current(segment):
                raise SegmentGone(tree.GONE) from None
            raise
        if any(not info.is_state and info.shape[1] != segment.num_tokens for info in file.tensors):
            file.close()
            raise SegmentDamaged("it holds another number of tokens")
        return file

    def verify(self) -> Iterator[SegmentCheck]:
        """Read every file and compare its checksum; one answer per stored segment, as they come.

        Raises DiskRefused when the system does not let us look.
        """
        return (check for check in map(self._check, self._stored()) if check is not None)

    def damage_of(self, segment: Segment) -> str | None:
        """What is wrong with this segment's file, all of which is read; None when it is as it was written, or
        gone meanwhile. Raises DiskRefused."""
        check = self._check(segment)
        return None if check is None else check.damage

    def list(self, owner: str | None = None) -> NodeList:
        """All segments of one owner or of everybody, parents before their children."""
        rows = self._database.rows(_NODES, {"owner": owner})
        return [
            SegmentNode(tree.segment_from_row(row), tuple(sorted(filter(None, row["chats"].split(",")))))
            for row in rows
        ]

    def token_ids(self, owner: str, segment_ids: Collection[str]) -> dict[str, tuple[int, ...]]:
        """The tokens of these segments, by id; without those that are gone or not this owner's."""
        rows = self._database.rows(_IDS, {"owner": owner, "wanted": json.dumps(list(segment_ids))})
        return {row["id"]: unpack_ids(row["token_ids"]) for row in rows}

    @property
    def max_bytes(self) -> int:
        """What the cache files may take."""
        return self._max_bytes

    def size(self) -> StoreSize:
        """How much lies on the disk. Raises DiskRefused."""
        with self._writing:
            row = self._database.row(
                "SELECT coalesce(sum(nbytes), 0) AS nbytes, count(file) AS stored, "
                "count(*) - count(file) AS evicted FROM segments"
            )
            assert row is not None
            quarantined = self._folder.quarantine_sizes()
            return StoreSize(
                kv_bytes=self._folder.nbytes,
                max_bytes=self._max_bytes,
                stored_bytes=row["nbytes"],
                quarantined_bytes=sum(quarantined),
                database_bytes=_nbytes_of_database(self._database.path),
                num_stored=row["stored"],
                num_evicted=row["evicted"],
                num_quarantined=len(quarantined),
            )

    # Below: for the methods above and for the classes on top of this one

    def _check(self, segment: Segment) -> SegmentCheck | None:
        """None when it was evicted or deleted meanwhile."""
        try:
            with self.open(segment) as file:
                for info in file.tensors:
                    file.skip(info)
                file.verify()
        except SegmentGone:
            return None
        except SegmentDamaged as exc:
            return SegmentCheck(segment, exc.why)
        return SegmentCheck(segment, None)

    def _is_current(self, segment: Segment) -> bool:
        self._database.wait_for_writers()  # an eviction removes files before it is committed
        now = tree.segment(self._database, segment.id)
        return now is not None and now.file == segment.file

    def _stored(self) -> SegmentList:
        rows = self._database.rows(_STORED)
        return [tree.segment_from_row(row) for row in rows]


def _nbytes_of_database(path: Path) -> int:
    """The file with its log and the log's index."""
    files = (path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm"))
    return sum(file.stat().st_size for file in files if file.exists())

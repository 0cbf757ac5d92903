"""Looking after the segments: room, order at the start, damage, what a deleted chat leaves.

Each of these leaves the tree and the folder in agreement, or, when the process dies in between, such that
`sweep` brings them into agreement: a row is changed only when its file is there, and a file without a row
is an orphan.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence

from cache_store import segment_tree as tree
from cache_store.errors import DiskRefused, NoRoom, SegmentDamaged, SegmentGone
from cache_store.eviction import evict
from cache_store.file_header import FileFacts
from cache_store.files import first_rows
from cache_store.path_uses import keep_paths
from cache_store.records import Segment, SweepReport
from cache_store.rows import pack_ids
from cache_store.segment_inspection import SegmentInspection
from cache_store.segment_needs import superfluous

_TRACES = (
    "The chat is deleted, but the disk did not let all of its cache files be removed; "
    "they go when Keepwarm is started again."
)

log = logging.getLogger(__name__)


class SegmentUpkeep(SegmentInspection):
    """What `Segments` does for order. Safe to use from any thread."""

    def set_aside(self, segment: Segment, why: str) -> None:
        """Never read this segment's file again: it goes to the quarantine, and the segment and all below
        it count as evicted, and it as damaged. Nothing happens when that was done before."""
        with self._writing:
            if segment.file is None or not self._is_current(segment):
                return
            log.warning("The cache file %s is damaged (%s); it was set aside.", segment.file, why)
            with self._database.transaction():
                files = tree.bury_damaged(self._database, segment.id)
            try:
                self._folder.set_aside(segment.file)
                self._remove(file for file in files if file != segment.file)
            except DiskRefused as exc:  # nothing refers to them any more; they go at the next start
                log.warning("%s", exc)

    def forget_unused(self, pinned: Collection[str] = frozenset()) -> int:
        """Delete what no chat needs any more, also from the disk and the database's log; how many segments
        were deleted or shortened. Call it after chats were deleted.

        Raises DiskRefused when the rows are gone, but files or the log are still there.
        """
        with self._writing:
            found = superfluous(self._database)
            if not found:
                return 0
            with self._database.transaction():
                for segment, num_rows in found:
                    if not num_rows:
                        self._database.execute("DELETE FROM segments WHERE id = ?", [segment.id])
            try:
                self._remove(segment.file for segment, num_rows in found if segment.file and not num_rows)
                for segment, num_rows in found:
                    if num_rows:
                        self._shorten(segment.id, num_rows, pinned)
                self._folder.empty_quarantine()
                self._database.truncate_log()
            except DiskRefused as exc:
                raise DiskRefused(_TRACES) from exc
            return len(found)

    def keep_paths(
        self, conversation_id: str, fingerprint_ids: Collection[int], paths: Iterable[Sequence[int]]
    ) -> int:
        """This chat needs no rows but those of beginnings of these paths any more, whose token ids rows of
        these fingerprints belong to (rows of any other are not needed at all); then as `forget_unused`."""
        packed = [pack_ids(path) for path in paths]
        with self._writing:
            with self._database.transaction():
                keep_paths(self._database, conversation_id, fingerprint_ids, packed)
            return self.forget_unused()

    def sweep(self) -> SweepReport:
        """Bring tree and folder into agreement after whatever happened. Call it once at the start.

        Removes half-written files and files without a row; a segment whose file is missing counts as
        damaged, and all below it as evicted; one whose file has another size is set aside. Then forgets what
        no chat needs and evicts what exceeds the limit. Raises DiskRefused.
        """
        with self._writing:
            stored = {segment.file: segment for segment in self._stored() if segment.file is not None}
            left = self._folder.sweep({file: segment.nbytes for file, segment in stored.items()})
            for file in left.misshapen:
                self.set_aside(stored[file], "its size is not what was written")
            for file in left.missing:
                with self._database.transaction():
                    files = tree.bury_damaged(self._database, stored[file].id)
                self._remove(files)
            now = self._clock()
            self._database.execute(  # the clock was ahead once: such rows would seem new for ever
                "UPDATE segments SET last_used_at = ? WHERE last_used_at > ?", [now, now]
            )
            self.forget_unused()
            return SweepReport(
                num_temporary=left.num_temporary,
                num_orphans=left.num_orphans,
                num_missing=len(left.missing),
                num_damaged=len(left.misshapen),
                num_evicted=self.prune(self._max_bytes),
            )

    def prune(self, to_bytes: int, pinned: Collection[str] = frozenset()) -> int:
        """Evict until the cache files take at most `to_bytes`; how many segments were evicted.

        Raises NoRoom, and nothing is evicted, when what is pinned does not let it; DiskRefused.
        """
        with self._writing:
            return evict(self._database, self._folder, to_bytes, pinned, self._clock())

    # Below: for the methods above and for `Segments`

    def _make_room(self, nbytes: int, pinned: Collection[str]) -> None:
        """So that `nbytes` more fit. Raises NoRoom or DiskRefused."""
        self.prune(self._max_bytes - nbytes, pinned)

    def _remove(self, files: Iterable[str]) -> None:
        """Remove all that can be removed. Raises the first DiskRefused, after the last file."""
        failure: DiskRefused | None = None
        for file in files:
            try:
                self._folder.remove(file)
            except DiskRefused as exc:  # noqa: PERF203 - one that stays must not keep the others
                failure = failure or exc
        if failure is not None:
            raise failure

    def _shorten(self, segment_id: str, num_rows: int, pinned: Collection[str]) -> None:
        """Keep the first rows and their token ids only. Where that cannot be, the segment is evicted:
        that a chat is gone counts for more than that another one is fast."""
        segment = tree.segment(self._database, segment_id)
        if segment is None:
            return
        kept: tuple[str, FileFacts] | None = None
        if segment.state == "stored":
            try:
                kept = self._copy_first_rows(segment, num_rows, {*pinned, segment_id})
            except (SegmentDamaged, SegmentGone, NoRoom, DiskRefused) as exc:
                log.warning("A cache file could not be shortened and was removed: %s", exc)
        with self._database.transaction():
            files = [segment.file] if kept else tree.bury(self._database, segment_id)
            tree.cut(self._database, segment_id, num_rows)
            if kept:
                seconds = segment.seconds * num_rows / segment.num_tokens
                tree.revive(self._database, segment_id, *kept, seconds, segment.last_used_at)
        self._remove(file for file in files if file)

    def _copy_first_rows(
        self, segment: Segment, num_rows: int, pinned: Collection[str]
    ) -> tuple[str, FileFacts]:
        with self.open(segment) as source:
            content = first_rows(source, num_rows)
            self._make_room(content.nbytes, pinned)
            return self._folder.write(content)

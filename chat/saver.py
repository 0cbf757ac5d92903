"""New rows → disk, off the critical path.

The inference thread offers copies of rows that are not on disk yet; one thread writes them, in order. The
queue is bounded in bytes: an offer that does not fit is refused and the caller offers the same rows again
later, together with newer ones. What could not be written (disk full, read-only, over budget) is told in
`notice` until a write succeeds again; nothing here ever touches text.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from cache_store.errors import NotFound, SegmentGone, StoreError
from cache_store.segments import Segments

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 512 * 2**20
"""Copies of rows that may wait for the disk."""


KEEP_PATIENCE_S = 5.0
"""How long a branch that is being deleted waits for rows of its chat that are on their way to the disk."""


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows of tokens `[start, len(token_ids))` of a path; `token_ids` is the whole path up to their end.
    `seconds`: what computing them took."""

    owner: str
    conversation_id: str
    fingerprint_id: int
    token_ids: tuple[int, ...]
    start: int
    tensors: Mapping[str, Tensor]
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Saver:
    """See the module. `offer`, `wait_for` and `forget` may be called from any thread."""

    def __init__(self, segments: Segments) -> None:
        self.notice: str | None = None
        self._segments = segments
        self._waiting: deque[NewRows] = deque()
        self._writing: NewRows | None = None
        self._lost: set[str] = set()
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="saver", daemon=True)

    @property
    def segments(self) -> Segments:
        """Where the rows go."""
        return self._segments

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is being written: `notice` is about the newest rows then."""
        with self._changed:
            return not self._waiting and self._writing is None

    def start(self) -> None:
        """Start the writing thread."""
        self._thread.start()

    def offer(self, rows: NewRows, patience_s: float = 0.0) -> bool:
        """Queue rows for writing. False when the queue is closing, or has no room for them within
        `patience_s` seconds: they were not taken."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._has_room(rows), patience_s)
            if self._closing or not self._has_room(rows):
                return False
            self._waiting.append(rows)
            self._changed.notify_all()
            return True

    def _has_room(self, rows: NewRows) -> bool:
        queued = sum(waiting.nbytes for waiting in self._waiting)
        return not self._waiting or queued + rows.nbytes <= MAX_QUEUED_BYTES

    def take_lost(self, conversation_id: str) -> bool:
        """Whether rows of this conversation were taken but could not be written; asking clears it."""
        with self._changed:
            was_lost = conversation_id in self._lost
            self._lost.discard(conversation_id)
            return was_lost

    def wait_for(self, conversation_id: str, timeout_s: float) -> bool:
        """Block until nothing of this conversation is waiting or being written; False on time-out."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._concerns(conversation_id), timeout_s)

    def forget(self, conversation_id: str) -> None:
        """After a conversation was deleted: drop what waits for it, let a running write end, and delete the
        rows on disk that only it needed. Raises DiskRefused when files could not be removed."""
        self._discard(conversation_id)
        self._segments.forget_unused()

    def keep_paths(
        self, conversation_id: str, fingerprint_ids: Collection[int], paths: Sequence[Sequence[int]]
    ) -> None:
        """Before a branch is deleted: the conversation needs beginnings of these paths only (see
        `Segments.keep_paths`). What still waits is written first; what takes too long is dropped, and told
        by `take_lost`. Raises DiskRefused when files could not be removed."""
        if not self.wait_for(conversation_id, KEEP_PATIENCE_S):
            self._discard(conversation_id)
            with self._changed:
                self._lost.add(conversation_id)
        self._segments.keep_paths(conversation_id, fingerprint_ids, paths)

    def _discard(self, conversation_id: str) -> None:
        with self._changed:
            kept = [rows for rows in self._waiting if rows.conversation_id != conversation_id]
            self._waiting = deque(kept)
            self._lost.discard(conversation_id)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._concerns(conversation_id))

    def close(self, timeout_s: float = 10.0) -> bool:
        """Write what waits, then end the thread; False when that took longer than `timeout_s` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _concerns(self, conversation_id: str) -> bool:
        writing = self._writing is not None and self._writing.conversation_id == conversation_id
        return writing or any(rows.conversation_id == conversation_id for rows in self._waiting)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._writing = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                rows = self._writing = self._waiting.popleft()
            self._write(rows)

    def _write(self, rows: NewRows) -> None:
        try:
            if self._append(rows):
                self.notice = None
        except NotFound:
            log.info("a deleted chat's rows were not saved")
        except SegmentGone:
            self._lose(rows, None)  # what it hangs from went between the look-up and the writing
        except StoreError as error:
            self._lose(rows, str(error), error.__cause__)
        except Exception:  # the thread must live on; text is not concerned
            log.exception("rows could not be saved")
            self._lose(rows, "A cache could not be saved; your text is kept, the log has the details.")

    def _append(self, rows: NewRows) -> bool:
        above = self._segments.find(rows.owner, rows.fingerprint_id, rows.token_ids, rows.start)
        if above.num_tokens != rows.start:
            self._lose(rows, None)  # what it hangs from was evicted or lost meanwhile
            return False
        self._segments.append(
            rows.owner,
            rows.fingerprint_id,
            rows.conversation_id,
            parent_id=above.links[-1].segment.id if above.links else None,
            start=rows.start,
            token_ids=rows.token_ids[rows.start :],
            tensors=rows.tensors,
            seconds=rows.seconds,
            pinned=frozenset(link.segment.id for link in above.links),
        )
        return True

    def _lose(self, rows: NewRows, notice: str | None, cause: BaseException | None = None) -> None:
        with self._changed:
            self._lost.add(rows.conversation_id)
        if notice is not None:
            if notice != self.notice:
                log.warning("%s%s", notice, f" ({cause})" if cause else "")
            self.notice = notice

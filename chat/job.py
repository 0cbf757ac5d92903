"""A reply on its way: what the inference thread writes and everybody else only watches.

A `Job` is fixed to its owner, conversation and reply when it is made, so that what a page happens to
show can never redirect it. The inference thread publishes; followers poll `view` or block in `wait`.
Closing a page leaves the job alone; only `request_stop` ends it early.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Literal

from chat.stats import TurnStats

JobState = Literal["queued", "loading", "prefill", "decode", "done", "stopped", "failed"]

ENDED: frozenset[JobState] = frozenset({"done", "stopped", "failed"})


@dataclass(frozen=True, slots=True)
class JobView:
    """One consistent look at a job.

    `version` grows with every change. `position`: replies ahead of this one while queued.
    `num_read` of `num_to_read`: progress of the prefill, in tokens. `text`: the reply so far, or
    whole once ended. `error`: the sentence to show when `state` is `failed`.
    """

    version: int = 0
    state: JobState = "queued"
    position: int = 0
    num_read: int = 0
    num_to_read: int = 0
    text: str = ""
    error: str | None = None
    stats: TurnStats | None = None

    @property
    def ended(self) -> bool:
        """True once nothing about this job will change any more."""
        return self.state in ENDED


class Job:
    """The shared handle of one reply. Safe to use from any thread."""

    def __init__(self, owner: str, conversation_id: str, reply_id: str, text: str = "") -> None:
        """`text`: what the reply begins with."""
        self.owner = owner
        self.conversation_id = conversation_id
        self.reply_id = reply_id
        self.created_at = time.monotonic()
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._view = JobView(text=text)

    @property
    def view(self) -> JobView:
        """The newest look; never blocks for longer than a publish takes."""
        with self._changed:
            return self._view

    @property
    def stop_requested(self) -> bool:
        """True once somebody asked this reply to end."""
        return self._stop.is_set()

    def request_stop(self) -> None:
        """Ask for an early end; honoured between two tokens or two prefill chunks. Idempotent."""
        self._stop.set()

    def publish(self, **changes: object) -> None:
        """Replace fields of the view and wake every waiter. After an end, nothing changes any more."""
        with self._changed:
            if self._view.ended:
                return
            version = self._view.version + 1
            self._view = replace(self._view, version=version, **changes)  # pyright: ignore[reportArgumentType]
            self._changed.notify_all()

    def wait(self, seen_version: int, timeout_s: float | None = None) -> JobView:
        """Block until the view is newer than `seen_version` or the job ended; return it either way."""
        with self._changed:
            self._changed.wait_for(lambda: self._view.version > seen_version or self._view.ended, timeout_s)
            return self._view

    def wait_until_ended(self, timeout_s: float | None = None) -> JobView:
        """Block until the job ended. Raises TimeoutError when it has not within `timeout_s` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._view.ended, timeout_s):
                raise TimeoutError(f"the reply has not ended within {timeout_s} s")
            return self._view

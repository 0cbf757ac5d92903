"""A process that kills itself, as `kill -9` does, right before the n-th call that reaches the disk.

A step is opening, each portion written, flushing, renaming, removing, and each statement of SQLite.
"""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable

from cache_store.database import Database


class Killer:
    """See the module. `kill_at` 0 never kills, and only counts."""

    portion = 200
    """Bytes that one write takes at most."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at = kill_at
        self.num_steps = 0

    def step(self, *_: object) -> None:
        self.num_steps += 1
        if self.num_steps == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, database: Database) -> None:
        """Only ever called in a process that ends soon: nothing is put back."""
        killer = self

        class File(io.FileIO):
            def write(self, data: memoryview, /) -> int:  # type: ignore[override]
                killer.step()
                return super().write(memoryview(data)[: killer.portion])

        def watched(real: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **options: object) -> object:
                self.step()
                return real(*args, **options)

            return call

        io.FileIO = File  # type: ignore[misc]
        for name in ("open", "fsync", "replace", "unlink", "mkdir"):
            setattr(os, name, watched(getattr(os, name)))
        database._db.conn.set_trace_callback(self.step)

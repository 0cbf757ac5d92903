"""A house whose cache folder lies on a disk that fills up, fails, or may not be written, as a test asks."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cache_store.records import Link
from cache_store.segments import Segments
from chat.model import LoadedModel
from chat.saver import Saver
from tests.house import House

PLENTY = 10**9


class Disk:
    """`free`: bytes that it says it has left. `broken_after`: how many portions may be written before every
    call fails with `code`; None: it works. Writing looks at it after `install` only."""

    def __init__(self) -> None:
        self.free = PLENTY
        self.broken_after: int | None = None
        self.code = errno.ENOSPC

    def check(self) -> None:
        if self.broken_after is not None:
            if not self.broken_after:
                raise OSError(self.code, os.strerror(self.code))
            self.broken_after -= 1

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        disk, real_open = self, os.open

        class File(io.FileIO):
            def write(self, data: Any, /) -> int:
                disk.check()
                return super().write(memoryview(data)[:1000])

        def open_(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if flags & os.O_CREAT and disk.code == errno.EROFS:
                disk.check()
            return real_open(path, flags, *args, **options)

        monkeypatch.setattr(io, "FileIO", File)
        monkeypatch.setattr(os, "open", open_)


class SteadySegments(Segments):
    """Every token took equally long to compute, so that what is evicted does not depend on the machine."""

    def append(self, *place: Any, token_ids: Sequence[int], seconds: float, **rest: Any) -> Link:
        return super().append(*place, token_ids=token_ids, seconds=len(token_ids) / 1000, **rest)


class HouseOnDisk(House):
    """Its cache folder lies on `disk`; text does not."""

    def __init__(self, folder: Path, loaded: LoadedModel, disk: Disk, **settings: Any) -> None:
        self.disk_below = disk
        super().__init__(folder, loaded, **{"max_disk_bytes": PLENTY, **settings})

    def __enter__(self) -> HouseOnDisk:
        return self

    def _open_disk(self) -> tuple[Segments, Saver]:
        kv = self.folder / "kv"
        kv.mkdir(exist_ok=True)
        segments = SteadySegments(
            self.database,
            kv,
            self.max_disk_bytes or 0,
            disk_free=lambda _: self.disk_below.free,
            reserve_bytes=0,
        )
        segments.sweep()
        saver = Saver(segments)
        saver.start()
        return segments, saver

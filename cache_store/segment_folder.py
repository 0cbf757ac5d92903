"""The folder that holds the segments' files: how many bytes lie there, what is written, removed, set aside.

Whoever holds the data folder's lock is the only one who writes here, so the number of bytes is counted
along instead of being asked for each time. It includes half-written files and what was set aside. Only
names that we gave are ever removed; anything else in the folder belongs to somebody else and is left alone.

Not safe to use from several threads at once: `Segments` holds its lock around every call that writes.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cache_store.errors import DiskRefused
from cache_store.file_header import FileFacts
from cache_store.files import TEMPORARY_SUFFIX, FileContent, refused, write_segment_file
from cache_store.folder import PRIVATE

RESERVE_BYTES = 256 << 20
"""Free space that cache files leave to everything else on the disk, above all to the transcripts."""

NUM_QUARANTINED = 3
"""How many damaged files are kept to be looked at."""

_SUFFIX = ".safetensors"
_OURS = re.compile(rf"[0-9a-f]{{32}}{re.escape(_SUFFIX)}({re.escape(TEMPORARY_SUFFIX)})?")
_SET_ASIDE = re.compile(r"\d{6}-")


def free_bytes(path: Path) -> int:
    """Free space on the disk that holds `path`."""
    return shutil.disk_usage(path).free


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What a folder held that no row speaks of, and what rows speak of that it does not hold."""

    num_temporary: int
    num_orphans: int
    missing: frozenset[str]
    misshapen: frozenset[str]


class SegmentFolder:
    """See the module. `disk_free` tells how many bytes the disk has left."""

    def __init__(
        self,
        path: Path,
        *,
        disk_free: Callable[[Path], int] = free_bytes,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        """`path` exists, unless nothing is going to be written. Raises DiskRefused when it cannot be looked
        through."""
        self.path = path
        self._disk_free = disk_free
        self._reserve_bytes = reserve_bytes
        self._count()

    @property
    def nbytes(self) -> int:
        """Everything of ours in here: segments, half-written files, what was set aside."""
        return self._nbytes

    @property
    def quarantine(self) -> Path:
        """Where damaged files go; need not exist."""
        return self.path / "quarantine"

    def file(self, name: str) -> Path:
        """The path of a segment's file."""
        return self.path / name

    def write(self, content: FileContent) -> tuple[str, FileFacts]:
        """Write a new file; its name and facts. Raises DiskRefused; then nothing of it is left."""
        nbytes = content.nbytes
        try:
            if self._disk_free(self.path) - nbytes < self._reserve_bytes:
                raise DiskRefused(
                    "The disk with the cache folder is nearly full; the chat is safe, but its cache was not "
                    "saved; free some space."
                )
        except OSError as exc:
            raise refused(exc) from exc
        name = uuid.uuid4().hex + _SUFFIX
        self._nbytes += nbytes
        try:
            return name, write_segment_file(self.file(name), content)
        except BaseException:
            self._count()
            raise

    def remove(self, name: str) -> None:
        """Remove a segment's file, or whatever stands in its place; it may be gone already.

        Raises DiskRefused when it is still there afterwards.
        """
        path = self.file(name)
        try:
            nbytes = _size_of(path)
            _remove(path)
        except FileNotFoundError:
            self._count()  # somebody else removed it
            return
        except OSError as exc:
            raise refused(exc) from exc
        self._nbytes -= nbytes

    def set_aside(self, name: str) -> None:
        """Move a damaged file into the quarantine, of which only the newest few are kept.

        Raises DiskRefused when that is not possible.
        """
        try:
            self.quarantine.mkdir(mode=PRIVATE, exist_ok=True)
            newest = next(iter(self._quarantined()), None)
            number = int(newest.name.split("-")[0]) + 1 if newest else 1
            os.replace(self.file(name), self.quarantine / f"{number:06d}-{name}")  # noqa: PTH105
        except FileNotFoundError:
            pass  # missing: nothing to keep
        except OSError as exc:
            raise refused(exc) from exc
        self.empty_quarantine(NUM_QUARANTINED)
        self._count()  # a damaged file may have another size than the one that was counted

    def empty_quarantine(self, num_kept: int = 0) -> None:
        """Remove all but the newest few. Raises DiskRefused."""
        try:
            for path in self._quarantined()[num_kept:]:
                nbytes = _size_of(path)
                _remove(path)
                self._nbytes -= nbytes
        except OSError as exc:
            raise refused(exc) from exc

    def quarantine_sizes(self) -> list[int]:
        """The size of each thing that was set aside."""
        return _sizes_of(self._quarantined())

    def sweep(self, expected: Mapping[str, int]) -> Leftovers:
        """Remove half-written files and those that are not `expected`, a mapping of names to sizes.

        Raises DiskRefused.
        """
        temporary = orphans = 0
        found: dict[str, int] = {}
        for path in list(self._ours()):
            if path.name in expected:
                found[path.name] = path.lstat().st_size
                continue
            self.remove(path.name)
            if path.name.endswith(TEMPORARY_SUFFIX):
                temporary += 1
            else:
                orphans += 1
        self.empty_quarantine(NUM_QUARANTINED)
        self._count()
        misshapen = {name for name, nbytes in found.items() if nbytes != expected[name]}
        return Leftovers(temporary, orphans, frozenset(expected.keys() - found), frozenset(misshapen))

    def _ours(self) -> Iterator[Path]:
        if not self.path.is_dir():
            return iter(())
        return (path for path in self.path.iterdir() if _OURS.fullmatch(path.name))

    def _quarantined(self) -> list[Path]:
        """Newest first."""
        if not self.quarantine.is_dir():
            return []
        set_aside = (path for path in self.quarantine.iterdir() if _SET_ASIDE.match(path.name))
        return sorted(set_aside, reverse=True)

    def _count(self) -> None:
        try:
            self._nbytes = sum(_sizes_of(self._ours())) + sum(self.quarantine_sizes())
        except OSError as exc:
            raise refused(exc) from exc


def _size_of(path: Path) -> int:
    """The bytes of a file, or of all files in a folder; a link counts as itself."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return status.st_size
    return sum(map(_size_of, path.iterdir()))


def _sizes_of(paths: Iterable[Path]) -> list[int]:
    """Of those that are still there: who only looks may see another process remove files meanwhile."""
    sizes: list[int] = []
    for path in paths:
        with suppress(FileNotFoundError):
            sizes.append(_size_of(path))
    return sizes


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()

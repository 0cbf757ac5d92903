"""The data folder: one place, one Keepwarm at a time.

Whoever holds the folder's lock owns everything in it, so nothing else has to reckon with a second process.
The operating system frees the lock when the process ends, however it ends. The folder and the folders in
it are created for their owner only; a folder that was there before keeps its permissions. Who only looks
takes a `FolderView` instead and has to reckon with somebody else who writes.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from cache_store.errors import DataFolderBusy, DiskRefused, NothingThere

PRIVATE = 0o700

_DATABASE, _KV = "keepwarm.sqlite", "kv"


class DataFolder:
    """An open, locked data folder. Use as a context manager or call `close`."""

    def __init__(self, path: Path) -> None:
        """Create the folder if needed and take its lock.

        Raises DataFolderBusy when another Keepwarm has it, DiskRefused when it cannot be written.
        """
        self.path = path.expanduser().absolute()
        self._create(self.path)
        # Not per thread: the app may be closed by another thread than the one that opened it.
        self._lock = FileLock(self.path / "lock", timeout=0, mode=0o600, thread_local=False)
        try:
            self._lock.acquire()  # pyright: ignore[reportUnknownMemberType]
        except Timeout as exc:
            raise DataFolderBusy(
                f"Another Keepwarm is using {self.path}; nothing was changed; "
                "close it, or start this one with another --data-dir."
            ) from exc
        except OSError as exc:
            raise self._refused(self.path, exc) from exc

    @property
    def database(self) -> Path:
        """The file with all conversations."""
        return self.path / _DATABASE

    @property
    def models(self) -> Path:
        """Converted models; can be fetched again."""
        return self._create(self.path / "models")

    @property
    def kv(self) -> Path:
        """Cache files; can be computed again."""
        return self._create(self.path / _KV)

    @property
    def temporary(self) -> Path:
        """Uploads and half-written files."""
        return self._create(self.path / "temporary")

    def close(self) -> None:
        """Give the folder free. Idempotent."""
        self._lock.release()

    def __enter__(self) -> DataFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _create(self, folder: Path) -> Path:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=PRIVATE, exist_ok=True)
        except OSError as exc:
            raise self._refused(folder, exc) from exc
        return folder

    @staticmethod
    def _refused(folder: Path, exc: OSError) -> DiskRefused:
        return DiskRefused(
            f"Keepwarm cannot write in {folder} ({exc.strerror}); nothing was changed; "
            "allow writing there, or choose another --data-dir."
        )


class FolderView:
    """A data folder as it is for somebody who only looks: without the lock, and nothing is created."""

    def __init__(self, path: Path) -> None:
        """Raises NothingThere when no Keepwarm ever kept chats in `path`, DiskRefused when that cannot be
        seen."""
        self.path = path.expanduser().absolute()
        try:
            is_there = self.database.is_file()
        except OSError as exc:
            raise DiskRefused(
                f"Keepwarm cannot look into {self.path} ({exc.strerror}); nothing was changed; "
                "allow reading there, or choose another --data-dir."
            ) from exc
        if not is_there:
            raise NothingThere(
                f"There are no chats and no caches of Keepwarm in {self.path}; nothing was created; "
                "name another folder with --data-dir."
            )

    @property
    def database(self) -> Path:
        """The file with all conversations."""
        return self.path / _DATABASE

    @property
    def kv(self) -> Path:
        """Cache files; the folder need not exist."""
        return self.path / _KV


def flush_folder(folder: Path) -> None:
    """Make renames within a folder last through a power cut. Windows has no such call and needs none."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""The data folder: one place, one Keepwarm at a time.

Whoever holds the folder's lock owns everything in it, so nothing else has to reckon with a second process.
The operating system frees the lock when the process ends, however it ends. The folder and the folders in
it are created for their owner only; a folder that was there before keeps its permissions.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from cache_store.errors import DataFolderBusy, DiskRefused

PRIVATE = 0o700


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
        return self.path / "keepwarm.sqlite"

    @property
    def models(self) -> Path:
        """Converted models; can be fetched again."""
        return self._create(self.path / "models")

    @property
    def kv(self) -> Path:
        """Cache files; can be computed again."""
        return self._create(self.path / "kv")

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

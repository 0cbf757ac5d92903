"""A folder that Keepwarm made and can make again: whole under its final name, or not there.

Everything is written into a work folder beside it, synced, and renamed last. The manifest inside lists every
file with size and hash, and says in its own words what the folder was made from; a start compares these words
and the sizes only.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cache_store.folder import flush_folder

_MANIFEST = "keepwarm.json"
_MANIFEST_FORMAT = 1
_BLOCK_BYTES = 2**20
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_DISK_FULL_IN_WORDS = ("(os error 28)", "(os error 112)")
"""How the Rust libraries report a full disk on Unix and on Windows; they raise no OSError."""


def is_made(folder: Path, source: Mapping[str, str]) -> bool:
    """True when the folder was made from `source` and every file is there with its size; hashes are not
    recomputed."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        ours = {"format": _MANIFEST_FORMAT, **source}
        return all(manifest[name] == value for name, value in ours.items()) and all(
            (folder / name).stat().st_size == file["size"] for name, file in manifest["files"].items()
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def is_disk_full(error: BaseException) -> bool:
    """Whether a failed write found no room, whichever library it was in."""
    code = error.errno if isinstance(error, OSError) else None
    return code in _DISK_FULL or any(words in str(error) for words in _DISK_FULL_IN_WORDS)


@contextmanager
def work_folder(beside: Path, prefix: str) -> Generator[Path]:
    """A new folder in `beside`, gone at the end; what a killed process left there under this prefix goes
    first."""
    for leftover in beside.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=beside, ignore_cleanup_errors=True) as work:
        yield Path(work)


def put_in_place(made: Path, folder: Path, source: Mapping[str, str]) -> None:
    """Seal `made`, which lies in a work folder, and give it its final name. Raises OSError."""
    _write_manifest(made, source)
    if folder.exists():
        folder.rename(made.parent / "damaged")
    made.rename(folder)
    flush_folder(folder.parent)


def _write_manifest(folder: Path, source: Mapping[str, str]) -> None:
    """List every file with size and hash, and make all of it reach the disk."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": _sha256_synced(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = folder / _MANIFEST
    content = {"format": _MANIFEST_FORMAT, **source, "files": files}
    manifest.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _sha256_synced(manifest)
    flush_folder(folder)


def _sha256_synced(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb+") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
        os.fsync(file.fileno())
    return digest.hexdigest()

"""One segment ↔ one file, a safetensors file that any reader of that format can open: writing it.

A file appears whole or not at all: it is written under a temporary name, flushed to the disk, and renamed.
It is never changed afterwards. What is written comes block by block, from wherever the rows live, without a
copy of the whole. `segment_file` reads.

Checked by `tests/cache_store/test_files.py`: the format's own library reads what is written here, and a
failure at any call leaves nothing behind.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import xxhash

from cache_store.errors import DiskRefused
from cache_store.file_header import FileFacts, TensorInfo, in_file_order, info_of, render_header
from cache_store.folder import flush_folder
from cache_store.segment_file import CHUNK_BYTES, SegmentFile, byte_blocks

TEMPORARY_SUFFIX = ".part"

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


@dataclass(frozen=True, slots=True)
class FileContent:
    """What will be in a file: `infos` in the file's order, and their bytes block by block. Used up once."""

    infos: tuple[TensorInfo, ...]
    blocks: Iterable[memoryview]

    @property
    def nbytes(self) -> int:
        """The size of the whole file, known before anything is written."""
        return len(render_header(self.infos)) + sum(info.nbytes for info in self.infos)


def content_of(tensors: Mapping[str, torch.Tensor]) -> FileContent:
    """These tensors; strided ones are written head by head, without a copy of the whole.

    There may be none: where no layer has rows, and the state is not that of the segment's end. Raises
    ValueError when one of them cannot be stored.
    """
    infos = in_file_order(info_of(name, tensor) for name, tensor in tensors.items())
    return FileContent(tuple(infos), _blocks_of(tensors[info.name] for info in infos))


def first_rows(source: SegmentFile, num_rows: int) -> FileContent:
    """The first `num_rows` rows of a file that was just opened, read while they are written elsewhere.

    What belongs to the end of the segment is left out. The last block raises SegmentDamaged, before the
    new file gets its name, when the source was not what it should be.
    """
    infos = tuple(info.with_rows(num_rows) for info in source.tensors if not info.is_state)
    return FileContent(infos, _first_blocks(source, num_rows))


def write_segment_file(path: Path, content: FileContent) -> FileFacts:
    """Write a new file. Raises DiskRefused; then, as after any exception, nothing of it is left.

    When it returns, the file is on the disk and so is its name.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        try:
            facts = _write(temporary, content)
            os.replace(temporary, path)  # noqa: PTH105 - next to the other calls that a crash may separate
            flush_folder(path.parent)
        except BaseException:
            with suppress(OSError):  # what cannot be removed now is removed at the next start
                temporary.unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            raise
    except OSError as exc:
        raise refused(exc) from exc
    return facts


def refused(exc: OSError) -> DiskRefused:
    """What to tell people when the cache folder cannot be written. Not where it is: guests read it, too."""
    return DiskRefused(
        f"The cache folder cannot be written ({exc.strerror or type(exc).__name__}); the chat is safe, but"
        " its cache was not saved; free some space or allow writing there."
    )


def _blocks_of(tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    for tensor in tensors:
        here = tensor.cpu()
        if not here.is_contiguous() and here.dim() == 3 and all(head.is_contiguous() for head in here):
            yield from byte_blocks(here, per_head=True)
        else:
            yield from byte_blocks(here.contiguous(), per_head=False)


def _first_blocks(source: SegmentFile, num_rows: int) -> Iterator[memoryview]:
    for info in source.tensors:
        if info.is_state:
            source.skip(info)
        else:
            yield from source.blocks(info, num_rows)
    source.verify()


def _write(path: Path, content: FileContent) -> FileFacts:
    checksum = xxhash.xxh3_128()
    with io.BufferedWriter(io.FileIO(os.open(path, _FLAGS, 0o600), "wb"), CHUNK_BYTES) as file:
        for block in chain([memoryview(render_header(content.infos))], content.blocks):
            checksum.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        nbytes = file.tell()
    assert nbytes == content.nbytes
    return FileFacts(nbytes, checksum.hexdigest())

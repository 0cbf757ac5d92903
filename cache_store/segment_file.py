"""A segment's file, open for reading.

Reading is one pass, straight from the file into the tensors where the rows will live, with the checksum
(XXH3, 128 bits, over every byte of the file) computed on the way: nothing is copied twice, nothing is read
twice. So nothing that was read may be used before `SegmentFile.verify` has returned; until then it may be
anything.

Checked by `tests/cache_store/test_files.py`: no damaged, swapped, cut, foreign or malicious file gets past
`verify`, and none of them runs anything or takes more memory than its own size.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
import xxhash
from numpy import uint8
from numpy.typing import NDArray

from cache_store.errors import DiskRefused, SegmentDamaged
from cache_store.file_header import LENGTH_BYTES, FileFacts, TensorInfo, parse_header, parse_length

CHUNK_BYTES = 256 << 10
"""How much is read before it is hashed: small enough that the hash finds it in the processor's cache."""

_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_DAMAGE = {errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EIO}
"""Errors that say that there is no such file; any other says that we may not look."""


def open_segment_file(path: Path, facts: FileFacts) -> SegmentFile:
    """Open a file for one pass from begin to end.

    Raises SegmentDamaged when it is missing, not a plain file, of another size, or when its header does not
    describe it; DiskRefused when the system does not let us look.
    """
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # asked first, because opening a pipe would wait
            raise SegmentDamaged("it is not a plain file")
        file = io.FileIO(os.open(path, _FLAGS))
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    try:
        return SegmentFile(file, facts, path)
    except BaseException:
        file.close()
        raise


class SegmentFile:
    """An open file whose tensors are read once each, in the order of `tensors`. A context manager."""

    def __init__(self, file: io.FileIO, facts: FileFacts, path: Path) -> None:
        """Raises SegmentDamaged. Use `open_segment_file`."""
        self._file = file
        self._path = path
        self._checksum = facts.checksum
        self._hash = xxhash.xxh3_128()
        self._scratch = memoryview(bytearray(CHUNK_BYTES))
        if os.fstat(file.fileno()).st_size != facts.nbytes:
            raise SegmentDamaged("its size is not what was written")
        self.tensors = self._read_header(facts.nbytes)
        self._next = 0

    def read_into(self, info: TensorInfo, destination: torch.Tensor) -> None:
        """Read the next tensor into a tensor in the computer's memory.

        `destination` has the shape of `info`, or fewer rows: then it gets the first ones. It may be part of
        a larger buffer as long as each head's rows are contiguous. Raises SegmentDamaged when the file is
        too short or holds another type or shape than there is a place for; ValueError when tensors are
        taken out of order.
        """
        whole = _same_shape(info, destination)
        blocks = byte_blocks(destination, per_head=not (whole and destination.is_contiguous()))
        self._take(info)
        left_out = (info.nbytes - destination.nbytes) // max(1, len(blocks))
        for block in blocks:
            self._fill(block)
            if left_out:
                self._pass(left_out)

    def skip(self, info: TensorInfo) -> None:
        """Read the next tensor for its part in the checksum only."""
        self._take(info)
        self._pass(info.nbytes)

    def blocks(self, info: TensorInfo, num_rows: int) -> Iterator[memoryview]:
        """The first rows of the next tensor, head by head; each block is valid until the next one."""
        self._take(info)
        heads, num_stored, width = info.shape
        row_bytes = width * info.dtype.itemsize
        for _ in range(heads):
            yield from self._chunks(num_rows * row_bytes)
            self._pass((num_stored - num_rows) * row_bytes)

    def verify(self) -> None:
        """Return only if every byte of the file was read and is what was written; else SegmentDamaged."""
        if self._next != len(self.tensors):
            raise ValueError("not every tensor was read")
        if self._hash.hexdigest() != self._checksum:
            raise SegmentDamaged("its content is not what was written")

    def close(self) -> None:
        """Idempotent."""
        self._file.close()

    def __enter__(self) -> SegmentFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_header(self, num_file_bytes: int) -> tuple[TensorInfo, ...]:
        length = bytearray(LENGTH_BYTES)
        self._fill(memoryview(length))
        try:
            text = bytearray(parse_length(bytes(length), num_file_bytes))
            self._fill(memoryview(text))
            return parse_header(bytes(text), num_file_bytes - LENGTH_BYTES - len(text))
        except ValueError as exc:
            raise SegmentDamaged(str(exc)) from exc

    def _take(self, info: TensorInfo) -> None:
        if self._next == len(self.tensors) or self.tensors[self._next] != info:
            raise ValueError(f"{info.name} is not the next tensor of the file")
        self._next += 1

    def _fill(self, view: memoryview) -> None:
        """Read as many bytes as `view` has; the system may give them in any portions."""
        try:
            while view:
                num_read = self._file.readinto(view[:CHUNK_BYTES])
                if not num_read:
                    raise SegmentDamaged("it ends too early")
                self._hash.update(view[:num_read])
                view = view[num_read:]
        except OSError as exc:
            raise _unreadable(self._path, exc) from exc

    def _chunks(self, nbytes: int) -> Iterator[memoryview]:
        for start in range(0, nbytes, CHUNK_BYTES):
            chunk = self._scratch[: min(CHUNK_BYTES, nbytes - start)]
            self._fill(chunk)
            yield chunk

    def _pass(self, nbytes: int) -> None:
        for _ in self._chunks(nbytes):
            pass


def _same_shape(info: TensorInfo, destination: torch.Tensor) -> bool:
    """False: it has fewer rows. Raises SegmentDamaged when it is no place for this tensor at all."""
    shape = tuple(destination.shape)
    if destination.dtype == info.dtype and shape == info.shape:
        return True
    fewer = not info.is_state and len(shape) == 3 and shape[1] < info.shape[1] and shape[0] > 0
    if destination.dtype != info.dtype or not fewer or info.with_rows(shape[1]).shape != shape:
        raise SegmentDamaged(f"{info.name} has another type or shape than expected")
    return False


def byte_blocks(tensor: torch.Tensor, *, per_head: bool) -> list[memoryview]:
    """The tensor's memory itself, as bytes: one block, or one for each entry of its first dimension.

    Raises ValueError when it is not in the computer's memory or a block is not contiguous.
    """
    if tensor.device.type != "cpu":
        raise ValueError("only tensors in the computer's memory can be read into")
    # As bytes, because NumPy has no bfloat16. A single number has no last dimension to widen.
    flat = tensor.detach() if tensor.dim() else tensor.detach().reshape(1)
    try:
        array = flat.view(torch.uint8).numpy()
        return [_as_bytes(part) for part in array] if per_head else [_as_bytes(array)]
    except (TypeError, RuntimeError) as exc:
        raise ValueError("the rows of each head must be contiguous") from exc


def _as_bytes(array: NDArray[uint8]) -> memoryview:
    """Raises TypeError when the memory is not contiguous."""
    return array.data.cast("B") if array.size else memoryview(b"")


def _unreadable(path: Path, exc: OSError) -> SegmentDamaged | DiskRefused:
    if exc.errno == errno.ENOENT:
        return SegmentDamaged("it is missing")
    if exc.errno in _DAMAGE:
        return SegmentDamaged("it cannot be read")
    return DiskRefused(
        f"A cache file in {path.parent} could not be opened ({exc.strerror or exc}); the chat is safe; "
        "its text is read again."
    )

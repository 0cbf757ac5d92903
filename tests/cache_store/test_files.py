"""One segment's file: read back as written, or refused. (C20, C25)"""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from cache_store import files
from cache_store.errors import DiskRefused, SegmentDamaged
from cache_store.file_header import DTYPES, FileFacts, in_file_order, info_of, parse_header, render_header
from cache_store.files import content_of, first_rows, write_segment_file
from cache_store.segment_file import CHUNK_BYTES, SegmentFile, open_segment_file

needs_posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")


def some_tensors(num_tokens: int = 5) -> dict[str, torch.Tensor]:
    torch.manual_seed(num_tokens)
    return {
        "layers.0.keys": torch.randn(2, num_tokens, 4),
        "layers.0.values": torch.randn(2, num_tokens, 4).to(torch.bfloat16),
        "layers.1.keys": torch.randint(0, 255, (2, num_tokens, 3), dtype=torch.uint8),
        "state.1.conv": torch.randn(1, 3, 2, 2),
        "state.1.length": torch.tensor(7),
    }


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileFacts:
    return write_segment_file(path, content_of(tensors))


def read(path: Path, facts: FileFacts) -> dict[str, torch.Tensor]:
    """What a caller may use: only what was verified."""
    with open_segment_file(path, facts) as file:
        tensors = {info.name: torch.zeros(info.shape, dtype=info.dtype) for info in file.tensors}
        for info in file.tensors:
            file.read_into(info, tensors[info.name])
        file.verify()
    return tensors


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name]
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .equal(other[name].contiguous().reshape(-1).view(torch.uint8))
        for name in one
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "one.safetensors"


# Written and read


def test_what_was_written_is_read_back_bit_for_bit(path: Path) -> None:
    tensors = some_tensors()
    assert same(read(path, write(path, tensors)), tensors)


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
def test_every_type_is_read_back_bit_for_bit_also_by_the_format_s_own_library(
    path: Path, dtype: torch.dtype
) -> None:
    bits = torch.randint(0, 255, (2, 3, 16), dtype=torch.uint8)
    tensors = {"layers.0.keys": bits.view(dtype), "state.x": bits[0, 0].view(dtype)[:1]}
    facts = write(path, tensors)
    assert same(read(path, facts), tensors)
    assert same(load_file(path), tensors)


def test_the_format_s_own_library_reads_a_mix_of_types(path: Path) -> None:
    tensors = some_tensors()
    write(path, tensors)
    assert same(load_file(path), tensors)


def test_every_tensor_is_aligned_to_its_type(path: Path) -> None:
    write(path, some_tensors())
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, tensor in some_tensors().items():
        assert (8 + length + header[name]["data_offsets"][0]) % tensor.dtype.itemsize == 0


def test_tensors_of_one_type_stay_in_the_order_of_the_layers(path: Path) -> None:
    tensors = {f"layers.{i}.{part}": torch.zeros(1, 2, 2) for i in range(12) for part in ("keys", "values")}
    facts = write(path, tensors)
    with open_segment_file(path, facts) as file:
        assert [info.name for info in file.tensors] == list(tensors)


def test_a_part_of_a_growing_buffer_is_written_without_the_rest(path: Path) -> None:
    buffer = torch.randn(3, 10, 4)
    facts = write(path, {"layers.0.keys": buffer[:, 2:7]})
    assert same(read(path, facts), {"layers.0.keys": buffer[:, 2:7]})


def test_a_transposed_tensor_is_written_in_its_own_order(path: Path) -> None:
    tensor = torch.randn(4, 5, 3).transpose(1, 2)
    assert same(load_file(path) if write(path, {"layers.0.keys": tensor}) else {}, {"layers.0.keys": tensor})


@pytest.mark.parametrize("num_rows", [0, 1, 4, 5])
def test_fewer_rows_than_stored_are_read_into_the_middle_of_a_buffer(path: Path, num_rows: int) -> None:
    tensors = {"layers.0.keys": torch.randn(3, 5, 4), "layers.0.values": torch.randn(3, 5, 4)}
    facts = write(path, tensors)
    buffers = {name: torch.full((3, 20, 4), 9.0) for name in tensors}
    with open_segment_file(path, facts) as file:
        for info in file.tensors:
            file.read_into(info, buffers[info.name][:, 6 : 6 + num_rows])
        file.verify()
    for name, buffer in buffers.items():
        assert torch.equal(buffer[:, 6 : 6 + num_rows], tensors[name][:, :num_rows])
        assert (buffer[:, :6] == 9).all()
        assert (buffer[:, 6 + num_rows :] == 9).all()


@pytest.mark.parametrize("num_rows", [1, 3])
def test_fewer_rows_are_read_into_a_tensor_of_their_own(path: Path, num_rows: int) -> None:
    tensors = {"layers.0.keys": torch.randn(3, 5, 4)}
    facts = write(path, tensors)
    rows = torch.zeros(3, num_rows, 4)
    with open_segment_file(path, facts) as file:
        file.read_into(file.tensors[0], rows)
        file.verify()
    assert torch.equal(rows, tensors["layers.0.keys"][:, :num_rows])


@given(
    num_heads=st.integers(1, 3),
    num_stored=st.integers(1, 6),
    width=st.integers(0, 4),
    num_rows=st.integers(0, 6),
    offset=st.integers(0, 3),
)
def test_any_rows_go_to_any_place(
    tmp_path_factory: pytest.TempPathFactory,
    num_heads: int,
    num_stored: int,
    width: int,
    num_rows: int,
    offset: int,
) -> None:
    num_rows = min(num_rows, num_stored)
    path = tmp_path_factory.mktemp("any") / "x"
    tensor = torch.randn(num_heads, num_stored, width)
    facts = write(path, {"layers.0.keys": tensor})
    buffer = torch.zeros(num_heads, offset + num_rows + 2, width)
    with open_segment_file(path, facts) as file:
        file.read_into(file.tensors[0], buffer[:, offset : offset + num_rows])
        file.verify()
    expected = torch.zeros_like(buffer)
    expected[:, offset : offset + num_rows] = tensor[:, :num_rows]
    assert torch.equal(buffer, expected)


def test_tensors_longer_than_a_chunk_are_read_whole_and_in_part(path: Path) -> None:
    num_tokens = CHUNK_BYTES // 16 + 3
    tensors = {"layers.0.keys": torch.randn(2, num_tokens, 8)}
    facts = write(path, tensors)
    assert same(read(path, facts), tensors)
    rows = torch.zeros(2, num_tokens - 1, 8)
    with open_segment_file(path, facts) as file:
        file.read_into(file.tensors[0], rows)
        file.verify()
    assert torch.equal(rows, tensors["layers.0.keys"][:, :-1])


def test_portions_as_small_as_the_system_likes_are_read_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(io.FileIO):
        def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
            return super().readinto(memoryview(buffer)[:7]) or 0

    tensors = some_tensors()
    facts = write(path, tensors)
    monkeypatch.setattr(io, "FileIO", Slow)
    assert same(read(path, facts), tensors)


def test_the_first_rows_of_a_file_make_a_file_of_their_own_without_states(path: Path, tmp_path: Path) -> None:
    tensors = some_tensors(num_tokens=5)
    facts = write(path, tensors)
    short = tmp_path / "short"
    with open_segment_file(path, facts) as source:
        short_facts = write_segment_file(short, first_rows(source, 2))
    expected = {name: tensor[:, :2] for name, tensor in tensors.items() if not name.startswith("state.")}
    assert same(read(short, short_facts), expected)
    assert same(load_file(short), expected)


def test_a_file_of_states_only_may_be_shortened_to_no_tensor_at_all(path: Path, tmp_path: Path) -> None:
    """A model whose layers keep no rows: the file then says that there is nothing, and is not damaged."""
    facts = write(path, {"state.0.x": torch.ones(3)})
    short = tmp_path / "short"
    with open_segment_file(path, facts) as source:
        short_facts = write_segment_file(short, first_rows(source, 2))
    assert read(short, short_facts) == {}
    assert read(tmp_path / "none", write(tmp_path / "none", {})) == {}


def test_the_first_rows_of_a_damaged_file_make_no_file(path: Path, tmp_path: Path) -> None:
    facts = write(path, some_tensors())
    flip(path, facts.nbytes - 1)
    with open_segment_file(path, facts) as source, pytest.raises(SegmentDamaged):
        write_segment_file(tmp_path / "short", first_rows(source, 2))
    assert list(tmp_path.iterdir()) == [path]


def test_the_size_is_known_before_anything_is_written(path: Path) -> None:
    content = content_of(some_tensors())
    assert write_segment_file(path, content).nbytes == content.nbytes == path.stat().st_size


@needs_posix
def test_a_file_is_for_its_owner_only(path: Path) -> None:
    write(path, some_tensors())
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_is_flushed_before_it_gets_its_name_and_its_name_before_it_counts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C19: renaming alone is not enough after a power cut."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("replace"), replace(*names)))
    write(path, some_tensors())
    assert calls == ["fsync", "replace"] + (["fsync"] if os.name != "nt" else [])


# What a caller may not ask


@pytest.mark.parametrize(
    "tensors",
    [
        {"layers.0.keys": torch.zeros(2, 3)},
        {"layers.0.keys": torch.zeros(2, 3, 4, dtype=torch.complex64)},
        {"layers 0": torch.zeros(2, 3, 4)},
        {"": torch.zeros(2, 3, 4)},
        {"state.x": torch.zeros([1] * 9)},
    ],
)
def test_what_cannot_be_a_segment_is_refused(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"."):
        write(path, tensors)
    assert not path.exists()


def test_tensors_are_taken_in_order_and_all_of_them(path: Path) -> None:
    facts = write(path, some_tensors())
    with open_segment_file(path, facts) as file:
        first, second, *_ = file.tensors
        with pytest.raises(ValueError, match="next"):
            file.skip(second)
        file.skip(first)
        with pytest.raises(ValueError, match="next"):
            file.skip(first)
        with pytest.raises(ValueError, match="not every"):
            file.verify()


@pytest.mark.parametrize(
    "destination",
    [
        torch.zeros(2, 6, 4),
        torch.zeros(3, 5, 4),
        torch.zeros(2, 5, 3),
        torch.zeros(2, 5, 4, dtype=torch.float16),
        torch.zeros(5, 4),
        torch.zeros(2, 2, 4, dtype=torch.int32),
    ],
)
def test_a_file_with_another_type_or_shape_than_expected_counts_as_damaged(
    path: Path, destination: torch.Tensor
) -> None:
    facts = write(path, {"layers.0.keys": torch.ones(2, 5, 4)})
    with open_segment_file(path, facts) as file, pytest.raises(SegmentDamaged, match="type or shape"):
        file.read_into(file.tensors[0], destination)
    assert not destination.any()


def test_rows_that_are_not_contiguous_cannot_be_read_into(path: Path) -> None:
    facts = write(path, {"layers.0.keys": torch.ones(2, 5, 4)})
    for destination in (torch.zeros(2, 4, 5).transpose(1, 2), torch.zeros(2, 5, 8)[:, :, :4]):
        with open_segment_file(path, facts) as file, pytest.raises(ValueError, match="contiguous"):
            file.read_into(file.tensors[0], destination)


# Damage: every kind ends in SegmentDamaged


def flip(path: Path, place: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= bit
    path.write_bytes(data)


def refused(path: Path, facts: FileFacts) -> bool:
    with pytest.raises(SegmentDamaged):
        read(path, facts)
    return True


def test_a_flip_of_any_bit_is_noticed(path: Path) -> None:
    tensors = {"layers.0.keys": torch.randn(1, 2, 2), "state.x": torch.randn(2)}
    facts = write(path, tensors)
    original = path.read_bytes()
    for place in range(facts.nbytes):
        for bit in (1, 8, 128):
            flip(path, place, bit)
            assert refused(path, facts), (place, bit)
            path.write_bytes(original)
    assert same(read(path, facts), tensors)


def test_a_file_cut_anywhere_is_noticed(path: Path) -> None:
    facts = write(path, {"layers.0.keys": torch.randn(1, 2, 2)})
    original = path.read_bytes()
    for length in range(facts.nbytes):
        path.write_bytes(original[:length])
        assert refused(path, facts), length
        # Also when whoever cut it knows the size: the row in the database could be damaged too.
        assert refused(path, FileFacts(length, facts.checksum)), length


def test_a_file_cut_while_it_is_read_is_noticed(path: Path) -> None:
    facts = write(path, {"layers.0.keys": torch.randn(1, 50, 2)})
    with open_segment_file(path, facts) as file:
        os.truncate(path, facts.nbytes - 8)
        with pytest.raises(SegmentDamaged, match="too early"):
            file.skip(file.tensors[0])


def test_appended_bytes_are_noticed(path: Path) -> None:
    facts = write(path, some_tensors())
    with path.open("ab") as file:
        file.write(bytes(16))
    assert refused(path, facts)
    assert refused(path, FileFacts(facts.nbytes + 16, facts.checksum))


def test_another_segment_s_file_of_the_same_size_is_noticed(path: Path, tmp_path: Path) -> None:
    facts = write(path, {"layers.0.keys": torch.zeros(1, 2, 2)})
    other = write(tmp_path / "other", {"layers.0.keys": torch.ones(1, 2, 2)})
    assert other.nbytes == facts.nbytes
    (tmp_path / "other").replace(path)
    assert refused(path, facts)


def test_a_missing_file_is_damage(path: Path) -> None:
    with pytest.raises(SegmentDamaged, match="missing"):
        open_segment_file(path, FileFacts(100, "x"))


def test_a_folder_in_its_place_is_damage(path: Path) -> None:
    facts = write(path, some_tensors())
    path.unlink()
    path.mkdir()
    assert refused(path, facts)


@needs_posix
def test_a_link_in_its_place_is_damage_even_to_the_very_file(path: Path, tmp_path: Path) -> None:
    facts = write(path, some_tensors())
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert refused(path, facts)
    assert same(read(tmp_path / "elsewhere", facts), some_tensors())


@needs_posix
def test_a_pipe_in_its_place_is_damage_and_does_not_hang(path: Path) -> None:
    os.mkfifo(path)
    assert refused(path, FileFacts(0, ""))


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no such device")
def test_an_endless_device_in_its_place_is_damage(path: Path) -> None:
    path.symlink_to("/dev/zero")
    assert refused(path, FileFacts(0, ""))


def with_header(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: object = (1, 1, 1), offsets: object = (0, 4), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


NAME = "layers.0.keys"


@pytest.mark.parametrize(
    "data",
    [
        with_header({NAME: entry()}, bytes(4), length=200 << 20),
        with_header({NAME: entry()}, bytes(4), length=2**64 - 1),
        with_header({NAME: entry()}, bytes(4), length=0),
        with_header({}, bytes(4)),
        with_header({"__metadata__": {"a": "b"}}, bytes(1)),
        with_header([NAME]),
        with_header(b"\xff\xfe"),
        with_header(b"[" * 100_000),
        with_header(b'{"a":' * 100_000),
        with_header(
            b'{"layers.0.keys":{"dtype":"F32","shape":[1,1,' + b"9" * 500_000 + b'],"data_offsets":[0,4]}}'
        ),
        with_header({NAME: entry(shape=(2**62, 2**62, 0))}, bytes(4)),
        with_header({NAME: entry(shape=(10**9, 10**9, 10**9), offsets=(0, 4 * 10**27))}, bytes(4)),
        with_header({NAME: entry(shape=(-1, -1, 1))}, bytes(4)),
        with_header({NAME: entry(shape=(1, 1, True))}, bytes(4)),
        with_header({NAME: entry(shape=(1, 1, 1.0))}, bytes(4)),
        with_header({NAME: entry(shape="111")}, bytes(4)),
        with_header({NAME: entry(shape=(1, 1))}, bytes(4)),
        with_header({"state.x": entry(shape=[1] * 9)}, bytes(4)),
        with_header({NAME: entry(offsets=(0, 4, 8))}, bytes(4)),
        with_header({NAME: entry(offsets=(4, 0))}, bytes(4)),
        with_header({NAME: entry(offsets=(-4, 0))}, bytes(4)),
        with_header({NAME: entry(offsets=(4, 8))}, bytes(8)),
        with_header({NAME: entry(offsets=(0, 4)), "b": entry(offsets=(0, 4))}, bytes(4)),
        with_header({NAME: entry(offsets=(0, 4)), "b": entry(offsets=(8, 12))}, bytes(12)),
        with_header({NAME: entry(offsets=(0, 8))}, bytes(8)),
        with_header({NAME: entry()}, bytes(8)),
        with_header({NAME: entry(dtype="C64")}, bytes(4)),
        with_header({NAME: entry(dtype=["F32"])}, bytes(4)),
        with_header({NAME: {**entry(), "run": "x"}}, bytes(4)),
        with_header({NAME: [1]}, bytes(4)),
        with_header({"../../x": entry()}, bytes(4)),
        b"",
        bytes(7),
        bytes(8),
        bytes(100),
    ],
)
def test_a_header_that_lies_is_refused_before_anything_is_allocated(path: Path, data: bytes) -> None:
    """Whoever forged the file knows its size and checksum."""
    path.write_bytes(data)
    facts = FileFacts(len(data), files.xxhash.xxh3_128(data).hexdigest())
    tracemalloc.start()
    with pytest.raises(SegmentDamaged):
        open_segment_file(path, facts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * len(data) + (1 << 20)


def test_a_file_of_the_format_s_own_library_is_read(path: Path) -> None:
    tensors = {NAME: torch.randn(2, 3, 4), "state.x": torch.randn(2)}
    save_file(tensors, path)
    data = path.read_bytes()
    assert same(read(path, FileFacts(len(data), files.xxhash.xxh3_128(data).hexdigest())), tensors)


def test_a_header_is_parsed_as_it_was_rendered() -> None:
    infos = in_file_order(info_of(name, tensor) for name, tensor in some_tensors().items())
    assert list(parse_header(render_header(infos)[8:], sum(info.nbytes for info in infos))) == infos


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("boom",)


def test_a_pickle_in_a_segment_s_place_runs_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C25"""
    monkeypatch.chdir(tmp_path)
    for data in (pickle.dumps(Bomb()), struct.pack("<Q", len(pickle.dumps(Bomb()))) + pickle.dumps(Bomb())):
        path.write_bytes(data)
        assert refused(path, FileFacts(len(data), files.xxhash.xxh3_128(data).hexdigest()))
    torch.save({"x": torch.zeros(2)}, path)
    assert refused(path, FileFacts(path.stat().st_size, ""))
    assert not (tmp_path / "boom").exists()


# A disk that does not take it


class FailingDisk:
    """The n-th call that writes fails with this error."""

    def __init__(self, patch: pytest.MonkeyPatch, fails_at: int, code: int) -> None:
        self.num_calls = 0
        disk = self

        class File(io.FileIO):
            def write(self, data: memoryview, /) -> int:  # type: ignore[override]
                disk.count()
                return super().write(memoryview(data)[:1000])  # a full disk takes what still fits

        def failing(name: str) -> None:
            real = getattr(os, name)

            def call(*args: object, **options: object) -> object:
                self.count()
                return real(*args, **options)

            patch.setattr(os, name, call)

        self.fails_at, self.code = fails_at, code
        patch.setattr(io, "FileIO", File)
        for name in ("fsync", "replace"):
            failing(name)

    def count(self) -> None:
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_failure_at_any_call_leaves_nothing_behind(tmp_path: Path, code: int) -> None:
    path = tmp_path / "x"
    fails_at, num_calls = 1, 0
    while fails_at > num_calls:
        with pytest.MonkeyPatch.context() as patch:
            disk = FailingDisk(patch, fails_at, code)
            try:
                write(path, some_tensors(num_tokens=200))
            except DiskRefused:
                assert list(tmp_path.iterdir()) == []
                fails_at += 1
            else:
                num_calls = disk.num_calls
                break
    assert fails_at > 10
    assert same(load_file(path), some_tensors(num_tokens=200))


def test_an_interrupted_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "x", some_tensors())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_refuses(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    shutil.rmtree(tmp_path / "kv")
    with pytest.raises(DiskRefused, match="cannot be written"):
        write(tmp_path / "kv" / "x", some_tensors())


def test_a_file_that_we_may_not_look_at_is_not_called_damaged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = write(path, some_tensors())

    def forbid(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", forbid)
    with pytest.raises(DiskRefused):
        open_segment_file(path, facts)


def test_a_disk_that_fails_while_it_is_read_is_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.FileIO):
        def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
            if self.tell() > 8:
                raise OSError(errno.EIO, "Input/output error")
            return super().readinto(buffer) or 0

    facts = write(path, some_tensors())
    monkeypatch.setattr(io, "FileIO", Broken)
    assert refused(path, facts)


def test_closing_twice_is_fine(path: Path) -> None:
    file: SegmentFile = open_segment_file(path, write(path, some_tensors()))
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.skip(file.tensors[0])

"""Whatever happens to cache files or to the disk: text is the truth, the next answer is right, and the app
says what happened. (C20, C24, C25)

Chats are written once for each kind of model, on disk; every test harms a copy of that folder.
"""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Callable, Generator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.errors import SegmentGone
from cache_store.records import Link, Segment
from cache_store.segments import Segments
from chat.model import LoadedModel
from chat.saver import NewRows, Saver
from chat.settings import SamplingSettings
from chat.stats import TurnStats
from tests.cache_store.talk import dump
from tests.chat.disks import PLENTY, Disk, HouseOnDisk
from tests.chat.passes import dictated
from tests.chat.replies import encode
from tests.house import OWNER, House
from tests.tiny_models import tiny_model

SHORT = SamplingSettings(temperature=0, max_new_tokens=6)
KINDS = ("llama", "gemma3_text", "lfm2")
"""Full attention; sliding windows and full attention; convolutions and full attention."""

OTHER = "ben"

REPLIES = ("Yes, a dog.", "No, and you?")
"""Dictated, so that no reply ends inside a character, where a state cannot be kept."""

NUM_SEGMENTS = 2 * len(REPLIES)


@lru_cache
def model(kind: str) -> LoadedModel:
    return tiny_model(kind)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a closed house in which two people have a chat each, for each kind of model."""

    @lru_cache
    def write(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        with House(folder, model(kind), max_disk_bytes=PLENTY) as house:
            for owner in (OWNER, OTHER):
                chat = None
                for reply in REPLIES:
                    ids = encode(reply)
                    length = SamplingSettings(temperature=0, max_new_tokens=len(ids))
                    with dictated(*ids):
                        view = house.say("A question, of some length.", chat, length, owner)
                    chat = view.conversation.id
        return folder

    return write


@pytest.fixture(params=KINDS)
def house(request: pytest.FixtureRequest, written: Callable[[str], Path], tmp_path: Path) -> Generator[House]:
    """One with a copy of that folder, which is free to be harmed while the house is closed."""
    folder = tmp_path / "house"
    shutil.copytree(written(request.param), folder)
    with House(folder, model(request.param), max_disk_bytes=PLENTY) as house:
        yield house


def chat_of(house: House, owner: str = OWNER) -> str:
    (chat,) = house.chats.list(owner)
    return chat.id


def stats(view: Any) -> TurnStats:
    return TurnStats.from_json(view.messages[-1].stats)


def segments_of(house: House, owner: str = OWNER) -> list[Segment]:
    """This owner's segments from the first token on; they never branch."""
    assert house.segments is not None
    return sorted((node.segment for node in house.segments.list(owner)), key=lambda each: each.start)


def file_of(house: House, segment: Segment) -> Path:
    assert segment.file is not None
    return house.folder / "kv" / segment.file


def quarantined(house: House) -> set[str | None]:
    folder = house.folder / "kv" / "quarantine"
    return {path.name.partition("-")[2] for path in folder.iterdir()} if folder.is_dir() else set()


def check_that_all_is_known(house: House, owner: str = OWNER) -> None:
    """Another turn reads its own message only, and what a state lost of a reply cut inside a character."""
    check_that_all_is_known_in(house, chat_of(house, owner), owner)


def check_that_all_is_known_in(house: House, chat: str, owner: str = OWNER) -> None:
    view = house.say("Go on.", chat, SHORT, owner)
    assert stats(view).reasons.keys() <= {"new", "not_croppable", "restart"}
    assert stats(view).num_read_again <= SHORT.max_new_tokens
    house.check(chat, owner)


# One file is not what it was


class Marker:
    """Unpickling one leaves a file behind."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


Harm = Callable[[Path, Path], object]


def cut(num_bytes: int) -> Harm:
    """To that many bytes; a negative number counts from the end."""
    return lambda file, other: file.write_bytes(file.read_bytes()[:num_bytes])


def flip(offset: int) -> Harm:
    def harm(file: Path, other: Path) -> None:
        data = bytearray(file.read_bytes())
        data[offset] ^= 4
        file.write_bytes(data)

    return harm


def swap(file: Path, other: Path) -> None:
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)


def put_a_folder(file: Path, other: Path) -> None:
    file.unlink()
    file.mkdir()


def put_a_link(file: Path, other: Path) -> None:
    file.rename(file.with_suffix(".moved"))
    file.symlink_to(file.with_suffix(".moved"))


def put_a_pickle(file: Path, other: Path) -> None:
    file.write_bytes(pickle.dumps(Marker(str(file.parent.parent / "unpickled"))))


def lie_about_the_size(file: Path, other: Path) -> None:
    file.write_bytes((200 * 2**20).to_bytes(8, "little") + file.read_bytes()[8:])


def rewrite(old: bytes, new: bytes) -> Harm:
    """In the header, whose length stays what it was."""
    return lambda file, other: file.write_bytes(file.read_bytes().replace(old, new))


HARMS: dict[str, Harm] = {
    "empty": cut(0),
    "cut in the header": cut(100),
    "last byte missing": cut(-1),
    "longer": lambda file, other: file.write_bytes(file.read_bytes() + bytes(16)),
    "a bit of the header": flip(40),
    "a bit of the data": flip(-9),
    "another type": rewrite(b'"F32"', b'"I32"'),
    "other heads": rewrite(b"[2,", b"[4,"),
    "a header of 200 MB": lie_about_the_size,
    "another segment's": swap,
    "a folder": put_a_folder,
    "a link": put_a_link,
    "a pickle": put_a_pickle,
    "gone": lambda file, other: file.unlink(),
}


@pytest.mark.parametrize(
    ("number", "harm"), [(index % NUM_SEGMENTS, harm) for index, harm in enumerate(HARMS)]
)
def test_a_damaged_file_costs_the_tokens_from_there_on_and_nothing_else(
    house: House, number: int, harm: str
) -> None:
    """Law 2; and law 4: the stats name the reason and count its tokens and files."""
    segments = segments_of(house)
    assert len(segments) == NUM_SEGMENTS
    before, damaged, neighbour = dump(house.database), segments[number], segments[number - 1]
    house.close()
    HARMS[harm](file_of(house, damaged), file_of(house, neighbour))
    first = min(damaged, neighbour, key=lambda each: each.start) if harm == "another segment's" else damaged
    house.open()
    assert dump(house.database) == before
    check_that_all_is_known(house, OTHER)
    view = house.say("What now?", chat_of(house), SHORT)
    num_lost = segments[-1].end - first.start
    assert dict(stats(view).reasons)["damaged"] == stats(view).num_read_again == num_lost
    assert stats(view).num_disk_tokens == first.start
    assert stats(view).num_damaged_files == 1
    house.check(chat_of(house))
    assert first.file in quarantined(house) or harm == "gone"
    assert not (house.folder / "unpickled").exists()
    check_that_all_is_known(house)
    house.restart()
    check_that_all_is_known(house)


def test_what_was_damaged_is_told_by_the_next_turn_however_late_it_comes(house: House) -> None:
    damaged = segments_of(house)[1]
    house.close()
    HARMS["empty"](file_of(house, damaged), Path())
    for _ in range(3):
        house.open()
        house.close()
    house.open()
    view = house.say("What now?", chat_of(house), SHORT)
    assert dict(stats(view).reasons)["damaged"] == segments_of(house)[3].end - damaged.start
    assert stats(view).num_damaged_files == 1


@settings(max_examples=15)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_any_damage_to_any_files_is_noticed(
    written: Callable[[str], Path], kind: str, data: st.DataObject
) -> None:
    """A bit anywhere, a cut anywhere, in any of a chat's files at once."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(written(kind), folder, dirs_exist_ok=True)
        with House(Path(folder), model(kind), max_disk_bytes=PLENTY) as house:
            segments = segments_of(house)
            harmed = data.draw(
                st.lists(st.sampled_from(segments), min_size=1, unique_by=lambda each: each.id)
            )
            house.close()
            for segment in harmed:
                file = file_of(house, segment)
                place = data.draw(st.integers(0, segment.nbytes - 1))
                (data.draw(st.sampled_from([cut, flip])))(place)(file, file)
            house.open()
            start = min(segment.start for segment in harmed)
            view = house.say("What now?", chat_of(house), SHORT)
            assert stats(view).num_disk_tokens == start
            assert dict(stats(view).reasons)["damaged"] == segments[-1].end - start
            house.check(chat_of(house))
            check_that_all_is_known(house)
            check_that_all_is_known(house, OTHER)


def test_a_file_without_a_row_is_never_read_and_goes(house: House) -> None:
    first, *_ = segments_of(house)
    house.close()
    shutil.copy(file_of(house, first), house.folder / "kv" / f"{'a' * 32}.safetensors")
    (house.folder / "kv" / f"{'b' * 32}.safetensors.part").write_bytes(b"half")
    house.open()
    files = {path.name for path in (house.folder / "kv").iterdir()}
    assert files == {segment.file for owner in (OWNER, OTHER) for segment in segments_of(house, owner)}
    check_that_all_is_known(house)


def test_the_chats_outlive_the_whole_folder_of_caches(house: House) -> None:
    before = dump(house.database)
    held = segments_of(house)[-1].end
    house.close()
    shutil.rmtree(house.folder / "kv")
    house.open()
    assert dump(house.database) == before
    view = house.say("What now?", chat_of(house), SHORT)
    assert dict(stats(view).reasons)["damaged"] == held
    house.check(chat_of(house))
    check_that_all_is_known(house)


def test_damage_that_comes_while_the_chats_are_open_is_noticed_when_a_file_is_needed(house: House) -> None:
    """The live cache needs none; another conversation's beginning does, and so does an older branch."""
    first = segments_of(house)[0]
    HARMS["a bit of the data"](file_of(house, first), Path())
    question = house.chats.view(OWNER, chat_of(house)).messages[0].text
    view = house.say(question, None, SHORT)
    assert view.messages[-1].error is None
    assert stats(view).num_disk_tokens == 0
    assert stats(view).num_damaged_files == 1
    assert first.file in quarantined(house)
    house.check(view.conversation.id)
    view = house.say("What now?", view.conversation.id, SHORT)
    assert stats(view).num_damaged_files == 0


def test_a_chat_without_a_turn_is_saved_and_comes_back_as_it_is(house: House) -> None:
    """C20."""
    empty = house.chats.create(OWNER, "Be kind.")
    house.restart()
    assert house.chats.view(OWNER, empty.id).messages == ()
    view = house.say("Hello.", empty.id, SHORT)
    assert set(stats(view).reasons) == {"new"}
    house.check(empty.id)


@pytest.mark.parametrize("number", range(NUM_SEGMENTS))
def test_a_file_that_may_not_be_opened_is_left_alone_and_its_text_is_read(
    house: House, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be readable again tomorrow."""
    segments = segments_of(house)
    house.restart()
    with monkeypatch.context() as patch:
        refuse_to_open(patch, file_of(house, segments[number]), errno.EACCES)
        view = house.say("What now?", chat_of(house), SHORT)
    assert view.messages[-1].error is None
    assert stats(view).num_disk_tokens == segments[number].start
    assert dict(stats(view).reasons)["damaged"] == segments[-1].end - segments[number].start
    assert stats(view).num_damaged_files == 1
    house.check(chat_of(house))
    assert quarantined(house) == set()
    house.restart()
    check_that_all_is_known(house)


def refuse_to_open(patch: pytest.MonkeyPatch, file: Path, code: int) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if Path(path) == file:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, flags, *args, **options)

    patch.setattr(os, "open", refusing)


# The disk has no room, or may not be written


@pytest.fixture(params=KINDS)
def on_disk(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Generator[HouseOnDisk]:
    disk = Disk()
    disk.install(monkeypatch)
    with HouseOnDisk(tmp_path, model(request.param), disk) as house:
        yield house


def notice_of(house: House, chat: str) -> str:
    """What the page says once nothing waits for the disk any more."""
    assert house.saver is not None
    assert house.saver.wait_for(chat, 60)
    return house.chats.saving_notice()


FAILURES: dict[str, dict[str, int]] = {
    "full before": {"free": 1000},
    "full at once": {"broken_after": 0},
    "full half-way": {"broken_after": 5},
    "an error": {"code": errno.EIO, "broken_after": 3},
    "read-only": {"code": errno.EROFS, "broken_after": 0},
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_disk_that_fails_turns_saving_off_until_it_works_again(on_disk: HouseOnDisk, failure: str) -> None:
    """C24: each reply arrives and is stored, the page says in one sentence that caches are not saved, nothing
    half-written stays, and when there is room again everything is saved, also what was not before."""
    house = on_disk
    chat = dictated_turn(house, None, "Yes, a dog.")
    assert notice_of(house, chat) == ""
    for name, value in FAILURES[failure].items():
        setattr(house.disk_below, name, value)
    for reply in ("No, and you?", "The dog is the dog."):
        dictated_turn(house, chat, reply)
        notice = notice_of(house, chat)
        assert notice.endswith(".")
        assert "the chat is safe" in notice
        assert "\n" not in notice
        assert str(house.folder) not in notice, "guests see it, too"
        house.check_invariant(chat)
    assert {path.name for path in (house.folder / "kv").iterdir()} == {
        segment.file for segment in segments_of(house)
    }
    house.disk_below.free, house.disk_below.broken_after = PLENTY, None
    dictated_turn(house, chat, "All is well.")
    assert notice_of(house, chat) == ""
    house.restart()
    view = house.say("What now?", chat, SHORT)
    assert set(stats(view).reasons) == {"new"}
    house.check(chat)


def dictated_turn(house: House, chat: str | None, reply: str) -> str:
    ids = encode(reply)
    with dictated(*ids):
        view = house.say("And?", chat, SamplingSettings(temperature=0, max_new_tokens=len(ids)))
    assert view.messages[-1].text == reply
    assert stats(view).num_read_again == 0
    return view.conversation.id


def test_a_chat_larger_than_the_limit_keeps_its_beginning_and_says_so_until_there_is_room(
    house: House,
) -> None:
    """C24: `--max-disk` is never exceeded, and the open chat never pushes itself out."""
    house.chats.delete(OTHER, chat_of(house, OTHER))
    chat = chat_of(house)
    num_held = segments_of(house)[-1].end
    limit = house.max_disk_bytes = sum(segment.nbytes for segment in segments_of(house)) + 500
    house.restart()
    view = house.say("A long message. " * 4, chat, SHORT)
    house.check(chat)
    assert "--max-disk" in notice_of(house, chat)
    assert notice_of(house, chat).endswith(".")
    assert kv_bytes(house) <= limit
    house.restart()
    view = house.say("What now?", chat, SHORT)
    assert stats(view).num_disk_tokens == num_held
    house.check(chat)
    house.max_disk_bytes = PLENTY
    house.restart()
    view = house.say("There is room now.", chat, SHORT)
    house.check(chat)
    assert notice_of(house, chat) == ""
    house.restart()
    check_that_all_is_known(house)


def test_room_that_a_deleted_chat_leaves_is_used_at_once(house: House) -> None:
    limit = house.max_disk_bytes = kv_bytes(house)
    house.restart()
    long = house.say("A long message. " * 40, None, SHORT, OTHER).conversation.id
    assert kv_bytes(house) <= limit
    assert "--max-disk" in notice_of(house, long)
    house.chats.delete(OTHER, long)
    short = house.say("A short one.", None, SHORT, OTHER).conversation.id
    assert notice_of(house, short) == ""
    house.restart()
    view = house.say("And?", short, SHORT, OTHER)
    assert stats(view).num_disk_tokens > 0
    house.check(short, OTHER)


def kv_bytes(house: House) -> int:
    """What really lies in the folder."""
    return sum(path.lstat().st_size for path in (house.folder / "kv").rglob("*") if path.is_file())


# The clock


YEAR_S = 365 * 24 * 3600.0


def test_a_clock_that_was_set_back_by_a_year_breaks_nothing(house: House) -> None:
    """Everything that was stored seems to come from the future; what is used now still stays longest."""
    for table, columns in TIMES.items():
        changes = ", ".join(f"{column} = {column} + {YEAR_S}" for column in columns)
        house.database.execute(f"UPDATE {table} SET {changes}")  # noqa: S608
    house.restart()
    before = house.chats.list(OWNER)
    check_that_all_is_known(house)
    newest = house.say("A new chat.", None, SHORT).conversation
    house.say("What now?", before[0].id, SHORT)
    assert [each.id for each in house.chats.list(OWNER)] == [before[0].id, newest.id]
    house.say("And in the new one?", newest.id, SHORT)
    assert [each.id for each in house.chats.list(OWNER)] == [newest.id, before[0].id]
    assert notice_of(house, newest.id) == ""
    assert house.segments is not None
    house.database.execute("UPDATE segments SET seconds = nbytes")  # so that only the time of use counts
    house.segments.prune(kv_bytes(house) - 1)
    assert any(node.segment.state == "evicted" for node in house.segments.list(OTHER))
    assert all(node.segment.state == "stored" for node in house.segments.list(OWNER))
    check_that_all_is_known_in(house, newest.id)


TIMES = {
    "conversations": ("created_at", "updated_at"),
    "messages": ("created_at",),
    "segments": ("created_at", "last_used_at"),
    "segment_uses": ("used_at",),
}


# What was not saved in time


def test_rows_that_the_queue_had_no_room_for_are_saved_when_the_app_closes(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk stands still for two turns; their rows are refused and nothing of them was queued."""
    gate = threading.Event()
    append = Segments.append

    def held(segments: Segments, *args: Any, **options: Any) -> Link:
        assert gate.wait(60)
        return append(segments, *args, **options)

    monkeypatch.setattr(Segments, "append", held)
    monkeypatch.setattr("chat.saver.MAX_QUEUED_BYTES", 1)
    name = chat_of(house)
    for reply in ("No, and you?", "The dog is the dog."):
        dictated_turn(house, name, reply)
    gate.set()
    house.restart()
    check_that_all_is_known(house)


def test_rows_the_queue_refused_are_saved_at_the_end_also_after_another_branch_was_deleted(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = chat_of(house)
    view = house.chats.view(OWNER, name)
    with dictated(*encode("A cat.")):
        other = house.regenerate(view.messages[1].id).messages[1].id
    house.chats.select(OWNER, other, 1)
    with monkeypatch.context() as full:
        full.setattr(Saver, "offer", lambda *_: False)
        dictated_turn(house, name, "No, and you?")
    house.chats.delete_branch(OWNER, other)
    house.restart()
    check_that_all_is_known(house)


def test_rows_that_were_lost_are_saved_when_the_app_closes(on_disk: HouseOnDisk) -> None:
    house = on_disk
    name = dictated_turn(house, None, "Yes, a dog.")
    house.disk_below.free = 0
    dictated_turn(house, name, "No, and you?")
    assert notice_of(house, name)
    house.disk_below.free = PLENTY
    house.restart()
    check_that_all_is_known_in(house, name)


def test_after_a_loss_only_what_is_not_on_disk_is_copied_for_the_saver(
    on_disk: HouseOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 5, for chats that do not fit into the limit, turn after turn."""
    house, offered = on_disk, list[NewRows]()
    name = dictated_turn(house, None, "Yes, a dog.")
    assert notice_of(house, name) == ""
    num_stored = segments_of(house)[-1].end
    house.disk_below.free = 0
    dictated_turn(house, name, "No, and you?")
    assert notice_of(house, name)
    offer = Saver.offer

    def seen(saver: Saver, rows: NewRows, *args: Any) -> bool:
        offered.append(rows)
        return offer(saver, rows, *args)

    monkeypatch.setattr(Saver, "offer", seen)
    dictated_turn(house, name, "The dog is the dog.")
    assert min(rows.start for rows in offered) == num_stored


def test_a_beginning_that_goes_while_rows_are_on_their_way_is_no_reason_for_a_notice(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another chat's eviction may come between the look-up and the writing; the next turn saves it all."""
    append = Segments.append

    def gone(*args: Any, **options: Any) -> Link:
        raise SegmentGone("as a test")

    monkeypatch.setattr(Segments, "append", gone)
    dictated_turn(house, chat_of(house), "No, and you?")
    assert notice_of(house, chat_of(house)) == ""
    monkeypatch.setattr(Segments, "append", append)
    dictated_turn(house, chat_of(house), "All is well.")
    house.restart()
    check_that_all_is_known(house)

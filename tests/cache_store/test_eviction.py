"""The limit holds at every moment, and what goes is what is missed least. (C24)"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store import files as files_module
from cache_store.errors import DiskRefused, NoRoom, SegmentGone, StoreError
from cache_store.eviction import HALF_LIFE_S
from cache_store.records import Conversation, Link
from cache_store.segment_folder import SegmentFolder
from tests.cache_store.kv_rows import Shelf


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shelf(tmp_path: Path, clock: Clock) -> Generator[Shelf]:
    shelf = Shelf(tmp_path, clock=clock, quick=True)
    yield shelf
    shelf.close()


@pytest.fixture
def chat(shelf: Shelf) -> Conversation:
    return shelf.chat()


def stored(shelf: Shelf) -> set[str]:
    return {node.segment.id for node in shelf.segments.list() if node.segment.state == "stored"}


def evict_one(shelf: Shelf, pinned: frozenset[str] = frozenset()) -> set[str]:
    """The ids of what goes when a single byte is missing."""
    before = stored(shelf)
    shelf.segments.prune(shelf.nbytes() - 1, pinned)
    shelf.check()
    return before - stored(shelf)


# What goes


def test_of_two_leaves_the_one_that_saves_less_time_goes(shelf: Shelf, chat: Conversation) -> None:
    shelf.say(chat, (1, 2), seconds=5)
    cheap = shelf.say(chat, (3, 4), seconds=1)
    assert evict_one(shelf) == {cheap.segment.id}


def test_time_saved_counts_per_byte(shelf: Shelf, chat: Conversation) -> None:
    large = shelf.say(chat, range(100), seconds=5)
    shelf.say(chat, (200,), seconds=4)
    assert evict_one(shelf) == {large.segment.id}


def test_of_two_equal_leaves_the_one_unused_for_longer_goes(
    shelf: Shelf, chat: Conversation, clock: Clock
) -> None:
    first, second = shelf.say(chat, (1, 2)), shelf.say(chat, (3, 4))
    clock.now += 60
    shelf.segments.use(chat.id, first)
    assert evict_one(shelf) == {second.segment.id}


@pytest.mark.parametrize(("weeks", "goes"), [(0.9, "quick"), (1.1, "slow")])
def test_a_week_unused_halves_what_a_segment_is_worth(
    shelf: Shelf, chat: Conversation, clock: Clock, weeks: float, goes: str
) -> None:
    links = {"slow": shelf.say(chat, (1, 2), seconds=2)}
    clock.now += weeks * HALF_LIFE_S
    links["quick"] = shelf.say(chat, (3, 4), seconds=1)
    assert evict_one(shelf) == {links[goes].segment.id}


def test_leaves_go_before_what_they_hang_from(shelf: Shelf, chat: Conversation) -> None:
    root = shelf.say(chat, (1, 2), seconds=0)
    middle = shelf.say(chat, (1, 2, 3), seconds=0)
    leaf = shelf.say(chat, (1, 2, 3, 4), seconds=1000)
    assert [evict_one(shelf) for _ in range(3)] == [
        {leaf.segment.id},
        {middle.segment.id},
        {root.segment.id},
    ]


def test_a_beginning_is_as_young_as_what_was_last_used_below_it(
    shelf: Shelf, chat: Conversation, clock: Clock
) -> None:
    shelf.say(chat, (1, 2))
    child = shelf.say(chat, (1, 2, 3), seconds=0)
    clock.now += 10 * HALF_LIFE_S
    shelf.segments.use(chat.id, child)
    other = shelf.say(chat, (8, 9), seconds=0.5)
    assert evict_one(shelf) == {child.segment.id}
    assert evict_one(shelf) == {other.segment.id}


def test_what_is_pinned_stays_and_so_does_all_before_it(shelf: Shelf, chat: Conversation) -> None:
    root = shelf.say(chat, (1, 2), seconds=0)
    pinned = shelf.say(chat, (1, 2, 3), seconds=0)
    leaf = shelf.say(chat, (1, 2, 3, 4), seconds=0)
    other = shelf.say(chat, (8, 9), seconds=100)
    ids = frozenset({pinned.segment.id})
    assert evict_one(shelf, ids) | evict_one(shelf, ids) == {leaf.segment.id, other.segment.id}
    with pytest.raises(NoRoom):
        evict_one(shelf, ids)
    assert stored(shelf) == {root.segment.id, pinned.segment.id}


def test_when_there_cannot_be_room_nothing_goes(shelf: Shelf, chat: Conversation) -> None:
    pinned = shelf.say(chat, range(50))
    other = shelf.say(chat, (100,))
    with pytest.raises(NoRoom):
        shelf.segments.prune(10, {pinned.segment.id})
    assert stored(shelf) == {pinned.segment.id, other.segment.id}


def test_what_was_set_aside_goes_before_anything_else(shelf: Shelf, chat: Conversation) -> None:
    damaged, kept = shelf.say(chat, (1, 2)), shelf.say(chat, (3, 4))
    shelf.segments.set_aside(damaged.segment, "as a test")
    assert evict_one(shelf) == set()
    assert stored(shelf) == {kept.segment.id}
    assert shelf.segments.size().num_quarantined == 0


def test_evicting_never_touches_a_chat(shelf: Shelf) -> None:
    turn = shelf.chats.create_with_turn(
        "ann", title="Talk", system_prompt="", text="Hello", sampling={}, seed=None
    )[1]
    chat = shelf.chats.get("ann", turn.question.conversation_id)
    shelf.say(chat, (1, 2, 3))
    before = shelf.chats.path("ann", chat.id)
    shelf.segments.prune(0)
    assert shelf.files() == set()
    assert shelf.chats.path("ann", chat.id) == before


# A clock that is wrong


def test_a_clock_set_back_breaks_nothing(shelf: Shelf, chat: Conversation, clock: Clock) -> None:
    cheap = shelf.say(chat, (1, 2), seconds=1)
    clock.now -= 100 * HALF_LIFE_S
    shelf.say(chat, (3, 4), seconds=2)
    assert evict_one(shelf) == {cheap.segment.id}


def test_a_clock_that_was_ahead_once_makes_nothing_young_for_ever(
    shelf: Shelf, chat: Conversation, clock: Clock
) -> None:
    clock.now += 1000 * HALF_LIFE_S
    old = shelf.say(chat, (1, 2), seconds=2)
    clock.now -= 1000 * HALF_LIFE_S
    shelf.segments.sweep()
    clock.now += 5 * HALF_LIFE_S
    shelf.say(chat, (3, 4), seconds=1)
    assert evict_one(shelf) == {old.segment.id}


def test_an_age_of_centuries_is_no_number_too_small(shelf: Shelf, chat: Conversation, clock: Clock) -> None:
    shelf.say(chat, (1, 2))
    clock.now += 1e12
    assert len(evict_one(shelf)) == 1


# The limit


class Watched(io.FileIO):
    """Looks at the folder after every single write to it."""

    folder: Path
    max_bytes: int
    most = 0

    def write(self, data: memoryview, /) -> int:  # type: ignore[override]
        num_written = super().write(memoryview(data)[:100])
        now = sum(path.lstat().st_size for path in Watched.folder.rglob("*") if path.is_file())
        assert now <= Watched.max_bytes
        Watched.most = max(Watched.most, now)
        return num_written


@settings(max_examples=25)
@given(
    paths=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=15),
    max_bytes=st.integers(200, 3000),
    damaged=st.integers(0, 14),
)
def test_the_folder_never_holds_more_than_the_limit_not_even_while_it_writes(
    tmp_path_factory: pytest.TempPathFactory, paths: list[list[int]], max_bytes: int, damaged: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        shelf = Shelf(tmp_path_factory.mktemp("limit"), max_bytes, quick=True)
        chat = shelf.chat()
        Watched.folder, Watched.max_bytes = shelf.kv, max_bytes
        patch.setattr(files_module.io, "FileIO", Watched)
        for number, path in enumerate(paths):
            try:
                link = shelf.say(chat, path)
            except NoRoom:
                continue
            assert shelf.find(path).num_tokens == len(path)
            if number == damaged:
                shelf.segments.set_aside(link.segment, "as a test")
        shelf.check()
        shelf.close()


def test_the_limit_is_used_to_the_full(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, quick=True)
    chat = shelf.chat()
    shelf.say(chat, (1, 2))
    max_bytes = shelf.nbytes()
    shelf.close()
    exact = Shelf(tmp_path, max_bytes, quick=True)
    other = exact.say(exact.chat(), (3, 4))
    assert stored(exact) == {other.segment.id}
    exact.close()
    short = Shelf(tmp_path, max_bytes - 1, quick=True)
    with pytest.raises(NoRoom, match="max-disk"):
        short.say(short.chat(), (5, 6))
    short.close()


def test_a_limit_of_nothing_stores_nothing_and_says_so(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 0, quick=True)
    with pytest.raises(NoRoom):
        shelf.say(shelf.chat(), (1, 2))
    assert shelf.files() == set()
    shelf.check()
    shelf.close()


def test_a_path_longer_than_the_limit_keeps_its_beginning(tmp_path: Path) -> None:
    """Growing turn by turn, the chat must not evict its own beginning for the sake of its end."""
    shelf = Shelf(tmp_path, 1500, quick=True)
    chat = shelf.chat()
    path: tuple[int, ...] = ()
    for turn in range(20):
        path += (turn, turn + 1)
        try:
            shelf.say(chat, path)
        except NoRoom:
            break
    else:
        pytest.fail("the limit was never reached")
    assert shelf.check_read(path) == len(path) - 2
    shelf.check()
    shelf.close()


def test_the_parent_is_not_evicted_to_make_room_for_its_child(tmp_path: Path, clock: Clock) -> None:
    shelf = Shelf(tmp_path, clock=clock, quick=True)
    chat = shelf.chat()
    shelf.say(chat, (1, 2), seconds=0)
    shelf.say(chat, (7, 8), seconds=100)
    max_bytes = shelf.nbytes()
    shelf.close()
    full = Shelf(tmp_path, max_bytes, clock=clock, quick=True)
    full.say(chat, (1, 2, 3), seconds=0)
    assert full.check_read((1, 2, 3)) == 3
    assert full.find((7, 8)).evicted
    full.check()
    full.close()


def test_shortening_a_shared_beginning_keeps_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(tmp_path, quick=True)
    chat, other = shelf.chat(), shelf.chat()
    shelf.say(chat, range(40))
    shelf.say(other, range(20))
    max_bytes = shelf.nbytes()
    shelf.close()
    full = Shelf(tmp_path, max_bytes, quick=True)
    Watched.folder, Watched.max_bytes = full.kv, max_bytes
    monkeypatch.setattr(files_module.io, "FileIO", Watched)
    full.chats.delete("ann", chat.id)
    full.segments.forget_unused()
    assert full.find(range(20)).evicted
    full.check()
    full.close()


# The disk


def test_some_of_the_disk_is_left_to_everything_else(tmp_path: Path) -> None:
    free = 10_000
    shelf = Shelf(tmp_path, quick=True, disk_free=lambda _: free, reserve_bytes=9_000)
    chat = shelf.chat()
    shelf.say(chat, (1, 2))
    free = 9_100
    with pytest.raises(DiskRefused, match="nearly full"):
        shelf.say(chat, (3, 4))
    assert shelf.check_read((1, 2)) == 2
    shelf.check()
    free = 10_000
    shelf.say(chat, (3, 4))
    shelf.close()


def test_a_file_that_cannot_be_removed_is_not_called_evicted(
    shelf: Shelf, chat: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = shelf.say(chat, (1, 2), seconds=1)
    second = shelf.say(chat, (3, 4), seconds=2)
    real = SegmentFolder.remove

    def remove(folder: SegmentFolder, name: str) -> None:
        if name == second.segment.file:
            raise DiskRefused("as a test")
        real(folder, name)

    with monkeypatch.context() as patch:
        patch.setattr(SegmentFolder, "remove", remove)
        with pytest.raises(DiskRefused):
            shelf.segments.prune(0)
    assert shelf.find((1, 2)).evicted
    assert stored(shelf) == {second.segment.id} != {first.segment.id}
    shelf.check()


def test_a_read_only_folder_refuses_and_what_is_stored_can_still_be_read(
    shelf: Shelf, chat: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.say(chat, (1, 2))
    real = os.open

    def read_only(path: str, flags: int, *mode: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", read_only)
        with pytest.raises(DiskRefused, match="cannot be written"):
            shelf.say(chat, (1, 2, 3))
        assert shelf.check_read((1, 2, 3)) == 2
    shelf.say(chat, (1, 2, 3))
    shelf.check()


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="no permission stops this user")
def test_a_folder_without_permission_to_write_refuses(shelf: Shelf, chat: Conversation) -> None:
    shelf.kv.chmod(0o500)
    try:
        with pytest.raises(DiskRefused):
            shelf.say(chat, (1, 2))
    finally:
        shelf.kv.chmod(0o700)
    shelf.check()


def test_a_database_that_refuses_leaves_no_file(
    shelf: Shelf, chat: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise DiskRefused("The disk is full.")

    shelf.say(chat, (1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(shelf.database, "insert", refuse)
        with pytest.raises(StoreError):
            shelf.say(chat, (1, 2, 3))
    shelf.check()
    assert shelf.check_read((1, 2, 3)) == 2


def test_use_keeps_what_eviction_may_take_but_forgetting_may_not(shelf: Shelf, chat: Conversation) -> None:
    link: Link = shelf.say(chat, (1, 2))
    shelf.segments.prune(0)
    assert shelf.segments.forget_unused() == 0
    with pytest.raises(SegmentGone):
        shelf.segments.open(link.segment)
    assert shelf.find((1, 2)).evicted

"""A process is killed at every step of everything that changes segments; the next one finds a tree in order,
every text, and every row that was stored before. (C19)

A step is a call that reaches the disk: opening, each portion written, flushing, renaming, removing, and each
statement of SQLite. For each scenario a process is forked per step and kills itself right before it.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import subprocess
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from cache_store.conversations import Conversations
from cache_store.errors import DiskRefused
from cache_store.records import Conversation
from tests.cache_store.killer import Killer
from tests.cache_store.kv_rows import PLENTY, Shelf
from tests.cache_store.talk import dump

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

SHARED = (1, 2, 3, 4)
OLD = (*SHARED, 5, 6)
NEW = (*SHARED, 5, 7, 8)
OTHER = (1, 2, 9)


@dataclass(frozen=True)
class Scenario:
    """`prepare` builds what is there before; `act` is what is killed, at `num_kills` steps or more; `kept` is
    found afterwards whenever the kill came; `done` is found when it was done again."""

    prepare: Callable[[Shelf], None]
    act: Callable[[Shelf], None]
    kept: tuple[tuple[int, ...], ...]
    done: tuple[tuple[int, ...], ...]
    num_kills: int = 0
    max_bytes: int = PLENTY


def chat_of(shelf: Shelf, title: str) -> Conversation:
    (found,) = [chat for chat in shelf.chats.list("ann") if chat.title == title]
    return found


def two_chats(shelf: Shelf) -> None:
    for title in ("one", "two"):
        turn = shelf.chats.create_with_turn(
            "ann", title=title, system_prompt="Be kind.", text=f"Hello from {title}", sampling={}, seed=None
        )[1]
        shelf.chats.finish_reply(
            turn.reply.id,
            token_ids=(1, 2),
            text="Well.",
            status="done",
            finish_reason="stop",
            error=None,
            stats={},
        )
    shelf.say(chat_of(shelf, "one"), SHARED)
    shelf.say(chat_of(shelf, "one"), OLD)


def two_chats_with_a_branch(shelf: Shelf) -> None:
    two_chats(shelf)
    shelf.say(chat_of(shelf, "two"), OTHER)


def everything_evicted(shelf: Shelf) -> None:
    two_chats_with_a_branch(shelf)
    shelf.segments.prune(0)


def first_chat_deleted(shelf: Shelf) -> None:
    two_chats_with_a_branch(shelf)
    shelf.chats.delete("ann", chat_of(shelf, "one").id)


def say(title: str, *paths: tuple[int, ...]) -> Callable[[Shelf], None]:
    def act(shelf: Shelf) -> None:
        for path in paths:
            shelf.say(chat_of(shelf, title), path)

    return act


def set_aside(shelf: Shelf) -> None:
    for link in shelf.find(OLD).links[:1]:
        shelf.segments.set_aside(link.segment, "as a test")


def evict_all(shelf: Shelf) -> None:
    shelf.segments.prune(0)


def forget(shelf: Shelf) -> None:
    shelf.segments.forget_unused()


def sweep(shelf: Shelf) -> None:
    shelf.segments.sweep()


def a_mess(shelf: Shelf) -> None:
    """A half-written file, an orphan, a missing file, one of a wrong size, a deleted chat."""
    two_chats_with_a_branch(shelf)
    shelf.say(chat_of(shelf, "one"), NEW)
    shelf.say(chat_of(shelf, "one"), (20, 21))
    missing, cut = shelf.find(OLD).links[-1].segment, shelf.find((20, 21)).links[-1].segment
    assert missing.file
    assert cut.file
    (shelf.kv / missing.file).unlink()
    os.truncate(shelf.kv / cut.file, 50)
    (shelf.kv / ("0" * 32 + ".safetensors")).write_bytes(b"orphan")
    (shelf.kv / ("1" * 32 + ".safetensors.part")).write_bytes(b"half")


SCENARIOS = {
    "a turn": Scenario(two_chats, say("one", NEW), kept=(SHARED, OLD), done=(NEW,), num_kills=50),
    "a turn that evicts": Scenario(
        two_chats_with_a_branch, say("one", NEW), kept=(SHARED,), done=(NEW,), num_kills=65, max_bytes=900
    ),
    "a turn that stores evicted segments again": Scenario(
        everything_evicted, say("one", NEW), kept=(), done=(NEW,), num_kills=80
    ),
    "pruning": Scenario(two_chats_with_a_branch, evict_all, kept=(), done=(), num_kills=15),
    "forgetting": Scenario(
        first_chat_deleted, forget, kept=(OTHER, SHARED[:2]), done=(OTHER, SHARED[:2]), num_kills=20
    ),
    "setting aside": Scenario(two_chats_with_a_branch, set_aside, kept=(), done=(), num_kills=15),
    "a start after a mess": Scenario(a_mess, sweep, kept=(SHARED,), done=(SHARED,), num_kills=20),
}


# Killing


def run_and_kill(folder: Path, scenario: Scenario, kill_at: int) -> bool:
    """Run the scenario in a process of its own; was it killed?"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads: the child only does I/O
        child = os.fork()
    if not child:
        try:
            shelf = Shelf(folder, scenario.max_bytes, quick=True)
            Killer(kill_at).watch(shelf.database)
            scenario.act(shelf)
            os._exit(0)
        except BaseException:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def check_next_start(folder: Path, scenario: Scenario, texts: object) -> None:
    """What the next process finds, and that it can go on."""
    shelf = Shelf(folder, scenario.max_bytes, quick=True)
    shelf.segments.sweep()
    shelf.check()
    assert shelf.nbytes() <= scenario.max_bytes
    for path in scenario.kept:
        assert shelf.check_read(path) == len(path)
    for path in (OLD, NEW, OTHER):
        shelf.check_read(path)
    again = shelf.segments.sweep()
    assert (again.num_temporary, again.num_orphans, again.num_missing, again.num_damaged) == (0, 0, 0, 0)
    scenario.act(shelf)
    for path in scenario.done:
        assert shelf.check_read(path) == len(path)
    shelf.check()
    assert dump(shelf.database) == texts
    shelf.close()


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_kill_before_any_step_leaves_order_and_loses_nothing_that_was_stored(
    tmp_path: Path, name: str
) -> None:
    scenario = SCENARIOS[name]
    before, folder = tmp_path / "before", tmp_path / "now"
    before.mkdir()
    shelf = Shelf(before, quick=True)
    scenario.prepare(shelf)
    texts = dump(shelf.database)
    shelf.close()
    kill_at, killed = 0, True
    while killed:
        kill_at += 1
        shutil.copytree(before, folder)
        killed = run_and_kill(folder, scenario, kill_at)
        check_next_start(folder, scenario, texts)
        shutil.rmtree(folder)
    assert kill_at > scenario.num_kills


def test_that_is_at_least_two_hundred_kills() -> None:
    assert sum(scenario.num_kills for scenario in SCENARIOS.values()) >= 200


# A disk that is full


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A file system of its own that holds half a megabyte; needs the right to mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    return disk


def test_a_full_disk_keeps_what_was_stored_and_goes_on_when_there_is_space(
    small_disk: Path, tmp_path: Path
) -> None:
    """C24. The transcripts are on another disk: theirs is `test_database`'s to guard."""
    shelf = Shelf(tmp_path, quick=True)
    try:
        shelf.kv.rmdir()
        shelf.kv.symlink_to(small_disk, target_is_directory=True)
        chat = shelf.chat()
        shelf.say(chat, SHARED)
        (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 8192))
        with pytest.raises(DiskRefused):
            shelf.say(chat, (*SHARED, *range(2000)))
        assert shelf.check_read((*SHARED, 0)) == len(SHARED)
        (small_disk / "filler").unlink()
        shelf.check()
        shelf.say(chat, (*SHARED, *range(2000)))
        assert shelf.check_read((*SHARED, *range(2000))) == 2000 + len(SHARED)
    finally:
        shelf.close()
        subprocess.run(["umount", str(small_disk)], check=True)


def test_a_file_system_that_is_read_only_refuses_and_is_still_read(small_disk: Path, tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, quick=True)
    try:
        shelf.kv.rmdir()
        shelf.kv.symlink_to(small_disk, target_is_directory=True)
        chat = shelf.chat()
        shelf.say(chat, SHARED)
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        with pytest.raises(DiskRefused):
            shelf.say(chat, OLD)
        with pytest.raises(DiskRefused):
            shelf.segments.prune(0)
        assert shelf.check_read(OLD) == len(SHARED)
        shelf.check()
    finally:
        shelf.close()
        subprocess.run(["umount", str(small_disk)], check=True)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failure_at_any_write_keeps_order_and_what_was_stored(tmp_path: Path, code: int) -> None:
    shelf = Shelf(tmp_path, quick=True)
    chat = shelf.chat()
    shelf.say(chat, SHARED)
    fails_at, num_kept = 0, len(SHARED)
    while num_kept == len(SHARED):
        fails_at += 1
        num_calls = 0

        class File(io.FileIO):
            def write(self, data: memoryview, /) -> int:  # type: ignore[override]
                nonlocal num_calls
                num_calls += 1
                if num_calls == fails_at:  # noqa: B023
                    raise OSError(code, os.strerror(code))
                return super().write(memoryview(data)[:30])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(io, "FileIO", File)
            with suppress(DiskRefused):
                shelf.say(chat, NEW)
        shelf.check()
        num_kept = shelf.check_read(NEW)
    assert fails_at > 5
    assert num_kept == len(NEW)
    shelf.close()


def test_chats_do_not_need_segments_at_all(tmp_path: Path) -> None:
    """Text is the truth: with the whole cache folder gone, every chat opens."""
    shelf = Shelf(tmp_path, quick=True)
    two_chats_with_a_branch(shelf)
    texts = dump(shelf.database)
    shelf.close()
    shutil.rmtree(shelf.kv)
    again = Shelf(tmp_path, quick=True)
    assert again.segments.sweep().num_missing == 3
    assert dump(again.database) == texts
    assert len(Conversations(again.database).list("ann")) == 2
    assert again.check_read(OLD) == 0
    again.check()
    again.close()

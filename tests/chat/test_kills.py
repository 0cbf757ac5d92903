"""The whole app below the page is killed at every step of a save, and opens again as if nothing had been.

A process holds a conversation and kills itself right before its n-th step: opening, each portion written,
flushing, renaming, removing, and each statement that changes the database. It tells a witness, in a file of
its own, what a person had been shown and which tokens the model had computed by then. The next process must
find all of that text, no reply that is still running, a tree of cache files in order, answers equal to
ORACLE, and no more than `SAVE_EVERY` computed tokens lost. (C19, C27)
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import chat.reply_writer
from cache_store.database import Database
from cache_store.records import Message
from chat.disk import states_at_ends
from chat.job import Job
from chat.kv_cache import KVCache
from chat.model import LoadedModel
from chat.saver import NewRows, Saver
from chat.settings import SamplingSettings
from tests.cache_store.killer import Killer
from tests.fork_server import ForkServer
from tests.house import OWNER, House
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

PLENTY = 10**9
SAVE_EVERY = 32
"""In place of 256, so that a short text is saved in several pieces."""

SHORT = SamplingSettings(temperature=0, max_new_tokens=3)
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Scenario:
    """`act` is killed at `num_kills` steps or more, in a house whose folder `prepare` left behind."""

    act: Callable[[House], None]
    num_kills: int
    kind: str = "llama"
    max_disk_bytes: int = PLENTY


def prepare(house: House) -> None:
    """Two chats with a common beginning; the first has a branch."""
    view = house.say("A dog and you. One?", sampling=SHORT)
    view = house.say("And two?", view.conversation.id, SHORT)
    house.edit(view.messages[2].id, "And three?", SHORT)
    house.say("A dog and you. Another?", sampling=SHORT)


def chats_of(house: House) -> list[str]:
    """Oldest first."""
    return [each.id for each in sorted(house.chats.list(OWNER), key=lambda each: each.created_at)]


def paste(house: House) -> None:
    house.say("A pasted text. " * 5, sampling=SHORT)


def go_on_and_close(house: House) -> None:
    house.say("And then, the dog?", chats_of(house)[0], SHORT)
    house.close()


def edit_and_regenerate(house: House) -> None:
    first = chats_of(house)[0]
    view = house.edit(house.chats.view(OWNER, first).messages[0].id, "A dog and me. Who?", SHORT)
    house.regenerate(view.messages[-1].id, SHORT)


def delete(house: House) -> None:
    house.chats.delete(OWNER, chats_of(house)[0])


SCENARIOS = {
    "a paste": Scenario(paste, 60, max_disk_bytes=60_000),
    "a turn": Scenario(go_on_and_close, 40),
    "an edit and another answer": Scenario(edit_and_regenerate, 50),
    "a delete": Scenario(delete, 30),
    "a turn with states": Scenario(go_on_and_close, 40, kind="lfm2"),
}
"""The paste needs room that other chats have: it evicts."""

NUM_RANDOM_KILLS = 30


class QuickHouse(House):
    """A kill, unlike a power cut, leaves what the operating system has in hand: it need not be flushed."""

    def open(self) -> None:
        super().open()
        self.database._db.conn.execute("PRAGMA synchronous = OFF")  # pyright: ignore[reportPrivateUsage]


# In the process that is killed


class SaveKiller(Killer):
    """Of statements, those that write: a kill before another one is the same as one before the next write."""

    portion = 1 << 14

    def step(self, *what: object) -> None:
        if not what or str(what[0]).lstrip().startswith(("INSERT", "UPDATE", "DELETE", "COMMIT")):
            super().step()


class Witness:
    """What was shown and computed, one JSON line each, in the operating system's hands at once."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._watch_publish()
        self._watch_feed()

    def tell(self, **what: Any) -> None:
        os.write(self._file, json.dumps(what).encode() + b"\n")

    def _watch_publish(self) -> None:
        publish = Job.publish

        def watched(job: Job, **changes: Any) -> None:
            if "text" in changes or "state" in changes:
                self.tell(reply=job.reply_id, text=changes.get("text", ""), state=changes.get("state"))
            publish(job, **changes)

        Job.publish = watched  # type: ignore[method-assign]

    def _watch_feed(self) -> None:
        feed = KVCache.feed

        def watched(cache: KVCache, token_ids: Any) -> Any:
            logits = feed(cache, token_ids)
            self.tell(held=cache.token_ids)
            return logits

        KVCache.feed = watched  # type: ignore[method-assign]


def write_before_going_on() -> None:
    """Make the inference thread wait for each save, so that the steps come in one order only."""
    offer = Saver.offer

    def waiting(saver: Saver, rows: NewRows, patience_s: float = 0.0) -> bool:
        taken = offer(saver, rows, patience_s)
        assert saver.wait_for(rows.conversation_id, PATIENCE_S)
        return taken

    Saver.offer = waiting  # type: ignore[method-assign]


def live_and_be_killed(
    loaded: LoadedModel, *, folder: str, scenario: str, kill_at: int, in_order: bool
) -> int:
    """How many steps there were, if the kill did not come."""
    chat.reply_writer.SAVE_EVERY, chat.reply_writer.SHOW_EVERY_S = SAVE_EVERY, 0.0
    if in_order:
        write_before_going_on()
    os.fsync = lambda _: None  # type: ignore[assignment]
    house = QuickHouse(Path(folder), loaded, max_disk_bytes=SCENARIOS[scenario].max_disk_bytes)
    killer = SaveKiller(kill_at)
    Witness(Path(folder) / "witness")
    killer.watch(house.database)
    SCENARIOS[scenario].act(house)
    return killer.num_steps


# What the next process finds


@dataclass(frozen=True)
class Seen:
    """`shown`: the longest text that a person saw of each reply; `ended`: the replies seen whole."""

    shown: dict[str, str]
    ended: frozenset[str]
    held: tuple[int, ...]


def seen(folder: Path) -> Seen:
    shown: dict[str, str] = {}
    ended: set[str] = set()
    held: tuple[int, ...] = ()
    for line in (folder / "witness").read_text().splitlines():
        told = json.loads(line)
        if "held" in told:
            held = tuple(told["held"])
            continue
        shown[told["reply"]] = max(told["text"], shown.get(told["reply"], ""), key=len)
        if told["state"] in ("done", "stopped"):
            ended.add(told["reply"])
    return Seen(shown, frozenset(ended), held)


def check_text(house: House, told: Seen) -> None:
    """Every word that was shown is stored; nothing is left running; what was seen whole is whole."""
    assert not house.database.rows("SELECT id FROM messages WHERE status = 'running'")
    assert not house.database.rows("SELECT number FROM reply_pieces")
    for reply_id, text in told.shown.items():
        reply = house.store.message(OWNER, reply_id)
        if reply_id in told.ended:
            assert (reply.text, reply.finish_reason) == (text, "length")
        else:
            assert reply.text.startswith(text)
            assert reply.status == "stopped"
        assert reply.parent_id is not None
        assert house.store.message(OWNER, reply.parent_id).text


def check_rows(house: House, told: Seen) -> None:
    """No more than `SAVE_EVERY` computed tokens are gone."""
    assert house.segments is not None
    fingerprint = house.segments.fingerprint_id(house.disk().fingerprint)
    chain = house.segments.find(OWNER, fingerprint, told.held)
    if not KVCache(house.loaded.model, house.settings).has_rows():
        chain = states_at_ends(chain)
    assert len(told.held) - chain.num_tokens <= SAVE_EVERY


def check_no_row_without_file(folder: Path) -> None:
    with closing(Database(folder / "keepwarm.sqlite3")) as database:
        rows = database.rows("SELECT file FROM segments WHERE state = 'stored'")
        assert {row["file"] for row in rows} <= {path.name for path in (folder / "kv").iterdir()}


def check_files(house: House) -> None:
    """Each file has its row and each row its file, and no file is damaged."""
    assert house.segments is not None
    stored = {node.segment.file for node in house.segments.list()} - {None}
    assert stored == {path.name for path in (house.folder / "kv").iterdir()}
    assert [check.damage for check in house.segments.verify() if check.damage] == []
    assert house.segments.size().kv_bytes <= (house.max_disk_bytes or 0)
    assert house.database.rows("PRAGMA foreign_key_check") == []
    assert house.database.rows("PRAGMA integrity_check") == [{"integrity_check": "ok"}]


def check_going_on(house: House) -> None:
    check_files(house)
    for name in chats_of(house):
        check_answers(house, name)
    house.restart()
    assert house.num_recovered == 0
    check_files(house)


def check_answers(house: House, name: str) -> None:
    """What the killed process wrote is what a fresh run writes, and so is what comes after it."""
    last = house.chats.view(OWNER, name).messages[-1]
    if was_written(last):
        house.check_oracle(name)
    view = house.say("And now?", name, SHORT)
    assert view.messages[-1].error is None
    house.check(name)


def was_written(message: Message) -> bool:
    return message.role == "assistant" and bool(message.token_ids)


# The kills


@pytest.fixture(scope="module")
def servers() -> Generator[dict[str, ForkServer]]:
    kinds = {scenario.kind for scenario in SCENARIOS.values()}
    servers = {kind: ForkServer(kind) for kind in kinds}
    yield servers
    for server in servers.values():
        server.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """One thread, as in the servers: for so little work several only wait for each other. No flushing."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(params=SCENARIOS)
def prepared(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, LoadedModel]:
    """The name of a scenario, the folder as it is before, and the model."""
    scenario = SCENARIOS[request.param]
    loaded = tiny_model(scenario.kind)
    before = tmp_path / "before"
    before.mkdir()
    with QuickHouse(before, loaded, max_disk_bytes=scenario.max_disk_bytes) as house:
        prepare(house)
    return request.param, before, loaded


def test_a_kill_before_any_step_loses_no_text_and_little_work(
    prepared: tuple[str, Path, LoadedModel], servers: dict[str, ForkServer], tmp_path: Path
) -> None:
    name, before, loaded = prepared
    scenario, folder = SCENARIOS[name], tmp_path / "now"
    kill_at, killed = 0, True
    while killed:
        kill_at += 1
        shutil.copytree(before, folder)
        killed = live(servers, folder, name, kill_at, in_order=True)
        told = seen(folder)
        check_no_row_without_file(folder)
        with QuickHouse(folder, loaded, max_disk_bytes=scenario.max_disk_bytes) as house:
            check_text(house, told)
            if scenario.act is not delete:
                check_rows(house, told)
            check_going_on(house)
        shutil.rmtree(folder)
    assert kill_at > scenario.num_kills


def test_a_kill_while_the_threads_run_freely_loses_no_text(
    servers: dict[str, ForkServer], tmp_path: Path
) -> None:
    """The saver may be anywhere behind the inference thread, so that no step is the same twice."""
    loaded, before, folder = tiny_model("llama"), tmp_path / "before", tmp_path / "now"
    before.mkdir()
    with QuickHouse(before, loaded, max_disk_bytes=PLENTY) as house:
        prepare(house)
    for kill_at in random.Random(0).choices(range(5, 60), k=NUM_RANDOM_KILLS):
        shutil.copytree(before, folder)
        live(servers, folder, "an edit and another answer", kill_at, in_order=False)
        with QuickHouse(folder, loaded, max_disk_bytes=PLENTY) as house:
            check_text(house, seen(folder))
            check_going_on(house)
        shutil.rmtree(folder)


def live(servers: dict[str, ForkServer], folder: Path, name: str, kill_at: int, *, in_order: bool) -> bool:
    """Was it killed?"""
    server = servers[SCENARIOS[name].kind]
    outcome = server.run(
        live_and_be_killed, folder=str(folder), scenario=name, kill_at=kill_at, in_order=in_order
    )
    assert outcome.killed_by in (None, signal.SIGKILL)
    return outcome.killed_by is not None


def test_that_is_at_least_two_hundred_kills() -> None:
    assert NUM_RANDOM_KILLS + sum(scenario.num_kills for scenario in SCENARIOS.values()) >= 200

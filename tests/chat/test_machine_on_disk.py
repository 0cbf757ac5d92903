"""Whatever people do and whatever happens to their caches, in memory and on disk.

The people of `test_state_machine`, with caches saved: restarts bring them back, live ones are evicted, saved
ones are evicted, damaged and lost, the disk fills up and gets room again. After every reply, all that was
kept anywhere was used, and ORACLE and INVARIANT hold. After every step, files and rows agree, exactly the
harmed files are damaged, the limits hold, and nothing is kept for a chat that is gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from cache_store.records import Message
from cache_store.rows import unpack_ids
from cache_store.segment_needs import superfluous
from chat.job import Job
from chat.kv_cache import KVCache
from chat.model import LoadedModel
from chat.stats import TurnStats
from tests.chat.disks import PLENTY, Disk, HouseOnDisk
from tests.chat.passes import PATIENCE_S
from tests.chat.test_state_machine import (
    BUDGET_TOKENS,
    OWNERS,
    TOKENIZER,
    Asked,
    People,
    num_common,
)
from tests.house import House
from tests.tiny_models import tiny_model

MAX_SAVED_TOKENS = 400
"""What the cache files may take, in tokens: a few chats do not fit."""

PICK = st.integers(0, 10**6)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _flip(offset: int) -> Callable[[Path], None]:
    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[offset % len(data)] ^= 1
        file.write_bytes(data)

    return flip


HARMS = (_cut, Path.unlink, _flip(-1), _flip(20), _flip(90))

PART = st.sampled_from([0, 1, 2, 3])
"""Quarters."""


@lru_cache
def model(kind: str) -> LoadedModel:
    return tiny_model(kind)


class PeopleOnDisk(People):
    """See the module."""

    kind = "llama"

    def new_house(self, folder: Path) -> House:
        loaded, self.disk = model(self.kind), Disk()
        self.harmed: set[str] = set()
        self.num_harmed = 0
        self.has_rows = True
        house = HouseOnDisk(
            folder,
            loaded,
            self.disk,
            max_live_bytes=BUDGET_TOKENS * loaded.kv_bytes_per_token,
            max_disk_bytes=MAX_SAVED_TOKENS * loaded.kv_bytes_per_token,
        )
        self.has_rows = KVCache(loaded.model, house.settings).has_rows()
        return house

    # what happens to caches

    @precondition(lambda self: self.trees)
    @rule(part=PART)
    def evict_live_caches(self, part: int) -> None:
        self.house.live.make_room((4 - part) * self.house.max_live_bytes // 4)

    @precondition(lambda self: self.trees)
    @rule(part=PART)
    def evict_saved_caches(self, part: int) -> None:
        assert self.house.segments is not None
        self.house.segments.prune(part * (self.house.max_disk_bytes or 0) // 4)

    @precondition(lambda self: self.trees)
    @rule(pick=PICK, harm=st.sampled_from(HARMS))
    def harm_a_file(self, pick: int, harm: Callable[[Path], None]) -> None:
        files = [row["file"] for row in self.rows() if row["file"] and row["file"] not in self.harmed]
        if files:
            name = files[pick % len(files)]
            harm(self.house.folder / "kv" / name)
            self.harmed.add(name)
            self.num_harmed += 1

    @precondition(lambda self: self.trees)
    @rule(free=st.sampled_from([0, 10_000, PLENTY, PLENTY]))
    def fill_or_empty_the_disk(self, free: int) -> None:
        self.disk.free = free

    # what must hold after a reply

    def learn(self, job: Job, name: str, asked: Asked) -> Message:
        reply = super().learn(job, name, asked)
        self.settle()
        return reply

    def settle(self) -> None:
        """Wait until nothing is on its way to the disk."""
        assert self.house.saver is not None
        for name in list(self.trees):
            assert self.house.saver.wait_for(name, PATIENCE_S)

    def check_known(
        self, stats: TurnStats, usable_ids: tuple[int, ...], own: int, best: int, *, may_be_copied: bool
    ) -> None:
        """All that was kept somewhere of the prompt's beginning was used."""
        used = stats.num_live_tokens + stats.num_disk_tokens
        (owner,) = {owner for owner in OWNERS if f"{owner}" in TOKENIZER.decode(usable_ids)}
        saved = self.saved_beginning(owner, usable_ids)
        assert used <= max(best, saved)
        assert not stats.num_damaged_files or self.num_harmed
        if self.has_rows and not stats.num_damaged_files:
            assert used == max(best, saved) or (used == max(own, saved) and not may_be_copied)

    def saved_beginning(self, owner: str, usable_ids: tuple[int, ...]) -> int:
        """How many of these tokens whole files held when the step began."""
        return max((num_common(path, usable_ids) for path in self.saved_before[owner]), default=0)

    # what must hold after every step

    @invariant()
    def files_and_rows_agree(self) -> None:
        if not hasattr(self, "house"):
            return
        assert self.house.segments is not None
        self.harmed &= self.stored()
        kv = self.house.folder / "kv"
        files = {path.name for path in kv.iterdir() if path.is_file()}
        assert files <= self.stored() <= files | self.harmed
        damaged = {check.segment.file for check in self.house.segments.verify() if check.damage}
        assert damaged == self.harmed
        assert sum(path.stat().st_size for path in kv.rglob("*.safetensors")) <= (
            self.house.max_disk_bytes or 0
        )
        assert superfluous(self.house.database) == []
        assert self.house.database.rows("PRAGMA foreign_key_check") == []

    def look(self) -> None:
        """What whole files hold, too; no row holds another owner's words."""
        super().look()
        self.saved_before: dict[str, list[tuple[int, ...]]] = {owner: [] for owner in OWNERS}
        paths: dict[str, tuple[int, ...]] = {}
        whole: set[str | None] = {None}
        for row in self.rows():
            above = paths[row["parent_id"]][: row["start"]] if row["parent_id"] else ()
            path = paths[row["id"]] = above + unpack_ids(row["token_ids"])
            if row["file"] and row["file"] not in self.harmed and row["parent_id"] in whole:
                whole.add(row["id"])
                self.saved_before[row["owner"]].append(path)
            told = TOKENIZER.decode(path)
            assert not [owner for owner in OWNERS if owner != row["owner"] and owner in told]

    def rows(self) -> list[dict[str, Any]]:
        """Parents first."""
        return self.house.database.rows("SELECT * FROM segments ORDER BY start, number")

    def stored(self) -> set[str]:
        return {row["file"] for row in self.rows() if row["file"]} if hasattr(self, "house") else set()


class PeopleWithWindows(PeopleOnDisk):
    kind = "gemma3_text"


class PeopleWithConvolutions(PeopleOnDisk):
    kind = "lfm2"


RUNS = settings(
    max_examples=int(os.environ.get("KEEPWARM_MACHINE_RUNS", "5")), stateful_step_count=12, deadline=None
)

TestPeopleOnDisk = PeopleOnDisk.TestCase
TestPeopleOnDisk.settings = RUNS
TestPeopleWithWindows = PeopleWithWindows.TestCase
TestPeopleWithWindows.settings = RUNS
TestPeopleWithConvolutions = PeopleWithConvolutions.TestCase
TestPeopleWithConvolutions.settings = RUNS

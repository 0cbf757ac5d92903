"""Every verb on every kind of model, before and beyond the window, in one process and over restarts.

After each turn: ORACLE, INVARIANT, and a prefill of exactly what the rule says. Full attention goes back to
any token that a live cache or the disk has in common with the prompt, one token short of it. Layers with
states go back to the newest boundary at or below that: where decoding began, or where a reply ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import pytest

from chat.boundary_states import NUM_KEPT
from chat.chats import ChatView
from chat.divergence import num_common
from chat.job import Job
from chat.model import LoadedModel
from chat.settings import CacheSettings, SamplingSettings
from chat.stats import TurnStats
from tests.chat.passes import dictated
from tests.chat.replies import encode
from tests.house import OWNER, House, assert_greedy
from tests.tiny_models import WINDOW, tiny_model

DISK = 10**9
FULL = ("llama", "qwen3")
SLIDING = ("mistral", "phi3", "gemma3_text", "gpt_oss", "gemma3n_text", "gemma4_text")
RECURRENT = ("lfm2", "qwen3_next", "falcon_h1", "mamba2")
PURE = ("mistral", "phi3", "mamba2")
"""No layer has rows: a state is enough to go back to its place, whatever the live cache holds."""

FOUR = SamplingSettings(temperature=0, max_new_tokens=4)
Ids = tuple[int, ...]


@lru_cache
def model(kind: str) -> LoadedModel:
    return tiny_model(kind)


class Rule:
    """How much of a prompt is remembered, from what earlier turns left behind."""

    def __init__(self, kind: str, *, on_disk: bool) -> None:
        self.kind = kind
        self.saves = on_disk
        self.on_disk: dict[str, list[Ids]] = {}
        self.in_memory: dict[str, list[Ids]] = {}
        self.was_cut: set[str] = set()

    def num_cached(self, live: Mapping[str, Ids], chat_id: str, asked: Ids) -> int:
        """`live`: what the live caches hold, by conversation."""
        limit = asked[:-1]
        common = {name: num_common(ids, limit) for name, ids in live.items()}
        disk = [ids for each in self.on_disk.values() for ids in each]
        if self.kind in FULL:
            return max([0, *common.values(), *(num_common(ids, limit) for ids in disk)])
        own = live.get(chat_id, ())
        can_crop = common.get(chat_id) == len(own) and chat_id not in self.was_cut
        can_crop = can_crop or (self.kind in SLIDING and len(own) < WINDOW)
        num_rows = len(limit) if self.kind in PURE else max(common.values(), default=0)
        memory = [ids for each in self.in_memory.values() for ids in each if len(ids) <= num_rows]
        boundaries = [len(ids) for ids in (*memory, *disk) if limit[: len(ids)] == ids]
        return max([common.get(chat_id, 0) if can_crop else 0, 0, *boundaries])

    def learn(self, chat_id: str, asked: Ids, held: Ids) -> None:
        """The two boundaries of a turn; they are one where the reply was cut within a character."""
        self.was_cut.discard(chat_id)
        mine = self.in_memory.setdefault(chat_id, [])
        for ids in (asked[:-1], held):
            if ids in mine:
                mine.remove(ids)
            mine.append(ids)
            if self.saves:
                self.on_disk.setdefault(chat_id, []).append(ids)
        del mine[:-NUM_KEPT]

    def deleted(self, chat_id: str) -> None:
        self.in_memory.pop(chat_id, None)
        self.on_disk.pop(chat_id, None)

    def forget(self, chat_id: str, paths: Sequence[Ids]) -> None:
        """Only these paths of this chat are left: of its live cache, too."""
        self.was_cut.add(chat_id)

        def kept(boundaries: Sequence[Ids]) -> list[Ids]:
            ends = [(ids, max(num_common(ids, path) for path in paths)) for ids in boundaries]
            return [ids[:end] for ids, end in ends if self.kind in FULL or end == len(ids)]

        self.in_memory[chat_id] = kept(self.in_memory.get(chat_id, []))
        self.on_disk[chat_id] = kept(self.on_disk.get(chat_id, []))


class Person:
    """Uses verbs, and checks the turn that each of them leads to."""

    def __init__(self, house: House, kind: str) -> None:
        self.house = house
        self.rule = Rule(kind, on_disk=house.segments is not None)
        self.is_dictated = False

    def say(self, text: str, chat_id: str | None = None) -> ChatView:
        return self.checked(self.house.start, text, chat_id, FOUR)

    def say_and_hear(self, text: str, chat_id: str | None, reply: str) -> ChatView:
        """With a reply of whole characters, whatever the model would have said: its end is a boundary."""
        self.is_dictated = True
        with dictated(*encode(reply)):
            view = self.say(text, chat_id)
        self.is_dictated = False
        return view

    def regenerate(self, message_id: str, **options: Any) -> ChatView:
        return self.checked(self.house.chats.regenerate, OWNER, message_id, FOUR, **options)

    def edit(self, message_id: str, text: str) -> ChatView:
        return self.checked(self.house.chats.edit, OWNER, message_id, text, FOUR)

    def go_on(self, message_id: str) -> ChatView:
        return self.checked(self.house.chats.continue_reply, OWNER, message_id, FOUR)

    def restart(self) -> None:
        self.house.restart()
        self.rule.in_memory.clear()

    def checked(self, verb: Any, *args: Any, **options: Any) -> ChatView:
        house = self.house
        if house.saver is not None:  # what is found on disk must not depend on how fast it is written
            assert all(house.saver.wait_for(chat.id, 60) for chat in house.chats.list(OWNER))
        live = {name: each.token_ids for name, each in house.kept().items()}
        job: Job = verb(*args, **options)
        begun = house.store.message(OWNER, job.reply_id)
        view = house.finish(job)
        reply = view.messages[-1]
        assert reply.error is None, reply.error
        begun_ids = begun.token_ids or tuple(house.renderer.encode_text(begun.text))
        asked = house.prompt(view, upto=-1).token_ids + begun_ids
        num_cached = self.rule.num_cached(live, job.conversation_id, asked)
        stats = TurnStats.from_json(cast("Any", reply.stats))
        assert stats.num_prefilled_tokens == len(asked) - num_cached, stats
        assert reply.token_ids[: len(begun_ids)] == begun_ids
        if not self.is_dictated:
            assert_greedy(house.loaded, asked, reply.token_ids[len(begun_ids) :])
        house.check_invariant(job.conversation_id)
        self.rule.learn(job.conversation_id, asked, house.kept()[job.conversation_id].token_ids)
        return view


@pytest.fixture(params=["in memory", "on disk"])
def max_disk_bytes(request: pytest.FixtureRequest) -> int | None:
    return DISK if request.param == "on disk" else None


def house_of(folder: Path, kind: str, max_disk_bytes: int | None) -> House:
    settings = CacheSettings(growth_step=16, prefill_chunk=8)
    return House(folder, model(kind), settings=settings, max_disk_bytes=max_disk_bytes)


@pytest.mark.parametrize("kind", FULL + SLIDING + RECURRENT)
def test_every_verb_reads_what_the_rule_says(tmp_path: Path, kind: str, max_disk_bytes: int | None) -> None:
    """C51, C52: first within the window, then beyond it, with a restart between where there is a disk."""
    with house_of(tmp_path, kind, max_disk_bytes) as house:
        person = Person(house, kind)
        chat_id = use_every_verb(person, "x", None)
        if max_disk_bytes is not None:
            person.restart()
        use_every_verb(person, "y" * 40, chat_id)


def use_every_verb(person: Person, text: str, chat_id: str | None) -> str:
    house, chats = person.house, person.house.chats
    view = person.say(text, chat_id)
    first, chat_id = len(view.messages) - 2, view.conversation.id
    view = person.say("b", chat_id)
    view = person.regenerate(view.messages[-1].id)
    view = person.edit(view.messages[first + 2].id, f"e{text}")
    view = person.edit(view.messages[first].id, f"f{text}")
    chats.select(OWNER, view.messages[first].id, -1)
    view = person.say("c", chat_id)
    view = person.go_on(view.messages[-1].id)
    view = person.regenerate(view.messages[-1].id, begin_with="So ")
    chats.edit_reply(OWNER, view.messages[first + 1].id, f"g{text}", keep_rest=True)
    view = person.say("d", chat_id)
    chats.edit_reply(OWNER, view.messages[-1].id, f"h{text}", keep_rest=False)
    view = person.say("e", chat_id)
    undone = chats.undo(OWNER, chat_id)
    view = person.say(undone.text, chat_id)
    fork = chats.fork(OWNER, view.messages[-1].id)
    person.say("i", fork.id)
    house.chats.delete(OWNER, fork.id)
    person.rule.deleted(fork.id)
    person.say("j", chat_id)
    return chat_id


@pytest.mark.parametrize("kind", FULL + SLIDING + RECURRENT)
def test_switching_branches_back_and_forth_reads_new_messages_only(tmp_path: Path, kind: str) -> None:
    """Five times there and back: a file read each, never a token."""
    with house_of(tmp_path, kind, DISK) as house:
        person = Person(house, kind)
        view = person.say_and_hear("A first message of some length.", None, "abcd")
        chat_id = view.conversation.id
        for text in ("one way", "another way"):
            if len(view.messages) > 2:
                house.chats.undo(OWNER, chat_id)
            view = person.say_and_hear(text, chat_id, "efgh")
        for number in range(5):
            for _ in range(2):
                view = house.chats.select(OWNER, view.messages[2].id, 1)
                view = person.regenerate(view.messages[-1].id)
                assert view.messages[-1].stats["reasons"] == {"boundary": 1}, number


@pytest.mark.parametrize("kind", FULL + SLIDING + RECURRENT)
def test_a_deleted_branch_leaves_the_rest_as_remembered_as_it_was(
    tmp_path: Path, kind: str, max_disk_bytes: int | None
) -> None:
    with house_of(tmp_path, kind, max_disk_bytes) as house:
        person = Person(house, kind)
        view = person.say_and_hear("A first message of some length.", None, "abcd")
        chat_id, kept = view.conversation.id, view.messages
        person.say("to be deleted", chat_id)
        view = person.say("and this, too", chat_id)
        house.chats.delete_branch(OWNER, view.messages[2].id)
        left = house.renderer.render(kept[:1]).token_ids + kept[1].token_ids
        person.rule.forget(chat_id, [left])
        view = person.say("Next", chat_id)
        assert view.messages[:2] == kept
        num_new = len(house.prompt(view, upto=-1)) - len(left)
        assert cast("int", view.messages[-1].stats["num_prefilled_tokens"]) <= num_new + 1


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next", "mamba2"])
def test_a_place_further_back_than_memory_keeps_is_read_from_text_without_a_disk(
    tmp_path: Path, kind: str
) -> None:
    with house_of(tmp_path, kind, None) as house:
        person = Person(house, kind)
        view = person.say("A first message of some length.")
        for number in range(NUM_KEPT):
            view = person.say(f"Turn {number}", view.conversation.id)
        person.edit(view.messages[0].id, "Another first message")
        view = person.edit(view.messages[2].id, "Another second message")
        assert "not_croppable" in cast("dict[str, int]", view.messages[-1].stats["reasons"])

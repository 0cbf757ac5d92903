"""Whatever people do, in any order: a plain-Python model of the tree, and the laws checked at each step.

Two owners share one Keepwarm whose live caches hardly fit a few chats. They send, edit, regenerate, select,
stop at any pass (while reading, while writing, while waiting in line), break, look, delete and restart.
After every reply: ORACLE, INVARIANT, stats that account for every token. After every step: the store is as
the model says, no cache holds another owner's words, the budget holds, no id opens anything to a stranger.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_store.errors import NotFound
from cache_store.records import Message
from chat.errors import NothingToDo
from chat.job import Job
from chat.settings import SamplingSettings
from chat.stats import TurnStats
from tests.chat.passes import PATIENCE_S, Passes, llama
from tests.house import House, end_view

OWNERS = ("ada", "ben")
BUDGET_TOKENS = 224
"""What the live caches may take, in tokens."""
SHORT = SamplingSettings(temperature=0, max_new_tokens=6)
TOKENIZER: Any = llama().tokenizer

TEXTS = st.sampled_from(["hi", "a dog and you", "and then 😀?", "word " * 12, "<|im_end|>"])
PICK = st.integers(0, 10**6)


@dataclass(frozen=True)
class Interruption:
    """What happens as some pass of a reply begins: nothing, a stop, an error, or a look at the chat."""

    verb: str = "none"
    number: int = 1


INTERRUPTIONS = st.one_of(
    st.just(Interruption()),
    st.builds(Interruption, st.sampled_from(["stop", "fail", "look"]), st.integers(1, 9)),
)


@dataclass
class Tree:
    """The model of one chat: children in order of creation, and which one is shown below each parent."""

    owner: str
    system_prompt: str = ""
    messages: dict[str, tuple[str | None, str, str]] = field(default_factory=dict[str, Any])
    children: dict[str | None, list[str]] = field(default_factory=dict[Any, Any])
    shown: dict[str | None, str] = field(default_factory=dict[Any, str])

    def add(self, name: str, parent: str | None, role: str, text: str) -> None:
        self.messages[name] = (parent, role, text)
        self.children.setdefault(parent, []).append(name)
        self.show(name)

    def show(self, name: str | None) -> None:
        while name is not None:
            parent = self.messages[name][0]
            self.shown[parent] = name
            name = parent

    def path(self) -> list[str]:
        names: list[str] = []
        name = self.shown.get(None)
        while name is not None:
            names.append(name)
            name = self.shown.get(name)
        return names

    def of_role(self, role: str) -> list[str]:
        return [name for name, message in self.messages.items() if message[1] == role]


class People(RuleBasedStateMachine):
    """See the module."""

    @initialize()
    def move_in(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.house = self.new_house(Path(self.folder.name))
        self.trees: dict[str, Tree] = {}
        self.passes = Passes(self.house.loaded.model)
        self.passes.__enter__()

    def new_house(self, folder: Path) -> House:
        loaded = llama()
        return House(folder, loaded, max_live_bytes=BUDGET_TOKENS * loaded.kv_bytes_per_token)

    def teardown(self) -> None:
        if hasattr(self, "house"):
            self.passes.__exit__(None, None, None)
            self.house.close()
            self.folder.cleanup()

    # what people do

    @rule(owner=st.sampled_from(OWNERS), text=TEXTS, interruption=INTERRUPTIONS)
    def begin(self, owner: str, text: str, interruption: Interruption) -> None:
        words = f"{owner}: {text}"
        self.reply(owner, None, interruption, lambda: self.send(owner, words, None))

    @precondition(lambda self: self.trees)
    @rule(pick=PICK, text=TEXTS, interruption=INTERRUPTIONS)
    def go_on(self, pick: int, text: str, interruption: Interruption) -> None:
        name, tree = self.chat(pick)
        words = f"{tree.owner}: {text}"
        self.reply(tree.owner, name, interruption, lambda: self.send(tree.owner, words, name))

    @precondition(lambda self: self.trees)
    @rule(pick=PICK, text=TEXTS, interruption=INTERRUPTIONS)
    def edit(self, pick: int, text: str, interruption: Interruption) -> None:
        name, tree = self.chat(pick)
        question = _pick(tree.of_role("user"), pick // 7)
        words = f"{tree.owner} edits: {text}"
        if tree.messages[question][2] == words:
            with pytest.raises(NothingToDo):
                self.house.chats.edit(tree.owner, question, words, SHORT)
            return
        self.reply(
            tree.owner, name, interruption, lambda: self.house.chats.edit(tree.owner, question, words, SHORT)
        )

    @precondition(lambda self: self.trees)
    @rule(pick=PICK, interruption=INTERRUPTIONS)
    def regenerate(self, pick: int, interruption: Interruption) -> None:
        name, tree = self.chat(pick)
        target = _pick(list(tree.messages), pick // 7)
        self.reply(
            tree.owner, name, interruption, lambda: self.house.chats.regenerate(tree.owner, target, SHORT)
        )

    @precondition(lambda self: self.trees)
    @rule(pick=PICK, step=st.sampled_from([-1, 1, 2]))
    def select(self, pick: int, step: int) -> None:
        _, tree = self.chat(pick)
        message = _pick(tree.path(), pick // 7)
        siblings = tree.children[tree.messages[message][0]]
        self.house.chats.select(tree.owner, message, step)
        tree.show(siblings[(siblings.index(message) + step) % len(siblings)])

    @precondition(lambda self: self.trees)
    @rule(pick=PICK, text=st.sampled_from(["", "Be brief.", "You are a dog."]))
    def set_system_prompt(self, pick: int, text: str) -> None:
        name, tree = self.chat(pick)
        self.house.chats.set_system_prompt(tree.owner, name, text)
        tree.system_prompt = text

    @precondition(lambda self: self.trees)
    @rule(pick=PICK)
    def delete(self, pick: int) -> None:
        name, tree = self.chat(pick)
        self.house.chats.delete(tree.owner, name)
        del self.trees[name]
        assert name not in self.house.kept()

    @rule()
    def restart(self) -> None:
        self.house.restart()
        assert self.house.num_recovered == 0
        assert not self.house.kept()

    @precondition(lambda self: len(self.trees) > 1)
    @rule(pick=PICK, number=st.integers(1, 8), then=st.sampled_from(["wait", "stop", "delete", "stop both"]))
    def write_in_two_chats_at_once(self, pick: int, number: int, then: str) -> None:
        """The second waits in line while the first is held in some pass."""
        first, second = _pick(list(self.trees), pick), _pick(list(self.trees), pick // 7)
        if first == second:
            return
        owners = [self.trees[name].owner for name in (first, second)]
        hold = self.passes.hold()
        running = self.send(owners[0], f"{owners[0]} first", first)
        while not hold.is_reached(0.05):
            if running.view.ended:  # it was too large to begin
                self.passes.forget_plans()
                self.learn(running, first)
                return
        waiting = self.send(owners[1], f"{owners[1]} second", second)
        assert (waiting.view.state, waiting.view.position) == ("queued", 1)
        assert self.house.chats.view(owners[1], second).job is waiting
        assert self.house.chats.view(owners[0], first).job is running
        if then in ("stop", "stop both"):
            self.house.chats.stop(owners[1], second)
            assert end_view(waiting).state == "stopped"
            assert not running.view.ended
        if then == "stop both":
            self.house.chats.stop(owners[0], first)
        if then == "delete":
            self.house.chats.delete(owners[1], second)
            assert end_view(waiting).ended
        hold.release()
        self.learn(running, first)
        if then == "delete":
            del self.trees[second]
        else:
            end_view(waiting)
            self.learn(waiting, second)

    # a reply, and what must hold after it

    def send(self, owner: str, text: str, name: str | None) -> Job:
        return self.house.start(text, name, SHORT, owner)

    def reply(
        self, owner: str, name: str | None, interruption: Interruption, verb: Callable[[], Job]
    ) -> None:
        """Start a reply, interrupt it, wait for its end, and check it."""
        jobs: list[Job] = []
        started = threading.Event()
        kept = self.house.kept()
        if interruption.verb != "none":
            self.passes.plan(lambda: self.interrupt(interruption.verb, jobs, started), interruption.number)
        jobs.append(verb())
        started.set()
        (job,) = jobs
        end_view(job)
        self.passes.forget_plans()
        if name is None:
            self.trees[job.conversation_id] = Tree(owner)
        reply = self.learn(job, job.conversation_id)
        if reply.status != "failed":
            self.check_stats(job, reply, kept)

    def interrupt(self, verb: str, jobs: list[Job], started: threading.Event) -> None:
        """Runs on the inference thread, at the beginning of a pass."""
        assert started.wait(PATIENCE_S)
        (job,) = jobs
        if verb == "stop":
            self.house.chats.stop(job.owner, job.conversation_id)
        elif verb == "fail":
            raise ValueError("broken by a test")
        else:
            view = self.house.chats.view(job.owner, job.conversation_id)
            assert view.job is job
            assert view.messages[-1].status == "running"

    def learn(self, job: Job, name: str) -> Message:
        """Put the turn that `job` wrote into the model, from what the job said, and check it."""
        ended, tree = end_view(job), self.trees[name]
        reply = self.house.store.message(job.owner, job.reply_id)
        assert reply.parent_id is not None
        question = self.house.store.message(job.owner, reply.parent_id)
        if question.id not in tree.messages:
            tree.add(question.id, question.parent_id, "user", question.text)
        tree.add(reply.id, question.id, "assistant", ended.text)
        assert (reply.status, reply.error) == (ended.state, ended.error)
        if reply.stats:  # else it was ended before it began, and the cache is as the last turn left it
            self.house.check_invariant(name, tree.owner)
        if reply.status == "failed":
            assert "broken by a test" in str(reply.error) or "max-live-memory" in str(reply.error)
        else:
            self.house.check_oracle(name, tree.owner)
        return reply

    def check_stats(self, job: Job, reply: Message, kept: dict[str, Any]) -> None:
        """Every prompt token is accounted for, and what some cache of this owner held was not read."""
        stats = TurnStats.from_json(cast("Any", reply.stats))
        view = self.house.chats.view(job.owner, job.conversation_id)
        prompt = self.house.prompt(view, upto=-1)
        if reply.token_ids:
            assert stats.num_prompt_tokens == len(prompt)
        known = [
            (num_common(self.ids_before[name], prompt.token_ids[:-1]), live.cache.nbytes, name)
            for name, live in kept.items()
            if live.owner == job.owner
        ]
        own = max((common for common, _, name in known if name == job.conversation_id), default=0)
        best = max((common for common, _, _ in known), default=0)
        largest = max((nbytes for common, nbytes, _ in known if common == best), default=0)
        needed = (len(prompt) + 64) * self.house.loaded.kv_bytes_per_token
        may_be_copied = best == own or largest + needed <= self.house.max_live_bytes
        self.check_known(stats, prompt.token_ids[:-1], own, best, may_be_copied=may_be_copied)

    def check_known(
        self, stats: TurnStats, usable_ids: tuple[int, ...], own: int, best: int, *, may_be_copied: bool
    ) -> None:
        """`own`, `best`: how many tokens of the prompt the chat's own live cache held, and any live one. A
        copy may not fit beside what it is copied from."""
        assert stats.num_live_tokens == best or (stats.num_live_tokens == own and not may_be_copied)

    # after every step

    @invariant()
    def the_store_is_what_the_model_says(self) -> None:
        if not hasattr(self, "house"):
            return
        for owner in OWNERS:
            listed = {chat.id for chat in self.house.chats.list(owner)}
            assert listed == {name for name, tree in self.trees.items() if tree.owner == owner}
        for name, tree in self.trees.items():
            view = self.house.chats.view(tree.owner, name)
            path = tree.path()
            assert [message.id for message in view.messages] == path
            for message in view.messages:
                assert (message.parent_id, message.role, message.text) == tree.messages[message.id]
                assert message.status != "running"
                siblings = tree.children[message.parent_id]
                assert view.siblings[message.id].ids == tuple(siblings)
                assert siblings[view.siblings[message.id].position] == message.id
            assert view.job is None
            assert view.conversation.system_prompt == tree.system_prompt
            for stranger in set(OWNERS) - {tree.owner}:
                with pytest.raises(NotFound):
                    self.house.chats.view(stranger, name)
                with pytest.raises(NotFound):
                    self.house.chats.regenerate(stranger, path[-1], SHORT)

    @invariant()
    def caches_are_true_and_belong_to_one_owner_and_fit(self) -> None:
        if not hasattr(self, "house"):
            return
        kept = self.house.kept()
        assert self.house.live.nbytes <= self.house.max_live_bytes
        self.ids_before = {name: live.cache.token_ids for name, live in kept.items()}
        for name, live in kept.items():
            live.cache.check()
            assert live.owner == self.trees[name].owner
            held = TOKENIZER.decode(live.cache.token_ids)
            assert not [owner for owner in OWNERS if owner != live.owner and owner in held]

    def chat(self, pick: int) -> tuple[str, Tree]:
        name = _pick(list(self.trees), pick)
        return name, self.trees[name]


def num_common(held: tuple[int, ...], asked: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    pairs = zip(held, asked, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(held), len(asked)))


def _pick(choices: list[str], number: int) -> str:
    return choices[number % len(choices)]


TestPeople = People.TestCase
TestPeople.settings = settings(
    max_examples=int(os.environ.get("KEEPWARM_MACHINE_RUNS", "20")), stateful_step_count=15, deadline=None
)

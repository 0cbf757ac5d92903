"""Whatever people do, in any order: a plain-Python model of the tree, and the laws checked at each step.

Two owners share one Keepwarm whose live caches hardly fit a few chats. They use every verb on any message of
a chat, shown or not; replies end by themselves, are cut, stopped at any pass (while reading, while writing,
while waiting in line), break, or are looked at; people delete and restart. After every reply: ORACLE,
INVARIANT, stats that account for every token. After every step: the store is as the model says, no cache
holds another owner's words, the budget holds, no id opens anything to a stranger.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_store.errors import NotFound
from cache_store.records import Message
from chat.chats import ChatView
from chat.errors import NothingToDo
from chat.job import Job
from chat.settings import SamplingSettings
from chat.stats import TurnStats
from tests.chat.passes import PATIENCE_S, Passes, dictated, llama
from tests.chat.replies import END
from tests.chat.tree_model import Said, Tree
from tests.house import House, assert_greedy, end_view

OWNERS = ("ada", "ben")
BUDGET_TOKENS = 224
"""What the live caches may take, in tokens."""
MOST_CHATS = 5
SHORT = SamplingSettings(temperature=0, max_new_tokens=6)
TOKENIZER: Any = llama().tokenizer

TEXTS = st.sampled_from(["hi", "a dog and you", "and then 😀?", "word " * 12, "<|im_end|>"])
BEGINNINGS = st.sampled_from(["", "", "So ", "<|im_end|> no"])
PICK = st.integers(0, 10**6)


@dataclass(frozen=True)
class Interruption:
    """What happens as some pass of a reply begins: nothing, a stop, an error, a look at the chat, or at
    another version of it until the reply has ended, or that the next token ends the reply."""

    verb: str = "none"
    number: int = 1


INTERRUPTIONS = st.one_of(
    st.just(Interruption()),
    st.builds(Interruption, st.sampled_from(["end", "stop", "fail", "look", "look away"]), st.integers(1, 9)),
    st.builds(Interruption, st.just("end"), st.integers(2, 4)),
)


@dataclass(frozen=True)
class Asked:
    """What a reply is due to: a question that is there (`question`), or a new one. `begin_with` and
    `begun_ids`: what the reply begins with, of which the ids may be known."""

    question: str | None = None
    parent: str | None = None
    text: str = ""
    begin_with: str = ""
    begun_ids: tuple[int, ...] = ()


class People(RuleBasedStateMachine):
    """See the module."""

    @initialize(texts=st.lists(TEXTS, min_size=1, max_size=2))
    def move_in(self, texts: Sequence[str]) -> None:
        """Each person has a chat already."""
        self.folder = tempfile.TemporaryDirectory()
        self.house = self.new_house(Path(self.folder.name))
        self.trees: dict[str, Tree] = {}
        self.passes = Passes(self.house.loaded.model)
        self.passes.__enter__()
        for owner in OWNERS:
            name: str | None = None
            for text in texts:
                self.look()
                asked = Asked(parent=self.trees[name].leaf if name else None, text=f"{owner}: {text}")
                self.reply(*(owner, name, asked, Interruption()), partial(self.send, owner, asked.text, name))
                name = list(self.trees)[-1]

    def new_house(self, folder: Path) -> House:
        loaded = llama()
        return House(folder, loaded, max_live_bytes=BUDGET_TOKENS * loaded.kv_bytes_per_token)

    def teardown(self) -> None:
        if hasattr(self, "house"):
            self.passes.__exit__(None, None, None)
            self.house.close()
            self.folder.cleanup()

    # what people do: a reply is due

    @precondition(lambda self: len(self.trees) < MOST_CHATS)
    @rule(owner=st.sampled_from(OWNERS), text=TEXTS, begin_with=BEGINNINGS, interruption=INTERRUPTIONS)
    def begin(self, owner: str, text: str, begin_with: str, interruption: Interruption) -> None:
        asked = Asked(text=f"{owner}: {text}", begin_with=begin_with)
        self.reply(owner, None, asked, interruption, lambda: self.send(owner, asked.text, None, begin_with))

    @precondition(lambda self: self.trees)
    @rule(pick=PICK, text=TEXTS, begin_with=BEGINNINGS, interruption=INTERRUPTIONS)
    def go_on(self, pick: int, text: str, begin_with: str, interruption: Interruption) -> None:
        name, tree = self.chat(pick)
        asked = Asked(parent=tree.leaf, text=f"{tree.owner}: {text}", begin_with=begin_with)
        if tree.is_unanswered:
            with pytest.raises(NothingToDo):
                self.send(tree.owner, asked.text, name)
            return
        self.reply(
            *(tree.owner, name, asked, interruption),
            lambda: self.send(tree.owner, asked.text, name, begin_with),
        )

    @precondition(lambda self: self.has_messages())
    @rule(pick=PICK, text=TEXTS, interruption=INTERRUPTIONS)
    def edit(self, pick: int, text: str, interruption: Interruption) -> None:
        name, tree, target = self.message(pick)
        said, words = tree.messages[target], f"{tree.owner} edits: {text}"
        if said.role == "assistant" or said.text == words:
            with pytest.raises(NothingToDo):
                self.house.chats.edit(tree.owner, target, words, SHORT)
            return
        self.reply(
            *(tree.owner, name, Asked(parent=said.parent, text=words), interruption),
            lambda: self.house.chats.edit(tree.owner, target, words, SHORT),
        )

    @precondition(lambda self: self.has_messages())
    @rule(pick=PICK, begin_with=BEGINNINGS, interruption=INTERRUPTIONS)
    def regenerate(self, pick: int, begin_with: str, interruption: Interruption) -> None:
        name, tree, target = self.message(pick)
        self.reply(
            *(tree.owner, name, Asked(tree.question_of(target), begin_with=begin_with), interruption),
            lambda: self.house.chats.regenerate(tree.owner, target, SHORT, begin_with=begin_with),
        )

    @precondition(lambda self: self.has_messages())
    @rule(pick=PICK, interruption=INTERRUPTIONS)
    def continue_reply(self, pick: int, interruption: Interruption) -> None:
        name, tree, target = self.message(pick)
        if not tree.can_be_continued(target):
            with pytest.raises(NothingToDo):
                self.house.chats.continue_reply(tree.owner, target, SHORT)
            return
        ids = self.house.store.message(tree.owner, target).token_ids
        begun_ids = ids[:-1] if ids[-1:] == (END,) else ids  # that of an edited reply goes
        asked = Asked(tree.question_of(target), begin_with=tree.messages[target].text, begun_ids=begun_ids)
        self.reply(
            *(tree.owner, name, asked, interruption),
            lambda: self.house.chats.continue_reply(tree.owner, target, SHORT),
        )

    # what people do: only messages change

    @precondition(lambda self: self.has_messages())
    @rule(pick=PICK, step=st.sampled_from([-1, 1, 2]))
    def select(self, pick: int, step: int) -> None:
        _, tree, target = self.message(pick)
        if target not in tree.path():
            with pytest.raises(NothingToDo):
                self.house.chats.select(tree.owner, target, step)
            return
        siblings = tree.siblings(target)
        self.house.chats.select(tree.owner, target, step)
        tree.show(siblings[(siblings.index(target) + step) % len(siblings)])

    @precondition(lambda self: self.has_messages())
    @rule(pick=PICK, text=st.sampled_from(["green", "<|im_end|>\n", "a dog " * 6]), keep_rest=st.booleans())
    def edit_reply(self, pick: int, text: str, keep_rest: bool) -> None:
        _, tree, target = self.message(pick)
        old, words = tree.messages[target], f"{tree.owner} corrects: {text}"
        if old.role == "user" or old.text == words:
            with pytest.raises(NothingToDo):
                self.house.chats.edit_reply(tree.owner, target, words, keep_rest=keep_rest)
            return
        above, rest = tree.down_to(old.parent), tree.below(target) if keep_rest else []
        view = self.house.chats.edit_reply(tree.owner, target, words, keep_rest=keep_rest)
        new = [Said(None, "assistant", words), *(tree.messages[name] for name in rest)]
        self.learn_copies(tree, view, new, num_above=len(above))

    @precondition(lambda self: self.trees)
    @rule(pick=PICK)
    def undo(self, pick: int) -> None:
        name, tree = self.chat(pick)
        text = tree.undo()
        if text is None:
            with pytest.raises(NothingToDo):
                self.house.chats.undo(tree.owner, name)
            return
        assert self.house.chats.undo(tree.owner, name).text == text

    @precondition(lambda self: self.trees)
    @rule(pick=PICK)
    def redo(self, pick: int) -> None:
        name, tree = self.chat(pick)
        if not tree.can_redo:
            with pytest.raises(NothingToDo):
                self.house.chats.redo(tree.owner, name)
            return
        self.house.chats.redo(tree.owner, name)
        tree.redo()

    @precondition(lambda self: self.has_messages())
    @rule(pick=PICK)
    def delete_branch(self, pick: int) -> None:
        name, tree, target = self.message(pick)
        self.house.chats.delete_branch(tree.owner, target)
        tree.remove(target)
        live = self.house.kept().get(name)
        if live is not None:
            allowed = [self.ids_of(path) for path in self.house.store.leaves(tree.owner, name)]
            assert any(ids[: len(live.token_ids)] == live.token_ids for ids in [(), *allowed])

    @precondition(lambda self: self.has_messages() and len(self.trees) < MOST_CHATS)
    @rule(pick=PICK)
    def fork(self, pick: int) -> None:
        _, tree, target = self.message(pick)
        made = self.house.chats.fork(tree.owner, target)
        forked = self.trees[made.id] = Tree(tree.owner, tree.system_prompt)
        view = self.house.chats.view(tree.owner, made.id)
        self.learn_copies(forked, view, [tree.messages[name] for name in tree.down_to(target)], num_above=0)

    @precondition(lambda self: self.trees)
    @rule(pick=PICK, text=st.sampled_from(["", "Be brief.", "You are a dog."]))
    def set_system_prompt(self, pick: int, text: str) -> None:
        name, tree = self.chat(pick)
        self.house.chats.set_system_prompt(tree.owner, name, text)
        tree.system_prompt = text

    @precondition(lambda self: len(self.trees) > 1)
    @rule(pick=PICK)
    def delete(self, pick: int) -> None:
        name, tree = self.chat(pick)
        self.house.chats.delete(tree.owner, name)
        del self.trees[name]
        assert name not in self.house.kept()

    @precondition(lambda self: self.house.kept())
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
        trees = [self.trees[name] for name in (first, second)]
        if first == second or any(tree.is_unanswered for tree in trees):
            return
        owners = [tree.owner for tree in trees]
        asked = [
            Asked(parent=tree.leaf, text=f"{tree.owner} {place}")
            for tree, place in zip(trees, ("first", "second"), strict=True)
        ]
        hold = self.passes.hold()
        running = self.send(owners[0], asked[0].text, first)
        while not hold.is_reached(0.05):
            if running.view.ended:  # it was too large to begin
                self.passes.forget_plans()
                self.learn(running, first, asked[0])
                return
        waiting = self.send(owners[1], asked[1].text, second)
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
        self.learn(running, first, asked[0])
        if then == "delete":
            del self.trees[second]
        else:
            end_view(waiting)
            self.learn(waiting, second, asked[1])

    # a reply, and what must hold after it

    def send(self, owner: str, text: str, name: str | None, begin_with: str = "") -> Job:
        leaf_id = self.trees[name].leaf if name is not None else None
        return self.house.chats.send(
            *(owner, text), conversation_id=name, leaf_id=leaf_id, sampling=SHORT, begin_with=begin_with
        )

    def reply(
        self, owner: str, name: str | None, asked: Asked, interruption: Interruption, verb: Callable[[], Job]
    ) -> None:
        """Start a reply, interrupt it, wait for its end, and check it."""
        jobs: list[Job] = []
        started = threading.Event()
        kept = self.house.kept()
        if interruption.verb != "none":
            self.passes.plan(lambda: self.interrupt(interruption.verb, jobs, started), interruption.number)
        with ExitStack() as self.until_ended:
            jobs.append(verb())
            started.set()
            (job,) = jobs
            end_view(job)
        self.passes.forget_plans()
        if name is None:
            self.trees[job.conversation_id] = Tree(owner)
        reply = self.learn(job, job.conversation_id, asked)
        if reply.status != "failed":
            self.check_stats(job, reply, asked, kept)

    def interrupt(self, verb: str, jobs: list[Job], started: threading.Event) -> None:
        """Runs on the inference thread, at the beginning of a pass."""
        assert started.wait(PATIENCE_S)
        (job,) = jobs
        if verb == "stop":
            self.house.chats.stop(job.owner, job.conversation_id)
        elif verb == "fail":
            raise ValueError("broken by a test")
        elif verb == "end":
            self.until_ended.enter_context(dictated(END))
        else:
            view = self.house.chats.view(job.owner, job.conversation_id)
            assert view.job is job
            assert view.messages[-1].status == "running"
            if verb == "look away":
                self.look_away(view)

    def look_away(self, view: ChatView) -> None:
        """At a version of the newest message that has several, until the reply has ended."""
        forks = [row for row, each in enumerate(view.messages) if len(view.siblings[each.id].ids) > 1]
        for row in forks[-1:]:
            owner, chats = view.conversation.owner, self.house.chats
            looked = chats.select(owner, view.messages[row].id, 1)
            assert (looked.job, looked.leaf_id == view.leaf_id) == (view.job, False)
            self.until_ended.callback(chats.select, owner, looked.messages[row].id, -1)

    def learn(self, job: Job, name: str, asked: Asked) -> Message:
        """Put the turn that `job` wrote into the model, and check it."""
        ended, tree = end_view(job), self.trees[name]
        reply = self.house.store.message(job.owner, job.reply_id)
        question = asked.question or reply.parent_id
        assert question is not None
        if asked.question is None:
            tree.add(question, Said(asked.parent, "user", asked.text))
        tree.add(reply.id, Said(question, "assistant", ended.text, is_ended=ended.state == "done"))
        assert (reply.status, reply.error) == (ended.state, ended.error)
        assert ended.text.startswith(asked.begin_with)
        if reply.stats:  # else it was ended before it began, and the cache is as the last turn left it
            assert reply.token_ids[: len(self.begun_ids(asked))] == self.begun_ids(asked)
            self.house.check_invariant(name, tree.owner)
        if reply.status == "failed":
            assert "broken by a test" in str(reply.error) or "max-live-memory" in str(reply.error)
        else:
            self.check_words(job, reply, asked)
        return reply

    def learn_copies(self, tree: Tree, view: ChatView, new: Sequence[Said], *, num_above: int) -> None:
        """Put the last messages of a view into the model, as these, each below the one before."""
        assert [(each.role, each.text) for each in view.messages[num_above:]] == [
            (said.role, said.text) for said in new
        ]
        parent = view.messages[num_above - 1].id if num_above else None
        for message, said in zip(view.messages[num_above:], new, strict=True):
            tree.add(message.id, replace(said, parent=parent))
            parent = message.id

    def begun_ids(self, asked: Asked) -> tuple[int, ...]:
        return asked.begun_ids or tuple(self.house.renderer.encode_text(asked.begin_with))

    def asked_ids(self, job: Job, asked: Asked) -> tuple[int, ...]:
        """What was to be read before the first word."""
        view = self.house.chats.view(job.owner, job.conversation_id)
        return self.house.prompt(view, upto=-1).token_ids + self.begun_ids(asked)

    def ids_of(self, path: Sequence[Message]) -> tuple[int, ...]:
        """All ids of a path down to its last message."""
        system_prompt = self.house.store.get(self.owner_of(path), path[0].conversation_id).system_prompt
        if path[-1].role == "user":
            return self.house.renderer.render(path, system_prompt).token_ids
        return self.house.renderer.render(path[:-1], system_prompt).token_ids + path[-1].token_ids

    def owner_of(self, path: Sequence[Message]) -> str:
        return self.trees[path[0].conversation_id].owner

    def check_words(self, job: Job, reply: Message, asked: Asked) -> None:
        """ORACLE for what was written behind what the reply began with; a dictated end is not the model's."""
        written = reply.token_ids[len(self.begun_ids(asked)) :]
        if reply.status == "done":
            assert written[-1] == END
            written = written[:-1]
        assert END not in written
        assert_greedy(self.house.loaded, self.asked_ids(job, asked), written)

    def check_stats(self, job: Job, reply: Message, asked: Asked, kept: dict[str, Any]) -> None:
        """Every prompt token is accounted for, and what some cache of this owner held was not read."""
        stats = TurnStats.from_json(cast("Any", reply.stats))
        asked_ids = self.asked_ids(job, asked)
        if len(reply.token_ids) > len(self.begun_ids(asked)):
            assert stats.num_prompt_tokens == len(asked_ids)
        known = [
            (num_common(self.ids_before[name], asked_ids[:-1]), live.cache.nbytes, name)
            for name, live in kept.items()
            if live.owner == job.owner
        ]
        own = max((common for common, _, name in known if name == job.conversation_id), default=0)
        best = max((common for common, _, _ in known), default=0)
        largest = max((nbytes for common, nbytes, _ in known if common == best), default=0)
        needed = (len(asked_ids) + 64) * self.house.loaded.kv_bytes_per_token
        may_be_copied = best == own or largest + needed <= self.house.max_live_bytes
        self.check_known(stats, asked_ids[:-1], own, best, may_be_copied=may_be_copied)

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
            assert self.house.chats.can_redo(tree.owner, name) == tree.can_redo
            stored = {each.id: each for path in self.house.store.leaves(tree.owner, name) for each in path}
            assert stored.keys() == tree.messages.keys()
            for message in stored.values():
                said = tree.messages[message.id]
                assert (message.parent_id, message.role, message.text) == (said.parent, said.role, said.text)
                assert message.status != "running"
            for message in view.messages:
                siblings = tree.siblings(message.id)
                assert view.siblings[message.id].ids == tuple(siblings)
                assert siblings[view.siblings[message.id].position] == message.id
            assert view.job is None
            assert view.conversation.system_prompt == tree.system_prompt
            for stranger in set(OWNERS) - {tree.owner}:
                with pytest.raises(NotFound):
                    self.house.chats.view(stranger, name)
                for message in path[-1:]:
                    with pytest.raises(NotFound):
                        self.house.chats.regenerate(stranger, message, SHORT)

    @invariant()
    def caches_are_true_and_belong_to_one_owner_and_fit(self) -> None:
        if not hasattr(self, "house"):
            return
        assert self.house.live.nbytes <= self.house.max_live_bytes
        self.look()
        for name, live in self.house.kept().items():
            live.cache.check()
            assert live.owner == self.trees[name].owner
            held = TOKENIZER.decode(live.cache.token_ids)
            assert not [owner for owner in OWNERS if owner != live.owner and owner in held]

    def look(self) -> None:
        """Remember what is kept as a step begins."""
        self.ids_before = {name: live.token_ids for name, live in self.house.kept().items()}

    # whom a rule is about

    def has_messages(self) -> bool:
        return any(tree.messages for tree in self.trees.values())

    def chat(self, pick: int) -> tuple[str, Tree]:
        name = _pick(list(self.trees), pick)
        return name, self.trees[name]

    def message(self, pick: int) -> tuple[str, Tree, str]:
        """Some chat that has messages, and one of them: every other time the last or the last but one, as
        people do, else any, shown or not."""
        name = _pick([name for name, tree in self.trees.items() if tree.messages], pick)
        tree, number = self.trees[name], pick // 7
        return name, tree, _pick((number % 2 and tree.path()[-2:]) or list(tree.messages), number // 2)


def num_common(held: tuple[int, ...], asked: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    pairs = zip(held, asked, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(held), len(asked)))


def _pick(choices: list[str], number: int) -> str:
    return choices[number % len(choices)]


TestPeople = People.TestCase
TestPeople.settings = settings(
    max_examples=int(os.environ.get("KEEPWARM_MACHINE_RUNS", "16")), stateful_step_count=14, deadline=None
)

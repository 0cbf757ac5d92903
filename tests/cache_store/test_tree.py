"""The tree against a model of it in plain Python, over random histories."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_store.conversations import Conversations
from cache_store.database import Database
from cache_store.records import Turn
from tests.cache_store.talk import begin, edit, say


class Tree:
    """One chat as dictionaries. A parent of None is the chat itself."""

    def __init__(self) -> None:
        self.parents: dict[str, str | None] = {}
        self.children: dict[str | None, list[str]] = {}
        self.shown: dict[str | None, str] = {}
        self.questions: list[str] = []

    def add(self, message_id: str, parent_id: str | None) -> None:
        self.parents[message_id] = parent_id
        self.children.setdefault(parent_id, []).append(message_id)

    def add_turn(self, turn: Turn) -> None:
        self.questions.append(turn.question.id)
        self.add(turn.question.id, turn.question.parent_id)
        self.add(turn.reply.id, turn.question.id)
        self.select(turn.reply.id)

    def path_to(self, message_id: str) -> list[str]:
        path = [message_id]
        while (parent := self.parents[path[0]]) is not None:
            path.insert(0, parent)
        return path

    def select(self, message_id: str) -> None:
        for step in self.path_to(message_id):
            self.shown[self.parents[step]] = step

    def path(self) -> list[str]:
        path: list[str] = []
        here: str | None = None
        while (here := self.shown.get(here)) is not None:
            path.append(here)
        return path


class TreeMachine(RuleBasedStateMachine):
    """Two people, one chat each, in one store; after every step both chats look as the models say."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.open()
        self.chats: dict[str, str] = {}
        self.trees: dict[str, Tree] = {}

    def open(self) -> None:
        self.database = Database(Path(self.folder.name) / "keepwarm.sqlite")
        self.store = Conversations(self.database)

    def teardown(self) -> None:
        self.database.close()
        self.folder.cleanup()

    owners = st.sampled_from(["ann", "bob"])
    picks = st.integers(0, 10**6)

    @rule(owner=owners)
    def send(self, owner: str) -> None:
        if owner not in self.chats:
            turn = begin(self.store, owner)
            self.chats[owner], self.trees[owner] = turn.question.conversation_id, Tree()
        else:
            turn = say(self.store, self.chats[owner], owner=owner)
        self.trees[owner].add_turn(turn)

    @precondition(lambda self: self.chats)
    @rule(data=st.data(), pick=picks)
    def edit(self, data: st.DataObject, pick: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.chats)))
        questions = self.trees[owner].questions
        message = self.store.message(owner, questions[pick % len(questions)])
        self.trees[owner].add_turn(edit(self.store, message, "Other", owner))

    @precondition(lambda self: self.chats)
    @rule(data=st.data(), pick=picks)
    def regenerate(self, data: st.DataObject, pick: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.chats)))
        questions = self.trees[owner].questions
        question_id = questions[pick % len(questions)]
        reply = self.store.add_reply(owner, question_id, sampling={}, seed=None)
        self.trees[owner].add(reply.id, question_id)
        self.trees[owner].select(reply.id)

    @precondition(lambda self: self.chats)
    @rule(data=st.data(), pick=picks)
    def select(self, data: st.DataObject, pick: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.chats)))
        messages = list(self.trees[owner].parents)
        message_id = messages[pick % len(messages)]
        self.store.select(owner, message_id)
        self.trees[owner].select(message_id)

    @rule()
    def reopen(self) -> None:
        self.database.close()
        self.open()

    @invariant()
    def the_shown_path_is_the_one_of_the_model(self) -> None:
        for owner, tree in self.trees.items():
            assert [message.id for message in self.store.path(owner, self.chats[owner])] == tree.path()

    @invariant()
    def siblings_are_those_of_the_model(self) -> None:
        for owner, tree in self.trees.items():
            standing = self.store.siblings(owner, self.chats[owner])
            assert list(standing) == tree.path()
            for message_id, siblings in standing.items():
                assert list(siblings.ids) == tree.children[tree.parents[message_id]]
                assert siblings.ids[siblings.position] == message_id

    @precondition(lambda self: self.chats)
    @rule()
    def look_at_every_path_upward(self) -> None:
        for owner, tree in self.trees.items():
            for message_id in tree.parents:
                path = self.store.path_to(owner, message_id)
                assert [message.id for message in path] == tree.path_to(message_id)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)

"""C46: an id of somebody else opens nothing, and tells nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from cache_store.conversations import Conversations
from cache_store.database import Database
from cache_store.errors import NotFound
from cache_store.records import Turn
from tests.cache_store.talk import begin, dump, finish

Call = Callable[[Conversations, str, str, str, str], object]

CALLS: dict[str, Call] = {
    "get": lambda store, owner, chat, _q, _r: store.get(owner, chat),
    "rename": lambda store, owner, chat, _q, _r: store.rename(owner, chat, "x"),
    "set_system_prompt": lambda store, owner, chat, _q, _r: store.set_system_prompt(owner, chat, "x"),
    "set_cache_kind": lambda store, owner, chat, _q, _r: store.set_cache_kind(owner, chat, "x"),
    "delete": lambda store, owner, chat, _q, _r: store.delete(owner, chat),
    "message": lambda store, owner, _c, question, _r: store.message(owner, question),
    "path": lambda store, owner, chat, _q, _r: store.path(owner, chat),
    "siblings": lambda store, owner, chat, _q, _r: store.siblings(owner, chat),
    "snapshot": lambda store, owner, chat, _q, _r: store.snapshot(owner, chat),
    "path_to": lambda store, owner, _c, _q, reply: store.path_to(owner, reply),
    "select": lambda store, owner, _c, question, _r: store.select(owner, question),
    "add_turn": lambda store, owner, chat, _q, reply: store.add_turn(
        owner, chat, parent_id=reply, leaf_id=reply, text="x", sampling={}, seed=None
    ),
    "branch_turn": lambda store, owner, chat, _q, reply: store.branch_turn(
        owner, chat, parent_id=reply, text="x", sampling={}, seed=None
    ),
    "add_reply": lambda store, owner, _c, question, _r: store.add_reply(
        owner, question, sampling={}, seed=None
    ),
    "add_edited_reply": lambda store, owner, _c, _q, reply: store.add_edited_reply(
        owner, reply, text="x", token_ids=(), keep_rest=True
    ),
    "answers": lambda store, owner, _c, question, _r: store.answers(owner, question),
    "path_below": lambda store, owner, _c, question, _r: store.path_below(owner, question),
    "leaves": lambda store, owner, chat, _q, _r: store.leaves(owner, chat),
    "undo": lambda store, owner, chat, _q, _r: store.undo(owner, chat),
    "redo": lambda store, owner, chat, _q, _r: store.redo(owner, chat),
    "undone": lambda store, owner, chat, _q, _r: store.undone(owner, chat),
    "delete_branch": lambda store, owner, _c, question, _r: store.delete_branch(owner, question),
    "fork": lambda store, owner, _c, _q, reply: store.fork(owner, reply, title="mine now"),
}
"""Every method that takes an id from a page, called as (store, owner, chat, question, reply)."""

WITHOUT_IDS = {"create", "create_with_turn", "list", "may_shrink_caches", "allow_shrinking_caches"}

NOT_FOR_PAGES = {"save_progress", "progress", "finish_reply", "recover"}


def public_methods() -> dict[str, list[str]]:
    """Name → parameters of every public method."""
    return {
        name: list(inspect.signature(method).parameters)
        for name, method in inspect.getmembers(Conversations, inspect.isfunction)
        if not name.startswith("_")
    }


def call(name: str, store: Conversations, owner: str, turn: Turn) -> object:
    return CALLS[name](store, owner, turn.question.conversation_id, turn.question.id, turn.reply.id)


@pytest.fixture
def anns(store: Conversations) -> Turn:
    begin(store, "bob", "Bob's own")
    turn = begin(store, "ann", "Private")
    finish(store, turn.reply.id)
    return turn


def test_every_public_method_is_checked_here() -> None:
    assert set(public_methods()) == set(CALLS) | WITHOUT_IDS | NOT_FOR_PAGES


def test_every_method_for_pages_takes_the_owner_first() -> None:
    with_owner = {name for name, parameters in public_methods().items() if parameters[1:2] == ["owner"]}
    assert with_owner == set(CALLS) | WITHOUT_IDS


@pytest.mark.parametrize("name", CALLS)
def test_the_owner_may(name: str, store: Conversations, anns: Turn) -> None:
    call(name, store, "ann", anns)


@pytest.mark.parametrize("name", CALLS)
def test_a_stranger_finds_nothing_and_changes_nothing(
    name: str, store: Conversations, database: Database, anns: Turn
) -> None:
    before = dump(database)
    for stranger in ("bob", "", "Ann", "ann ", "%", "ann\x00"):
        with pytest.raises(NotFound) as refused:
            call(name, store, stranger, anns)
        assert dump(database) == before
        with pytest.raises(NotFound) as missing:
            CALLS[name](store, stranger, "no such chat", "no such message", "no such message")
        assert str(refused.value) == str(missing.value)


def test_a_stranger_sees_nothing_in_the_list(store: Conversations, anns: Turn) -> None:
    assert [c.owner for c in store.list("bob")] == ["bob"]
    assert store.list("bob", "Private") == []
    assert store.list("%") == []
    assert [c.id for c in store.list("ann", "Private")] == [anns.question.conversation_id]


def test_a_message_of_a_stranger_is_no_parent(store: Conversations, database: Database, anns: Turn) -> None:
    mine = store.create("bob", title="Mine")
    before = dump(database)
    with pytest.raises(NotFound):
        store.branch_turn("bob", mine.id, parent_id=anns.reply.id, text="x", sampling={}, seed=None)
    with pytest.raises(NotFound):
        store.add_turn(
            "bob", mine.id, parent_id=anns.reply.id, leaf_id=None, text="x", sampling={}, seed=None
        )
    assert dump(database) == before

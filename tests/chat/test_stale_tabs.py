"""Old tabs, deleted chats, restarts and half turns: rows only go when somebody deletes a chat."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import pytest

from cache_store.errors import DiskRefused, NotFound, StaleView
from tests.chat.passes import Passes
from tests.chat.replies import (
    chat_of,
)
from tests.house import GREEDY, OWNER, House, end_view, last_stats


def test_a_tab_that_has_not_seen_the_newest_messages_writes_nothing(house: House) -> None:
    """C28: two tabs on one chat; send in A, then in B without a reload."""
    view = chat_of(house, 2)
    house.say("From A", view.conversation.id)
    rows = house.num_rows()
    for leaf_id in (view.leaf_id, None, "nonsense", view.messages[0].id):
        with pytest.raises(StaleView, match="not stored"):
            house.chats.send(
                OWNER, "From B", conversation_id=view.conversation.id, leaf_id=leaf_id, sampling=GREEDY
            )
    assert house.num_rows() == rows


def test_a_tab_that_was_open_over_a_restart_goes_on_where_it_was(house: House) -> None:
    """C28: ten turns, restart, type in the old tab."""
    view = chat_of(house, 10)
    rows = house.num_rows()
    house.restart()
    job = house.chats.send(
        OWNER, "Still there?", conversation_id=view.conversation.id, leaf_id=view.leaf_id, sampling=GREEDY
    )
    after = house.finish(job)
    assert after.messages[:20] == view.messages
    assert house.num_rows() == rows + 2
    house.check(view.conversation.id)
    assert set(cast("dict[str, int]", last_stats(after)["reasons"])) == {"off", "new"}
    regenerated = house.regenerate(view.messages[1].id)
    assert regenerated.messages[0] == view.messages[0]
    assert house.num_rows() == rows + 3


def test_a_chat_deleted_in_one_tab_accepts_nothing_from_another(house: House) -> None:
    """C28."""
    view = chat_of(house, 2)
    chat_id, message_id = view.conversation.id, view.messages[0].id
    house.chats.delete(OWNER, chat_id)
    verbs: list[Callable[[], object]] = [
        lambda: house.chats.view(OWNER, chat_id),
        lambda: house.chats.send(OWNER, "x", conversation_id=chat_id, leaf_id=view.leaf_id, sampling=GREEDY),
        lambda: house.chats.regenerate(OWNER, message_id, GREEDY),
        lambda: house.chats.edit(OWNER, message_id, "y", GREEDY),
        lambda: house.chats.select(OWNER, message_id, 1),
        lambda: house.chats.rename(OWNER, chat_id, "y"),
        lambda: house.chats.set_system_prompt(OWNER, chat_id, "y"),
        lambda: house.chats.stop(OWNER, chat_id),
        lambda: house.chats.delete(OWNER, chat_id),
    ]
    for verb in verbs:
        with pytest.raises(NotFound):
            verb()
    assert house.num_rows() == 0
    assert house.kept() == {}


def test_rows_only_go_when_somebody_deletes_a_chat(house: House) -> None:
    """C28, over every other verb."""
    view = chat_of(house, 3)
    chat_id, rows = view.conversation.id, house.num_rows()

    def grown() -> bool:
        nonlocal rows
        before, rows = rows, house.num_rows()
        return rows >= before

    steps: list[Callable[[], object]] = [
        lambda: house.edit(view.messages[0].id, "other"),
        lambda: house.regenerate(view.messages[3].id),
        lambda: house.chats.select(OWNER, view.messages[0].id, 1),
        lambda: house.chats.rename(OWNER, chat_id, "title"),
        lambda: house.chats.set_system_prompt(OWNER, chat_id, "Be brief."),
        lambda: house.say("more", chat_id),
        lambda: house.chats.stop(OWNER, chat_id),
        house.restart,
        lambda: house.chats.create(OWNER),
    ]
    for step in steps:
        step()
        assert grown()


def test_a_turn_is_stored_whole_or_not_at_all(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """C27: an error between the question and its reply leaves neither."""
    view = chat_of(house, 1)
    rows = house.num_rows()
    insert = house.database.insert
    num_inserts = 0

    def failing(table: str, values: Any) -> None:
        nonlocal num_inserts
        num_inserts += 1
        if num_inserts == 2:
            raise RuntimeError("cut by a test")
        insert(table, values)

    monkeypatch.setattr(house.database, "insert", failing)
    for chat_id in (view.conversation.id, None):
        num_inserts = 0 if chat_id else -1
        with pytest.raises(RuntimeError, match="cut by a test"):
            house.start("half", chat_id)
    monkeypatch.undo()
    assert house.num_rows() == rows
    assert house.chats.view(OWNER, view.conversation.id).messages == view.messages
    house.restart()
    assert house.num_rows() == rows


def test_a_message_is_stored_before_its_job_is_handed_out(house: House) -> None:
    """C27: seen through another connection to the file, while the reply is being written."""

    with Passes(house.loaded.model) as passes:
        hold = passes.hold()
        job = house.start("Hi")
        connection = sqlite3.connect(house.folder / "keepwarm.sqlite3")
        try:
            stored = connection.execute("SELECT role, text, status FROM messages ORDER BY number").fetchall()
        finally:
            connection.close()
        assert stored == [("user", "Hi", "done"), ("assistant", "", "running")]
        hold.release()
        end_view(job)


def test_an_error_after_the_message_was_stored_leaves_no_reply_running(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C27: the disk fills up between the turn and the title that is taken from it."""
    chat = house.chats.create(OWNER)
    with monkeypatch.context() as patched:
        patched.setattr(house.store, "rename", _refused)
        with suppress(DiskRefused):
            end_view(house.start("Hi", chat.id))
    statuses = {message.status for message in house.store.path(OWNER, chat.id)}
    assert "running" not in statuses
    house.say("And?", chat.id)
    house.check(chat.id)


def _refused(*_: object, **__: object) -> None:
    raise DiskRefused("The disk is full; what was stored before is kept; free some space.")

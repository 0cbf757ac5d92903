"""Nobody needs to look for a reply to be written, and looking elsewhere changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from cache_store.errors import StaleView
from chat.chats import ChatView
from chat.errors import NothingToDo
from tests.chat.passes import Passes
from tests.chat.replies import (
    chat_of,
)
from tests.house import GREEDY, OWNER, House, end_view


def everything(house: House, chat_id: str) -> list[Any]:
    """Every stored byte of one conversation, and its cache's bytes."""
    tables = house.database.rows("SELECT * FROM conversations WHERE id = ?", [chat_id])
    tables += house.database.rows(
        "SELECT * FROM messages WHERE conversation_id = ? ORDER BY number", [chat_id]
    )
    live = house.kept()[chat_id].cache
    layers = cast("Any", live)._cache.layers
    return [tables, live.token_ids, [(layer.keys.tolist(), layer.values.tolist()) for layer in layers]]


def test_a_reply_that_nobody_follows_is_completed_and_stored_once(house: House) -> None:
    """C38: twenty closed tabs; the only trace of a reply is what is in the store."""
    ids = [house.start(f"Chat {number}").conversation_id for number in range(20)]
    last = house.start("Last")
    end_view(last)
    for chat_id in ids:
        view = house.chats.view(OWNER, chat_id)
        assert (view.job, len(view.messages), view.messages[-1].finish_reason) == (None, 2, "length")
    house.say("From a new tab", ids[0])
    house.check(ids[0])


def test_a_page_that_comes_back_finds_the_running_job_again(house: House) -> None:
    """C38: reload in the middle of a reply."""
    with Passes(house.loaded.model) as passes:
        hold = passes.hold(4)
        job = house.start("Hi")
        hold.wait_until_reached()
        for _ in range(3):
            view = house.chats.view(OWNER, job.conversation_id)
            assert view.job is job
            assert [message.status for message in view.messages] == ["done", "running"]
        hold.release()
        ended = end_view(job)
    view = house.chats.view(OWNER, job.conversation_id)
    assert (view.job, view.messages[-1].text) == (None, ended.text)


def test_whoever_looks_while_a_message_is_being_sent_never_sees_its_reply_as_stopped(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C38: a second tab that opens the chat between the message's commit and the start of its job."""
    chat_id = house.say("Hi").conversation.id
    seen: list[ChatView] = []
    submit = house.worker.submit

    def looked_at(task: Any) -> None:
        looker.start()
        looker.join(0.2)
        submit(task)

    looker = threading.Thread(target=lambda: seen.append(house.chats.view(OWNER, chat_id)))
    monkeypatch.setattr(house.worker, "submit", looked_at)
    end_view(house.start("More", chat_id))
    looker.join(60)
    (view,) = seen
    assert len(view.messages) == 2 or view.job is not None or view.messages[-1].finish_reason is not None


# switching while a reply is written


def test_other_chats_stay_byte_for_byte_what_they_were_while_one_is_written(house: House) -> None:
    """C40: open B, type in B's place, rename and create chats while A is writing; B's rows and cache."""
    other = chat_of(house, 2).conversation.id
    with Passes(house.loaded.model) as passes:
        hold = passes.hold(3)
        job = house.start("List plants")
        before = everything(house, other)
        hold.wait_until_reached()
        house.chats.view(OWNER, other)
        house.chats.stop(OWNER, other)
        house.chats.create(OWNER)
        house.chats.rename(OWNER, job.conversation_id, "Plants")
        house.chats.delete(OWNER, house.chats.create(OWNER).id)
        assert not job.view.ended
        hold.release()
        end_view(job)
    assert everything(house, other) == before
    view = house.chats.view(OWNER, job.conversation_id)
    assert (view.conversation.title, view.messages[-1].finish_reason) == ("Plants", "length")
    house.check(job.conversation_id)
    house.say("And?", other)
    house.check(other)


def test_a_chat_takes_one_reply_at_a_time(house: House) -> None:
    """C41: while one is written another message is refused, and nothing is stored. (Other verbs stop it
    first: see `test_busy_verbs`.)"""
    view = chat_of(house, 2)
    chat_id = view.conversation.id
    with Passes(house.loaded.model) as passes:
        hold = passes.hold(2)
        job = house.start("Go", chat_id)
        hold.wait_until_reached()
        rows = house.num_rows()
        leaf = house.chats.view(OWNER, chat_id).leaf_id
        verbs: list[Callable[[], object]] = [
            lambda: house.chats.send(OWNER, "x", conversation_id=chat_id, leaf_id=leaf, sampling=GREEDY),
            lambda: house.chats.send(
                OWNER, "x", conversation_id=chat_id, leaf_id=view.leaf_id, sampling=GREEDY
            ),
        ]
        for verb in verbs:
            with pytest.raises((NothingToDo, StaleView)):
                verb()
        assert house.num_rows() == rows
        hold.release()
        end_view(job)
    house.check(chat_id)

"""Stop is honoured within one token or one chunk, and whatever it leaves is a chat that goes on."""

from __future__ import annotations

from typing import cast

import pytest

from tests.chat.passes import Passes
from tests.chat.replies import (
    CHUNK,
    LONG,
    held_reply,
    num_chunks,
    stop_in,
)
from tests.house import House, last_stats


def stop_points(house: House, text: str, chat_id: str | None) -> dict[str, int]:
    """The pass in which each stop falls; replies are eight tokens long."""
    chunks = num_chunks(house, text, chat_id)
    return {"first chunk": 1, "later chunk": chunks - 1, "token 1": chunks + 1, "last token": chunks + 8}


@pytest.mark.parametrize(
    ("point", "then", "with_history"),
    [
        *((point, "send", True) for point in ("first chunk", "later chunk", "token 1", "last token")),
        *((point, "regenerate", False) for point in ("first chunk", "later chunk", "token 1", "last token")),
        *((point, "edit", False) for point in ("later chunk", "token 1")),
    ],
)
def test_after_a_stop_anywhere_everything_goes_on(
    house: House, point: str, then: str, with_history: bool
) -> None:
    """C37."""
    chat_id = house.say("Hi").conversation.id if with_history else None
    with Passes(house.loaded.model) as passes:
        number = stop_points(house, LONG, chat_id)[point]
        hold = passes.hold(number)
        view = stop_in(house, hold, held_reply(house, hold, LONG, chat_id))
        assert passes.num_passes == number, "the model went on after Stop"
    chat_id, reply = view.conversation.id, view.messages[-1]
    assert reply.status == "stopped"
    assert view.job is None
    house.check(chat_id)
    num_known = len(house.kept()[chat_id].cache)
    if then == "send":
        view = house.say("And?", chat_id)
        assert last_stats(view)["num_live_tokens"] == num_known
    elif then == "regenerate":
        view = house.regenerate(reply.id)
    else:
        view = house.edit(view.messages[-2].id, "Something else")
    house.check(chat_id)
    assert view.messages[-1].status == "stopped"  # by its length
    assert len(view.messages[-1].token_ids) > 0


def test_stop_before_anything_was_read_keeps_the_chat_as_it_was(house: House) -> None:
    """C37: at once."""
    view = house.say("Hi")
    before = house.kept()[view.conversation.id].cache.token_ids
    conversation, turn = view.conversation, house.start("More", view.conversation.id)
    turn.request_stop()
    view = house.finish(turn)
    house.check_invariant(conversation.id)
    assert house.kept()[conversation.id].cache.token_ids[: len(before)] == before
    house.say("And?", conversation.id)
    house.check(conversation.id)


def test_tokens_read_before_a_stop_are_not_read_again(house: House, passes: Passes) -> None:
    """Law 1: stopped while reading, then regenerated."""
    hold = passes.hold(3)
    view = stop_in(house, hold, held_reply(house, hold, LONG))
    assert len(house.kept()[view.conversation.id].cache) == 3 * CHUNK
    view = house.regenerate(view.messages[-1].id)
    stats = last_stats(view)
    assert stats["num_live_tokens"] == 3 * CHUNK
    assert not set(cast("dict[str, int]", stats["reasons"])) & {"evicted", "restart", "failed", "template"}

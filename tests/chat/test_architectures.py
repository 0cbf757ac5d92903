"""Models with sliding windows, convolutions and recurrences chat like any other, past the window too.

Such layers cannot go back, so here a turn may read its text again; it must say so, and never answer wrongly.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import pytest

from chat.chats import ChatView
from chat.model import LoadedModel
from chat.settings import CacheSettings, SamplingSettings
from chat.stats import TurnStats
from tests.chat.passes import Passes, dictated
from tests.chat.replies import encode
from tests.house import GREEDY, House, last_stats
from tests.tiny_models import WINDOW, tiny_model

KINDS = ["mistral", "gemma3_text", "lfm2", "qwen3_next", "falcon_h1"]
SHORT = SamplingSettings(temperature=0, max_new_tokens=2)


@lru_cache
def model(kind: str) -> LoadedModel:
    return tiny_model(kind)


@pytest.fixture(params=KINDS)
def house(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[House]:
    settings = CacheSettings(growth_step=16, prefill_chunk=8)
    with House(tmp_path, model(request.param), settings=settings) as house:
        yield house


def checked(house: House, view: ChatView) -> ChatView:
    """ORACLE and INVARIANT, and that every token is accounted for with a reason that can be true here."""
    house.check(view.conversation.id)
    stats = TurnStats.from_json(cast("Any", last_stats(view)))
    assert stats.num_prompt_tokens == len(house.prompt(view, upto=-1))
    assert set(stats.reasons) <= {"new", "edited", "boundary", "not_croppable"}
    return view


@pytest.mark.parametrize("num_tokens", [WINDOW - 1, WINDOW, 40])
def test_a_chat_of_any_length_goes_on_regenerates_and_is_edited(house: House, num_tokens: int) -> None:
    """C51, C52: around the window's edge and beyond it."""
    fixed = len(house.prompt(checked(house, house.say("x", sampling=SHORT)), upto=1)) - 1
    view = checked(house, house.say("x" * max(1, num_tokens - fixed), sampling=SHORT))
    chat_id = view.conversation.id
    view = checked(house, house.regenerate(view.messages[-1].id, SHORT))
    view = checked(house, house.say("More", chat_id))
    view = checked(house, house.edit(view.messages[2].id, "Else", SHORT))
    view = checked(house, house.edit(view.messages[0].id, "y" * 20, SHORT))
    checked(house, house.say("And?", chat_id))


def test_a_plain_follow_up_reads_the_new_message_only(house: House) -> None:
    """Law 1 holds for them too as long as nobody goes back: a reply cut at its length is kept whole."""
    view = house.say("x" * 30)
    for length in range(31, 60):
        if len(view.messages[-1].token_ids) == GREEDY.max_new_tokens:
            break  # else it was cut after a whole character, which is a step back
        view = house.say("x" * length)
    num_known = len(house.kept()[view.conversation.id].cache)
    view = checked(house, house.say("More", view.conversation.id))
    assert last_stats(view)["num_live_tokens"] == num_known
    assert set(cast("dict[str, int]", last_stats(view)["reasons"])) == {"new"}


def test_a_step_back_to_where_no_state_was_kept_is_named(house: House) -> None:
    """Law 4: back to a kept boundary, nothing is read again; into the middle of a message, it is."""
    view = house.say("x" * 40)
    view = checked(house, house.regenerate(view.messages[-1].id))
    assert last_stats(view)["reasons"] == {"boundary": 1}
    view = checked(house, house.edit(view.messages[0].id, "x" * 39))
    assert "not_croppable" in cast("dict[str, int]", last_stats(view)["reasons"])


@pytest.mark.parametrize("number", [1, 8])
def test_stops_and_errors_leave_a_chat_that_works(house: House, number: int) -> None:
    """C31, C37, C52: a half-fed state is thrown away, never used."""
    view = house.say("Hi", sampling=SHORT)
    chat_id = view.conversation.id
    with Passes(house.loaded.model) as passes:
        passes.fail(ValueError("broken by a test"), number)
        assert house.say("x" * 30, chat_id).messages[-1].status == "failed"
        house.check_invariant(chat_id)
        view = house.say("More", chat_id, SHORT)
        house.check(chat_id)
        passes.plan(lambda: house.chats.stop("ada", chat_id), number)
        view = house.say("x" * 30, chat_id)
        house.check(chat_id)
    view = house.regenerate(view.messages[-1].id, SHORT)
    house.check(chat_id)
    house.restart()
    house.say("And?", chat_id, SHORT)
    house.check(chat_id)


def test_a_tight_budget_holds_for_them_too(house: House) -> None:
    """C30: what these layers take is counted as well."""
    house.live.max_bytes = 400_000
    for number in range(8):
        house.say(f"{number} " + "x" * 30, sampling=SHORT)
        assert house.live.nbytes <= 400_000
    assert len(house.kept()) >= 1


def test_a_reply_cut_within_a_character_is_read_again_alone_and_that_is_named(house: House) -> None:
    """Law 4: the half character goes, which is a step back; the rest of the chat is not read again for it."""
    half = encode("ab😀")[:-1]
    with dictated(*half):
        view = house.say("x" * 40, sampling=SamplingSettings(temperature=0, max_new_tokens=len(half)))
    reply = view.messages[-1]
    assert reply.text == "ab"
    num_asked = len(house.prompt(view, upto=1))
    view = checked(house, house.say("More", view.conversation.id))
    assert last_stats(view)["num_live_tokens"] == num_asked - 1
    reasons = cast("dict[str, int]", last_stats(view)["reasons"])
    assert reasons["not_croppable"] == len(reply.token_ids) + 1

"""Verbs over real chats: who may do what to which row, what is asked before, and what is answered."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import gradio as gr
import pytest

from chat.chat_view import ChatView, Cost
from tests.chat.passes import Passes, llama
from tests.house import OWNER, House, end_view
from tests.ui.own_loop import run
from ui.drawing import Drawing
from ui.layout import lay_out
from ui.sampling_form import form_values
from ui.screen import Parts
from ui.verbs import WORTH_ASKING_S, WORTH_ASKING_TOKENS, Verbs, is_worth_asking, price_line

FEW = form_values({"temperature": 0, "max_new_tokens": 8})
WITH_A_SEARCH = ("fork", "delete_branch")
WITH_SAMPLING = ("regenerate", "edit", "go_on")


class Tab:
    """A tab of one person, without a browser."""

    def __init__(self, house: House, owner: str = OWNER) -> None:
        self.parts = run(_parts())
        self.request = gr.Request(username=owner, session_hash="tab")
        self.verbs = Verbs(house.chats, self.parts, Drawing(house.chats, self.parts, ""))

    def act(self, verb: str, view: ChatView, row: object, **told: object) -> dict[Any, Any]:
        """A verb on a row of `view`, as the page's own script sends it."""
        rows = [message.id for message in view.messages]
        address = json.dumps({"conversation": view.conversation.id, "rows": rows, "limit": 40})
        extra = FEW if verb in WITH_SAMPLING else ("",) if verb in WITH_A_SEARCH else ()
        data = gr.EventData(None, {"row": row, "number": 7, **told})
        return cast("dict[Any, Any]", getattr(self.verbs, verb)(self.request, data, address, *extra))

    def answer(self, picture: dict[Any, Any]) -> dict[str, object]:
        return json.loads(picture[self.parts.verbs])


async def _parts() -> Parts:
    with gr.Blocks(analytics_enabled=False):
        return lay_out("")


@pytest.fixture
def house(tmp_path: Path) -> Generator[House]:
    with House(tmp_path, llama()) as house:
        yield house


@pytest.fixture
def tab(house: House) -> Tab:
    return Tab(house)


def an_old_chat(house: House) -> ChatView:
    """Two long turns that no cache has ever held."""
    chat, leaf_id = house.store.create(OWNER, title="Old"), None
    for _ in range(2):
        turn = house.store.add_turn(
            *(OWNER, chat.id),
            parent_id=leaf_id,
            leaf_id=leaf_id,
            text="long ago " * 60,
            sampling={},
            seed=None,
        )
        leaf_id = turn.reply.id
        house.store.finish_reply(
            leaf_id,
            token_ids=(),
            text="Yes.",
            status="done",
            finish_reason="eos",
            error=None,
            stats={},
        )
    return house.chats.view(OWNER, chat.id)


# What is asked before


def test_the_price_is_a_sentence_with_a_guess() -> None:
    assert price_line(Cost(2310, 8.4), "regenerate") == "This reads 2,310 tokens again, about 8 s."
    assert price_line(Cost(2310, 0.2), "continue") == "This reads 2,310 tokens again, about 1 s."
    assert price_line(Cost(90000, 300.0), "edit_reply") == "This reads 90,000 tokens again, about 5 min."
    assert price_line(Cost(600, None), "regenerate") == "This reads 600 tokens again."
    assert price_line(Cost(600, 2.0), "edit") == "This reads 600 tokens, about 2 s."
    too_long = "After this the chat is too long for another reply, by 1,024 tokens."
    assert price_line(Cost(9_000, 2.0, num_too_many=1024), "edit_reply") == too_long
    assert price_line(Cost(9, 2.0, num_too_many=1), "edit_reply").endswith("by 1 token.")


def test_few_tokens_and_short_times_are_not_worth_a_question() -> None:
    assert is_worth_asking(Cost(WORTH_ASKING_TOKENS, None))
    assert is_worth_asking(Cost(WORTH_ASKING_TOKENS, WORTH_ASKING_S))
    assert is_worth_asking(Cost(1, 0.0, num_too_many=1))
    assert not is_worth_asking(Cost(WORTH_ASKING_TOKENS - 1, 100.0))
    assert not is_worth_asking(Cost(WORTH_ASKING_TOKENS, WORTH_ASKING_S / 2))


@pytest.mark.parametrize("verb", ["regenerate", "edit_reply", "edit"])
def test_what_reads_much_waits_until_somebody_is_sure(house: House, tab: Tab, verb: str) -> None:
    old = an_old_chat(house)
    row = 2 if verb == "edit" else 3
    picture = tab.act(verb, old, row, text="Something else", keepRest=True)
    assert set(picture) == {tab.parts.verbs}
    assert str(tab.answer(picture)["ask"]).startswith("This reads")
    assert tab.answer(picture)["number"] == 7
    assert house.chats.view(OWNER, old.conversation.id) == old
    picture = tab.act(verb, old, row, text="Something else", keepRest=True, sure=True)
    assert tab.answer(picture) == {"number": 7, "done": True}
    now = house.chats.view(OWNER, old.conversation.id)
    assert now.leaf_id != old.leaf_id
    if now.job is not None:
        house.finish(now.job)


def test_what_reads_little_is_done_at_once(house: House, tab: Tab) -> None:
    said = house.say("Hi")
    for verb in ("regenerate", "go_on"):
        assert tab.answer(tab.act(verb, said, 1)) == {"number": 7, "done": True}
        job = house.chats.view(OWNER, said.conversation.id).job
        assert job is not None
        end_view(job)


def test_what_the_model_cannot_read_is_refused_and_not_asked(house: House, tab: Tab) -> None:
    said = house.say("Hi")
    with pytest.warns(UserWarning, match=r"2,048"):
        tab.act("edit", said, 0, text="far too long " * 500)
    assert house.chats.view(OWNER, said.conversation.id).messages == said.messages


def test_too_long_a_chat_is_refused_and_not_asked_also_where_most_of_it_is_remembered(
    house: House, tab: Tab
) -> None:
    """Nobody agrees to a price and is refused then. An edited reply may make it so long, and that is said."""
    said = house.say("far too long " * 60)
    said = house.say("Hi", said.conversation.id)
    with pytest.warns(UserWarning, match=r"2,048"):
        tab.act("edit", said, 2, text="far too long " * 120)
    assert house.chats.view(OWNER, said.conversation.id).messages == said.messages
    picture = tab.act("edit_reply", said, 3, text="far too long " * 120)
    assert str(tab.answer(picture)["ask"]).startswith("After this the chat is too long")
    picture = tab.act("edit_reply", said, 3, text="far too long " * 120, sure=True)
    assert tab.answer(picture) == {"number": 7, "done": True}


# Whose, and which


@pytest.mark.parametrize(
    "verb", ["regenerate", "edit", "edit_reply", "go_on", "text", "fork", "delete_branch", "version", "undo"]
)
def test_nobody_acts_on_another_ones_chat(house: House, verb: str) -> None:
    said = house.say("Hi")
    with pytest.warns(UserWarning, match="not"):
        picture = Tab(house, "ben").act(verb, said, 1, text="Other words", step=1)
    assert picture == gr.skip()
    assert house.chats.view(OWNER, said.conversation.id) == said
    assert house.chats.list("ben") == []


@pytest.mark.parametrize("row", [2, -1, "1", None, {}])
def test_a_row_that_is_not_there_is_refused(house: House, tab: Tab, row: object) -> None:
    said = house.say("Hi")
    with pytest.warns(UserWarning, match="not shown any more"):
        tab.act("delete_branch", said, row)
    assert house.chats.view(OWNER, said.conversation.id) == said


# What is answered


def test_the_text_of_a_reply_is_what_there_is_of_it_so_far(house: House, tab: Tab) -> None:
    with Passes(house.loaded.model) as passes:
        hold = passes.hold(5)
        job = house.start("Hi")
        hold.wait_until_reached()
        view = house.chats.view(OWNER, job.conversation_id)
        so_far = tab.answer(tab.act("text", view, 1))["text"]
        assert so_far == job.view.text
        hold.release()
        ended = end_view(job)
    assert so_far
    assert tab.answer(tab.act("text", view, 1)) == {"number": 7, "text": ended.text}


def test_an_undo_hands_the_text_back_and_says_what_can_be_brought_back(house: House, tab: Tab) -> None:
    said = house.say("Hi")
    undone = tab.act("undo", said, None)
    assert tab.answer(undone) == {"number": 7, "back": "Hi"}
    shown = json.loads(undone[tab.parts.shown])
    assert (shown["canUndo"], shown["canRedo"]) == (False, True)
    shown = json.loads(tab.act("redo", said, None)[tab.parts.shown])
    assert (shown["canUndo"], shown["canRedo"]) == (True, False)
    with pytest.warns(UserWarning, match="nothing to bring back"):
        assert tab.act("redo", said, None) == gr.skip()

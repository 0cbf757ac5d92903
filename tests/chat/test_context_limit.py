"""A chat that outgrows the model is told so before anything is written; what was written is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from chat.errors import ContextFull
from chat.session import ChatSession
from chat.settings import SamplingSettings
from tests.chat.passes import PATIENCE_S, Passes, llama
from tests.house import GREEDY, OWNER, House, end_view

LIMIT = 128
"""Tokens of context of the small model that can be filled up."""


@pytest.fixture
def small(tmp_path: Path) -> Generator[House]:
    """A house whose model reads `LIMIT` tokens."""
    with House(tmp_path, llama(num_context_tokens=LIMIT)) as house:
        yield house


def test_a_message_that_does_not_fit_is_refused_with_the_counts_before_anything_is_written(
    small: House,
) -> None:
    """C50."""
    view = small.say("Hi")
    rows, before = small.num_rows(), small.kept()[view.conversation.id].cache.token_ids
    long = "word " * 200
    num_tokens = len(small.prompt(view, extra=long))
    verbs: list[Callable[[], object]] = [
        lambda: small.start(long, view.conversation.id),
        lambda: small.start(long),
        lambda: small.chats.edit(OWNER, view.messages[0].id, long, GREEDY),
    ]
    sentences: list[str] = []
    for verb in verbs:
        with pytest.raises(ContextFull) as refused:
            verb()
        sentences.append(str(refused.value))
    assert f"{num_tokens:,}" in sentences[0]
    assert all(str(LIMIT) in sentence for sentence in sentences)
    assert small.num_rows() == rows
    assert small.kept()[view.conversation.id].cache.token_ids == before
    small.say("Short", view.conversation.id)
    small.check(view.conversation.id)


def test_a_paste_of_a_megabyte_is_refused_and_the_app_goes_on(small: House) -> None:
    """C50."""
    rows = small.num_rows()
    with pytest.raises(ContextFull):
        small.start("words " * 170_000)
    assert small.num_rows() == rows
    small.say("Hi")


def test_a_prompt_of_exactly_the_limit_leaves_no_room_and_one_less_leaves_one_token(small: House) -> None:
    """C50."""
    view = small.say("Hi")
    chat_id, length = view.conversation.id, len(small.prompt(view, extra=""))
    with pytest.raises(ContextFull):
        small.start("x" * (LIMIT - length), chat_id)
    view = small.say("x" * (LIMIT - length - 1), chat_id, SamplingSettings(temperature=0, max_new_tokens=50))
    assert len(view.messages[-1].token_ids) in (1, 2)
    assert view.messages[-1].finish_reason == "context"
    small.check_oracle(chat_id)


def test_a_reply_that_reaches_the_limit_is_kept_and_marked(small: House) -> None:
    """C50."""
    view = small.say("Hi", sampling=SamplingSettings(temperature=0, max_new_tokens=500))
    chat_id, reply = view.conversation.id, view.messages[-1]
    assert (reply.status, reply.finish_reason) == ("stopped", "context")
    assert len(small.prompt(view, upto=1)) + len(reply.token_ids) in (LIMIT, LIMIT + 1)
    small.check_oracle(chat_id)
    with pytest.raises(ContextFull):
        small.start("More", chat_id)
    view = small.edit(view.messages[0].id, "Hello")
    small.check(chat_id)
    assert small.regenerate(reply.id).messages[-1].error is None


def test_no_position_beyond_the_limit_is_ever_fed(small: House) -> None:
    """C50: past the trained length the output turns to noise."""
    with Passes(small.loaded.model) as passes:
        small.say("Hi", sampling=SamplingSettings(temperature=0, max_new_tokens=500))
    assert len(passes.fed_ids) <= LIMIT


def test_a_message_sent_while_the_model_was_loading_is_told_as_soon_as_it_can_be(tmp_path: Path) -> None:
    """C50: nobody could count its tokens when it was stored; the text is kept and nothing is fed."""
    go_on, houses = threading.Event(), list[House]()

    def load() -> ChatSession:
        assert go_on.wait(PATIENCE_S)
        return houses[0].new_session()

    loaded = llama(num_context_tokens=LIMIT)
    with House(tmp_path, loaded, load=load) as house, Passes(loaded.model) as passes:
        houses.append(house)
        job = house.start("word " * 200)
        go_on.set()
        ended = end_view(job)
        view = house.chats.view(OWNER, job.conversation_id)
        assert (ended.state, view.messages[-1].error) == ("failed", ended.error)
        assert str(LIMIT) in str(ended.error)
        assert view.messages[0].text == "word " * 200
        assert passes.num_passes == 0
        view = house.edit(view.messages[0].id, "Hi")
        house.check(view.conversation.id)

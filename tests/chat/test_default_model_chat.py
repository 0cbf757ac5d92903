"""The main job on the real default model, in float32: it answers, remembers, and never reads twice."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest

from chat.job import Job
from chat.model import LoadedModel
from chat.settings import CacheSettings, SamplingSettings
from tests.chat.passes import dictated
from tests.house import OWNER, House, last_stats

SHORT = SamplingSettings(temperature=0, max_new_tokens=12)

QUESTIONS = (
    "What is the capital of France?",
    "And of Italy?",
    "Say one word.",
    "Which of the two cities is larger?",
    "Repeat exactly: Range: about ~3-5 items.",
    "What does <|im_end|> mean?",
    "Count from 1 to 5.",
    "What was my first question?",
)


@pytest.fixture
def house(default_model: LoadedModel, tmp_path: Path) -> Generator[House]:
    with House(tmp_path, default_model, settings=CacheSettings()) as house:
        yield house


def test_eight_turns_pass_the_oracle_and_the_invariant_after_every_one(house: House) -> None:
    """C02, C03, laws 1 and 4: and each turn reads the new message only."""
    chat_id, num_known = None, 0
    for question in QUESTIONS:
        view = house.say(question, chat_id, SHORT)
        chat_id = view.conversation.id
        house.check(chat_id)
        stats = last_stats(view)
        assert stats["num_live_tokens"] == num_known
        assert set(cast("dict[str, int]", stats["reasons"])) == {"new"}
        num_known = len(house.kept()[chat_id].cache)
    assert chat_id is not None
    messages = house.chats.view(OWNER, chat_id).messages
    assert any(message.finish_reason == "eos" for message in messages)
    assert not any("<|im_" in message.text for message in messages if message.role == "assistant")


def test_it_knows_the_capital_of_france(house: House) -> None:
    view = house.say("What is the capital of France?", sampling=SHORT)
    assert view.messages[-1].text == "The capital of France is Paris."
    assert view.messages[-1].finish_reason == "eos"


def test_an_edited_first_message_is_forgotten(house: House) -> None:
    """C01: after the edit it cannot know."""
    view = house.say("My dog is called Pixel. Reply OK.", sampling=SHORT)
    chat_id = view.conversation.id
    house.edit(view.messages[0].id, "Reply OK.", SHORT)
    house.check(chat_id)
    view = house.say("What is my dog called?", chat_id, SHORT)
    house.check(chat_id)
    assert "Pixel" not in view.messages[-1].text


def test_regenerate_edit_and_restart_pass_the_oracle(house: House) -> None:
    view = house.say("Name a colour.", sampling=SHORT)
    chat_id = view.conversation.id
    view = house.say("And another?", chat_id, SHORT)
    before = view.messages[-1].token_ids
    view = house.regenerate(view.messages[-1].id, SHORT)
    house.check(chat_id)
    assert view.messages[-1].token_ids == before
    assert last_stats(view)["reasons"] == {"boundary": 1}
    house.edit(view.messages[2].id, "Name a fruit.", SHORT)
    house.check(chat_id)
    house.restart()
    view = house.say("Why?", chat_id, SHORT)
    house.check(chat_id)
    assert set(cast("dict[str, int]", last_stats(view)["reasons"])) == {"off", "new"}


def test_a_pasted_text_is_read_in_chunks_with_its_progress_shown(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress: list[tuple[int, int]] = []
    publish = Job.publish

    def recorded(job: Job, **changes: Any) -> None:
        if changes.get("state") == "prefill":
            progress.append((changes["num_read"], changes["num_to_read"]))
        publish(job, **changes)

    monkeypatch.setattr(Job, "publish", recorded)
    page = "The keeper of the lighthouse wrote down the weather every evening before he lit the lamp. "
    view = house.say(page * 40 + "What did the keeper write down?", sampling=SHORT)
    house.check(view.conversation.id)
    total = progress[0][1]
    assert total > 600
    assert [num_read for num_read, _ in progress] == [*range(0, total, 256), total]
    view = house.say("Who wrote it?", view.conversation.id, SHORT)
    house.check(view.conversation.id)
    assert cast("int", last_stats(view)["num_live_tokens"]) > total


def test_emoji_stream_and_are_stored_whole(house: House) -> None:
    """C13: what was shown at any time is a beginning of what is stored, and no character is ever broken."""
    tokenizer: Any = house.loaded.tokenizer
    text = "😀👨‍👩‍👧‍👦🇩🇪👍🏽❤️ สวัสดี 안녕 नमस्ते"
    ids = tokenizer.encode(text, add_special_tokens=False)
    with dictated(*ids, tokenizer.eos_token_id):
        view = house.say("Answer with emoji.", sampling=SamplingSettings(temperature=0, max_new_tokens=200))
    chat_id = view.conversation.id
    assert view.messages[-1].text == text
    with dictated(*ids):
        view = house.regenerate(view.messages[-1].id, SamplingSettings(temperature=0, max_new_tokens=2))
    assert "\ufffd" not in view.messages[-1].text
    view = house.say("What did you mean?", chat_id, SHORT)
    house.check(chat_id)

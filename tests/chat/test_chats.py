"""The door to the page: editing, branches, titles, and what there is nothing to act on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from cache_store.errors import NotFound
from chat.errors import EmptyMessage, NothingToDo
from chat.settings import CacheSettings, SamplingSettings
from tests.chat.passes import llama
from tests.chat.replies import (
    TOKENIZER,
    chat_of,
    texts,
)
from tests.chat.tokenizers import (
    with_template,
)
from tests.house import GREEDY, OWNER, House, last_stats


def test_editing_the_first_message_leaves_no_trace_of_the_old_text(house: House) -> None:
    """C01: nothing of it is left in the prompt or in the cache, after one turn and after six."""
    for num_turns in (1, 6):
        view = house.say("My dog is called Pixel. Reply OK.")
        for number in range(1, num_turns):
            view = house.say(f"Turn {number}", view.conversation.id)
        chat_id, other = view.conversation.id, "Reply OK."
        view = house.edit(view.messages[0].id, other)
        house.check(chat_id)
        view = house.say("What is my dog called?", chat_id)
        house.check(chat_id)
        assert "Pixel" not in TOKENIZER.decode(house.kept()[chat_id].cache.token_ids)
        assert "Pixel" not in "".join(texts(view))
        assert len(view.messages) == 4


def test_a_chat_that_shares_nothing_with_its_past_starts_from_nothing(tmp_path: Path) -> None:
    """C01: a template without any fixed beginning, so that the common prefix is zero tokens."""
    template = "{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"
    with House(tmp_path, with_template(llama(), template)) as house:
        view = house.say("Pixel is my dog.")
        view = house.edit(view.messages[0].id, "Reply OK.")
        assert last_stats(view)["num_live_tokens"] == 0
        house.check(view.conversation.id)


@pytest.mark.parametrize("turn", [0, 2, 4])
def test_editing_a_message_reuses_the_tokens_before_it_and_keeps_the_old_branch(
    house: House, turn: int
) -> None:
    """C12: what follows an edited message is on another branch, not gone."""
    before = chat_of(house, 5)
    rows, edited = house.num_rows(), before.messages[2 * turn]
    view = house.edit(edited.id, "Something else")
    house.check(view.conversation.id)
    assert len(view.messages) == 2 * turn + 2
    assert view.messages[: 2 * turn] == before.messages[: 2 * turn]
    assert house.num_rows() == rows + 2
    prompt, old = house.prompt(view, upto=-1), house.prompt(before)
    common = next(i for i, (a, b) in enumerate(zip(prompt.token_ids, old.token_ids, strict=False)) if a != b)
    stats = last_stats(view)
    assert stats["num_live_tokens"] == common
    assert stats["reasons"] == {"edited": len(prompt) - common}
    back = house.chats.select(OWNER, view.messages[2 * turn].id, -1)
    assert back.messages == before.messages
    assert back.siblings[edited.id].ids == (edited.id, view.messages[2 * turn].id)


def test_an_old_reply_cannot_be_edited_as_if_a_person_had_said_it(house: House) -> None:
    """C12."""
    view = chat_of(house, 3)
    with pytest.raises(NothingToDo):
        house.chats.edit(OWNER, view.messages[1].id, "green", GREEDY)
    assert house.chats.view(OWNER, view.conversation.id).messages == view.messages


def test_an_edit_that_changes_nothing_does_nothing(house: House) -> None:
    view = chat_of(house, 2)
    with pytest.raises(NothingToDo):
        house.chats.edit(OWNER, view.messages[0].id, "Turn 0", GREEDY)
    assert house.chats.view(OWNER, view.conversation.id).messages == view.messages


def test_an_old_reply_can_be_regenerated_and_the_later_turns_come_back(house: House) -> None:
    before = chat_of(house, 4)
    view = house.regenerate(
        before.messages[3].id, SamplingSettings(temperature=1.5, max_new_tokens=5, seed=3)
    )
    assert len(view.messages) == 4
    house.check_invariant(view.conversation.id)
    assert last_stats(view)["reasons"] == {"boundary": 1}
    assert house.chats.select(OWNER, view.messages[3].id, 1).messages == before.messages
    house.say("And?", view.conversation.id)
    house.check(view.conversation.id)


# nothing to send, nothing to act on


@pytest.mark.parametrize(
    "text", ["", "   ", "\n\n", "\t", "\u200b", "\ufeff \u200b", "\u200c", "\u2060", "\u00ad", "\u200d\u200d"]
)
def test_what_cannot_be_seen_is_not_sent(house: House, text: str) -> None:
    """C16: refused quietly, everywhere, and nothing is stored."""
    view = chat_of(house, 1)
    rows = house.num_rows()
    verbs: list[Callable[[], object]] = [
        lambda: house.start(text),
        lambda: house.start(text, view.conversation.id),
        lambda: house.chats.edit(OWNER, view.messages[0].id, text, GREEDY),
        lambda: house.chats.rename(OWNER, view.conversation.id, text),
    ]
    for verb in verbs:
        with pytest.raises(EmptyMessage):
            verb()
    assert house.num_rows() == rows
    house.say("Still here", view.conversation.id)


def test_visible_text_with_invisible_characters_is_sent_as_it_is(house: House) -> None:
    text = "  \u200ba\n\n\n"
    assert house.say(text).messages[0].text == text


def test_an_empty_chat_has_nothing_to_regenerate_stop_or_select(house: House) -> None:
    """C16, with and without a system prompt."""
    for prompt in ("", "Be brief."):
        chat = house.chats.create(OWNER, prompt)
        view = house.chats.view(OWNER, chat.id)
        assert (view.messages, view.leaf_id, view.job, dict(view.siblings)) == ((), None, None, {})
        house.chats.stop(OWNER, chat.id)
        for verb in (house.chats.regenerate, lambda owner, name, _: house.chats.select(owner, name, 1)):
            with pytest.raises(NotFound):
                verb(OWNER, chat.id, GREEDY)
        house.say("Hi", chat.id)
        house.check(chat.id)


def test_selecting_where_there_is_one_message_changes_nothing(house: House) -> None:
    view = chat_of(house, 2)
    assert house.chats.select(OWNER, view.messages[1].id, 1).messages == view.messages


# titles and system prompts


def test_a_chat_is_named_after_its_first_message_and_keeps_a_chosen_name(house: House) -> None:
    assert house.say("A long\n\n  first   message").conversation.title == "A long first message"
    assert len(house.say("word " * 50).conversation.title) <= 60
    chat = house.chats.create(OWNER)
    house.chats.rename(OWNER, chat.id, "Mine")
    assert house.say("Hi", chat.id).conversation.title == "Mine"
    untitled = house.chats.create(OWNER)
    assert house.say("Hello", untitled.id).conversation.title == "Hello"


def test_behind_a_changed_system_prompt_all_is_read_again_and_the_reason_named(house: House) -> None:
    view = chat_of(house, 2)
    chat_id, num_before = view.conversation.id, cast("int", last_stats(view)["num_cached_tokens"])
    house.chats.set_system_prompt(OWNER, chat_id, "Be brief.")
    view = house.say("More", chat_id)
    house.check(chat_id)
    stats = last_stats(view)
    reasons, num_cached = cast("dict[str, int]", stats["reasons"]), cast("int", stats["num_live_tokens"])
    assert reasons.keys() == {"system_prompt", "new"}
    assert reasons["system_prompt"] == num_before - num_cached
    assert "Be brief." in TOKENIZER.decode(house.kept()[chat_id].cache.token_ids)


def test_the_model_describes_itself(tmp_path: Path) -> None:
    with House(tmp_path, llama(), settings=CacheSettings()) as house:
        status = house.chats.model_status()
        assert (status.state, status.device, status.dtype) == ("ready", "cpu", "float32")
        assert status.num_context_tokens == 2048
        assert status.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4

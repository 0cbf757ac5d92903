"""However a reply ends, its end-of-turn is fed once, its ids are kept, and no character is broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import chat.layers
import chat.reply_writer
from chat.chats import ChatView
from tests.chat.passes import Passes, dictated
from tests.chat.replies import (
    END,
    TOKENIZER,
    encode,
    held_reply,
    num_chunks,
    sampling,
    stop_in,
)
from tests.house import House, last_stats


def end_by_itself(house: House, chat_id: str | None, text: str) -> ChatView:
    with dictated(*encode("Yes."), END):
        return house.say(text, chat_id)


def end_by_length(house: House, chat_id: str | None, text: str) -> ChatView:
    return house.say(text, chat_id, sampling(max_new_tokens=5))


def end_by_stop_string(house: House, chat_id: str | None, text: str) -> ChatView:
    with dictated(*encode("Yes. STOP it")):
        return house.say(text, chat_id, sampling(stop_strings=(" STOP",), max_new_tokens=40))


def end_within_a_token(house: House, chat_id: str | None, text: str) -> ChatView:
    with dictated(*encode("Yes and")):
        return house.say(text, chat_id, sampling(stop_strings=("nd",), max_new_tokens=40))


def end_by_stop(house: House, chat_id: str | None, text: str) -> ChatView:
    with Passes(house.loaded.model) as passes:
        hold = passes.hold(num_chunks(house, text, chat_id) + 3)
        return stop_in(house, hold, held_reply(house, hold, text, chat_id))


ENDINGS = [end_by_itself, end_by_length, end_by_stop_string, end_within_a_token, end_by_stop]


@pytest.mark.parametrize("end", ENDINGS)
def test_the_end_of_turn_is_fed_exactly_once_after_every_reply(
    house: House, end: Callable[[House, str | None, str], ChatView]
) -> None:
    """C02: eight short turns, however the replies ended."""
    chat_id: str | None = None
    for number in range(8):
        view = end(house, chat_id, f"Say word {number}.")
        chat_id = view.conversation.id
        house.check_invariant(chat_id)
    assert chat_id is not None
    view = house.say("And now?", chat_id)
    house.check(chat_id)
    fed = TOKENIZER.decode(house.kept()[chat_id].cache.token_ids, skip_special_tokens=False)
    for number, reply in enumerate(view.messages[1:-1:2]):
        ids = [token_id for token_id in reply.token_ids if token_id != END]
        written = TOKENIZER.decode(ids, skip_special_tokens=False)
        following = f"{written}<|im_end|>\n<|im_start|>user\n"
        assert fed.count(f"Say word {number}.<|im_end|>\n<|im_start|>assistant\n{following}") == 1
    assert fed.count("<|im_end|>") == 9 + 8


def test_what_was_really_fed_in_eight_turns_is_the_chat_and_nothing_twice(
    house: House, passes: Passes
) -> None:
    """C02 and law 1: the record of the model's own input, not of the cache's list."""
    chat_id = None
    for number in range(8):
        chat_id = end_by_itself(house, chat_id, f"Say word {number}.").conversation.id
    assert chat_id is not None
    assert tuple(passes.fed_ids) == house.kept()[chat_id].cache.token_ids
    ids, text = passes.fed_ids, encode("Yes.")
    for at in (index for index in range(len(ids)) if ids[index : index + len(text)] == text):
        assert at + len(text) == len(ids) or ids[at + len(text)] == END
    assert ids.count(END) == 8 + 7


@pytest.mark.parametrize(
    ("end", "status", "finish_reason"),
    [
        (end_by_itself, "done", "eos"),
        (end_by_length, "stopped", "length"),
        (end_by_stop_string, "done", "stop_string"),
        (end_within_a_token, "done", "stop_string"),
        (end_by_stop, "stopped", "stopped"),
    ],
)
def test_the_row_says_how_the_reply_ended(
    house: House, end: Callable[[House, str | None, str], ChatView], status: str, finish_reason: str
) -> None:
    reply = end(house, None, "Hi").messages[-1]
    assert (reply.status, reply.finish_reason, reply.error) == (status, finish_reason, None)
    assert house.renderer.encode_text(reply.text) or not reply.text
    assert TOKENIZER.decode(reply.token_ids, skip_special_tokens=True) == reply.text


def test_a_stop_string_is_neither_shown_nor_stored(house: House) -> None:
    view = end_by_stop_string(house, None, "Hi")
    assert view.messages[-1].text == "Yes."
    house.say("And?", view.conversation.id)
    house.check(view.conversation.id)


def test_generated_ids_are_kept_although_the_text_would_be_tokenized_differently(house: House) -> None:
    """C03: on a plain follow-up only the new message is read."""
    split = [TOKENIZER.convert_tokens_to_ids(token) for token in ("Ġ", "t", "h", "e")]
    with dictated(*split, END):
        view = house.say("Hi")
    first = house.prompt(view, upto=1)
    assert view.messages[-1].token_ids == (*split, END)
    assert encode(view.messages[-1].text) != split
    view = house.say("And?", view.conversation.id)
    known = len(first) + len(split)
    prompt = house.prompt(view, upto=-1)
    assert prompt.token_ids[:known] == (*first.token_ids, *split)
    stats = last_stats(view)
    assert stats["num_live_tokens"] == known
    assert stats["reasons"] == {"new": len(prompt) - known}
    house.check(view.conversation.id)


# characters of many tokens


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
@pytest.mark.parametrize("how", ["stop", "length"])
def test_half_an_emoji_is_neither_stored_nor_left_in_the_cache(
    house: House, num_bytes: int, how: str
) -> None:
    """C13, C37."""
    ids = encode("Hi 😀😀")
    num_tokens = len(ids) - 4 + num_bytes
    with dictated(*ids), Passes(house.loaded.model) as passes:
        if how == "length":
            view = house.say("Go", sampling=sampling(max_new_tokens=num_tokens))
        else:
            hold = passes.hold(num_chunks(house, "Go") + num_tokens)
            view = stop_in(house, hold, held_reply(house, hold, "Go", max_new_tokens=50))
    reply = view.messages[-1]
    assert reply.text == "Hi 😀"
    assert list(reply.token_ids) == encode("Hi 😀")
    house.check_invariant(view.conversation.id)
    view = house.say("And?", view.conversation.id)
    house.check(view.conversation.id)


def test_a_reply_of_emoji_streams_and_is_stored_whole(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """C13: family, flag and skin tone included."""
    monkeypatch.setattr(chat.reply_writer, "SHOW_EVERY_S", 0.0)
    text = "😀👨‍👩‍👧‍👦🇩🇪👍🏽❤️" * 3
    with dictated(*encode(text), END):
        view = house.say("Go", sampling=sampling(max_new_tokens=400))
    assert view.messages[-1].text == text
    view = house.regenerate(view.messages[-1].id)
    house.check(view.conversation.id)


# empty replies


@pytest.mark.parametrize("then", ["send", "regenerate", "edit"])
def test_a_reply_that_ends_at_once_is_a_state_like_any_other(house: House, then: str) -> None:
    """C16."""
    with dictated(END):
        view = house.say("Hi")
    chat_id, (question, reply) = view.conversation.id, view.messages
    assert (reply.text, reply.status, reply.token_ids) == ("", "done", (END,))
    house.check_invariant(chat_id)
    if then == "send":
        house.say("And?", chat_id)
    elif then == "regenerate":
        house.regenerate(reply.id)
    else:
        house.edit(question.id, "Hello")
    house.check(chat_id)

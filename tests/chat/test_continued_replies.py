"""Replies that begin with something: a shorter reply that goes on, or words that a person gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

import chat.reply_writer
from cache_store.records import Beginning, Message
from chat.chats import ChatView
from chat.errors import ContextFull, NothingToDo
from chat.job import Job
from chat.reply_writer import Delta
from chat.reuse import Origin
from chat.stats import TurnStats
from tests.chat.passes import Passes, dictated, llama
from tests.chat.replies import END, LONG, TOKENIZER, encode, held_reply, sampling, stop_in
from tests.house import OWNER, House, assert_greedy, end_view

DISK = 10**9


def stats(view: ChatView) -> TurnStats:
    return TurnStats.from_json(cast("Any", view.messages[-1].stats))


def cut_reply(house: House, num_tokens: int = 6) -> ChatView:
    """A reply whose every token is a whole character, cut by its length."""
    with dictated(*encode("abcdefghijklmnop"[:num_tokens])):
        return house.say("Hi", sampling=sampling(max_new_tokens=num_tokens))


def check_goes_on(house: House, shorter: Message, view: ChatView) -> None:
    """The longer reply has the shorter one in it, and what follows is what the model would have said."""
    longer = view.messages[-1]
    assert longer.error is None
    assert longer.token_ids[: len(shorter.token_ids)] == shorter.token_ids
    assert longer.text.startswith(shorter.text)
    assert house.store.message(OWNER, shorter.id) == shorter
    asked = house.prompt(view, upto=-1).token_ids
    rest = longer.token_ids[len(shorter.token_ids) :]
    assert_greedy(house.loaded, asked + shorter.token_ids, rest)
    house.check_invariant(view.conversation.id)


def test_a_cut_reply_goes_on_and_reads_one_token(house: House) -> None:
    shorter = cut_reply(house).messages[-1]
    view = house.continue_reply(shorter.id)
    check_goes_on(house, shorter, view)
    assert dict(stats(view).reasons) == {"new": 1}
    assert stats(view).num_reply_tokens == 8
    assert len(view.messages) == 2
    assert view.siblings[view.messages[-1].id].ids == (shorter.id, view.messages[-1].id)
    longest = house.continue_reply(view.messages[-1].id)
    check_goes_on(house, view.messages[-1], longest)
    house.say("And?", view.conversation.id)
    house.check(view.conversation.id)


def test_a_reply_in_parts_is_the_reply_in_one_go(tmp_path: Path) -> None:
    """Greedy, under any cut: the same ids and text, however often it went on, over a restart too."""
    with House(tmp_path, llama(), max_disk_bytes=DISK) as house:
        whole = house.say("Hi", sampling=sampling(max_new_tokens=24)).messages[-1]
        view = house.say("Hi", sampling=sampling(max_new_tokens=5))
        while len(view.messages[-1].token_ids) < len(whole.token_ids):
            house.restart()
            left = len(whole.token_ids) - len(view.messages[-1].token_ids)
            view = house.continue_reply(view.messages[-1].id, sampling(max_new_tokens=min(5, left)))
            assert stats(view).num_prefilled_tokens <= 4, "what was cut within a character, and one token"
        assert view.messages[-1].token_ids == whole.token_ids
        assert view.messages[-1].text == whole.text


def test_going_on_after_a_restart_takes_the_rest_from_disk(tmp_path: Path) -> None:
    with House(tmp_path, llama(), max_disk_bytes=DISK) as house:
        shorter = cut_reply(house).messages[-1]
        house.restart()
        view = house.continue_reply(shorter.id)
        check_goes_on(house, shorter, view)
        assert dict(stats(view).reasons) == {"new": 1}


def test_a_reply_in_the_middle_goes_on_and_what_followed_it_stays_with_the_shorter_one(house: House) -> None:
    shorter = cut_reply(house).messages[-1]
    before = house.say("More", shorter.conversation_id)
    view = house.continue_reply(shorter.id)
    check_goes_on(house, shorter, view)
    assert len(view.messages) == 2
    assert house.chats.select(OWNER, view.messages[-1].id, -1).messages == before.messages


def test_a_stopped_reply_goes_on(house: House, passes: Passes) -> None:
    hold = passes.hold(5)
    job = held_reply(house, hold, "Hi", max_new_tokens=50)
    view = stop_in(house, hold, job)
    shorter = view.messages[-1]
    assert shorter.finish_reason == "stopped"
    check_goes_on(house, shorter, house.continue_reply(shorter.id))


@pytest.mark.parametrize("ids", [(), tuple(encode("Yes"))])
def test_a_reply_that_came_to_its_end_has_nothing_to_continue(house: House, ids: tuple[int, ...]) -> None:
    with dictated(*ids, END):
        view = house.say("Hi")
    for message in view.messages:
        with pytest.raises(NothingToDo):
            house.chats.continue_reply(OWNER, message.id, sampling())
    assert house.chats.view(OWNER, view.conversation.id).messages == view.messages


def test_a_reply_stopped_before_its_first_token_is_written_from_the_beginning(
    house: House, passes: Passes
) -> None:
    """C16: an empty reply is a state like any other."""
    hold = passes.hold(1)
    view = stop_in(house, hold, held_reply(house, hold, LONG))
    assert view.messages[-1].token_ids == ()
    view = house.continue_reply(view.messages[-1].id)
    assert view.messages[-1].token_ids
    house.check(view.conversation.id)


def test_a_reply_that_broke_off_goes_on(house: House, passes: Passes) -> None:
    passes.fail(ValueError("broken by a test"), 6)
    shorter = house.say("Hi", sampling=sampling(max_new_tokens=50)).messages[-1]
    assert (shorter.status, len(shorter.token_ids) > 0) == ("failed", True)
    check_goes_on(house, shorter, house.continue_reply(shorter.id))


def test_an_edited_reply_goes_on_from_its_last_word(house: House) -> None:
    """Its end-of-turn goes: there is one at the end of the longer reply, and none inside."""
    view = house.say("Hi")
    view = house.chats.edit_reply(OWNER, view.messages[-1].id, "The dog is", keep_rest=False)
    edited = view.messages[-1]
    assert edited.token_ids[-1] == END
    with dictated(*encode(" here."), END):
        view = house.continue_reply(edited.id)
    assert view.messages[-1].text == "The dog is here."
    assert view.messages[-1].token_ids == (*edited.token_ids[:-1], *encode(" here."), END)
    house.check_invariant(view.conversation.id)


def test_a_kill_while_a_reply_goes_on_loses_nothing_of_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat.reply_writer, "SHOW_EVERY_S", 0.0)
    for killed_after in (0, 1, 3):
        shorter = cut_reply(house).messages[-1]
        assert shorter.parent_id is not None
        conversation = house.store.get(OWNER, shorter.conversation_id)
        job = _begun(house, shorter)
        session = house.worker.session
        assert session is not None
        reply = house.store.message(OWNER, job.reply_id)
        events = session.advance(conversation, reply, origin=Origin(), stop=lambda: False)
        shown = shorter.text
        with dictated(*encode("qrstu")):
            for _ in range(killed_after):
                shown += next(event.text for event in events if isinstance(event, Delta))
        cast("Any", events).close()
        house.restart()
        recovered = house.store.message(OWNER, job.reply_id)
        assert (recovered.status, recovered.text) == ("stopped", shown)
        assert TOKENIZER.decode(recovered.token_ids) == shown
        assert house.store.message(OWNER, shorter.id) == shorter


def _begun(house: House, shorter: Message) -> Job:
    assert shorter.parent_id is not None
    reply = house.store.add_reply(
        OWNER,
        shorter.parent_id,
        sampling=sampling().to_json(),
        seed=1,
        beginning=Beginning(shorter.text, shorter.token_ids),
    )
    return Job(OWNER, reply.conversation_id, reply.id)


def test_a_reply_that_would_leave_no_room_for_more_is_not_continued(tmp_path: Path) -> None:
    with House(tmp_path, llama(num_context_tokens=64)) as house:
        view = house.say("Hi", sampling=sampling(max_new_tokens=200))
        assert view.messages[-1].finish_reason == "context"
        with pytest.raises(ContextFull):
            house.chats.continue_reply(OWNER, view.messages[-1].id, sampling())
        assert house.chats.view(OWNER, view.conversation.id).messages == view.messages


# words that a person gave


def test_a_reply_begins_with_the_words_that_were_given(house: House) -> None:
    job = house.chats.send(
        *(OWNER, "Hi"), conversation_id=None, leaf_id=None, sampling=sampling(), begin_with="Sure, the dog"
    )
    assert job.view.text.startswith("Sure, the dog")
    view = house.finish(job)
    reply, begun = view.messages[-1], tuple(encode("Sure, the dog"))
    assert reply.token_ids[: len(begun)] == begun
    assert len(reply.token_ids) > len(begun)
    assert reply.text == TOKENIZER.decode(reply.token_ids)
    asked = house.prompt(view, upto=-1).token_ids
    assert_greedy(house.loaded, asked + begun, reply.token_ids[len(begun) :])
    assert dict(stats(view).reasons) == {"new": len(asked) + len(begun)}
    house.check_invariant(view.conversation.id)
    house.say("And?", view.conversation.id)
    house.check(view.conversation.id)


def test_a_regenerated_reply_can_begin_with_given_words(house: House) -> None:
    view = house.say("Hi")
    job = house.chats.regenerate(OWNER, view.messages[-1].id, sampling(), begin_with="No: ")
    again = house.finish(job)
    assert again.messages[-1].text.startswith("No: ")
    assert dict(stats(again).reasons) == {"new": len(encode("No: "))}
    house.check_invariant(view.conversation.id)


def test_control_tokens_in_given_words_are_text(house: House) -> None:
    """C14."""
    job = house.chats.send(
        *(OWNER, "Hi"), conversation_id=None, leaf_id=None, sampling=sampling(), begin_with="<|im_end|> no"
    )
    reply = house.finish(job).messages[-1]
    assert reply.text.startswith("<|im_end|> no")
    assert END not in reply.token_ids
    house.say("And?", job.conversation_id)
    house.check(job.conversation_id)


def test_given_words_are_kept_when_the_reply_never_starts(house: House, passes: Passes) -> None:
    """Stopped while it waits in line: an empty continuation of what was given."""
    hold = passes.hold()
    running = held_reply(house, hold, "First")
    job = house.chats.send(
        *(OWNER, "Hi"), conversation_id=None, leaf_id=None, sampling=sampling(), begin_with="Sure"
    )
    house.chats.stop(OWNER, job.conversation_id)
    assert (end_view(job).state, end_view(job).text) == ("stopped", "Sure")
    hold.release()
    end_view(running)
    assert house.chats.view(OWNER, job.conversation_id).messages[-1].text == "Sure"
    view = house.say("And?", job.conversation_id)
    house.check(view.conversation.id)

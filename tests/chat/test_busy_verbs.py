"""Verbs on a chat whose reply is still being written: it is stopped first, kept, and never mixed in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import chat.questions
from chat.chats import ChatView
from chat.errors import NothingToDo
from chat.job import Job
from chat.session import ChatSession
from tests.chat.passes import PATIENCE_S, Hold, Passes
from tests.chat.replies import LONG, TOKENIZER, chat_of, held_reply, sampling
from tests.house import GREEDY, OWNER, House, end_view


@pytest.fixture
def hands() -> Generator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as hands:
        yield hands


class Writing:
    """A chat of two turns whose third reply is held while it is written."""

    def __init__(self, house: House, passes: Passes, number: int = 4) -> None:
        self.before = chat_of(house, 2)
        self.chat_id = self.before.conversation.id
        self.hold: Hold = passes.hold(number)
        self.job: Job = held_reply(house, self.hold, "Go on", self.chat_id, max_new_tokens=500)
        self.shown: ChatView = house.chats.view(OWNER, self.chat_id)

    def when_stopped(self, verb: Future[Any]) -> Any:
        """Let the held pass go on once the verb asked for a stop; what the verb returns."""
        assert self.job._stop.wait(PATIENCE_S)  # pyright: ignore[reportPrivateUsage]
        assert not verb.done()
        self.hold.release()
        return verb.result(PATIENCE_S)


@pytest.fixture
def writing(house: House, passes: Passes) -> Writing:
    return Writing(house, passes)


VERBS: dict[str, Callable[[House, Writing], Any]] = {
    "regenerate": lambda house, w: house.chats.regenerate(OWNER, w.job.reply_id, GREEDY),
    "regenerate an older one": lambda house, w: house.chats.regenerate(
        OWNER, w.before.messages[1].id, GREEDY
    ),
    "edit": lambda house, w: house.chats.edit(OWNER, w.shown.messages[4].id, "Something else", GREEDY),
    "edit an older one": lambda house, w: house.chats.edit(OWNER, w.before.messages[0].id, "Else", GREEDY),
    "continue": lambda house, w: house.chats.continue_reply(OWNER, w.job.reply_id, GREEDY),
    "edit the reply": lambda house, w: house.chats.edit_reply(OWNER, w.job.reply_id, "So", keep_rest=True),
    "undo": lambda house, w: house.chats.undo(OWNER, w.chat_id),
    "delete an older branch": lambda house, w: house.chats.delete_branch(OWNER, w.before.messages[2].id),
    "delete the reply": lambda house, w: house.chats.delete_branch(OWNER, w.job.reply_id),
    "fork here": lambda house, w: house.chats.fork(OWNER, w.job.reply_id),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_stops_the_reply_first_and_keeps_it(
    house: House, writing: Writing, hands: ThreadPoolExecutor, verb: str
) -> None:
    """C41: the partial reply stays where it was asked for, whole in itself, and the chat goes on."""
    done = writing.when_stopped(hands.submit(VERBS[verb], house, writing))
    assert end_view(writing.job).state == "stopped"
    if verb.startswith("delete"):
        assert writing.job.reply_id not in {
            message.id for path in house.store.leaves(OWNER, writing.chat_id) for message in path
        }
    else:
        partial = house.store.message(OWNER, writing.job.reply_id)
        assert partial.status == "stopped"
        assert partial.text == TOKENIZER.decode(partial.token_ids)
        assert partial.parent_id == writing.shown.messages[4].id
    if isinstance(done, Job):
        house.finish(done)
        house.check(writing.chat_id)
    view = house.chats.view(OWNER, writing.chat_id)
    if view.messages and view.messages[-1].role == "user":
        house.regenerate(view.messages[-1].id)
    else:
        house.say("And?", writing.chat_id)
    house.check(writing.chat_id)


def test_another_version_can_be_looked_at_while_a_reply_is_written(house: House, passes: Passes) -> None:
    """C40: the reply goes on to its end in its own place, with the words that it would have had."""
    before = chat_of(house, 2)
    chat_id = before.conversation.id
    edited = house.edit(before.messages[0].id, "Another beginning")
    hold = passes.hold(4)
    job = held_reply(house, hold, "Go on", chat_id)
    looked = house.chats.select(OWNER, edited.messages[0].id, -1)
    assert (looked.messages, looked.job) == (before.messages, job)
    with pytest.raises(NothingToDo, match="still being written"):
        house.start("More", chat_id)
    hold.release()
    assert house.finish(job).messages == before.messages
    view = house.chats.select(OWNER, before.messages[0].id, 1)
    assert view.messages[:2] == edited.messages
    assert (view.leaf_id, view.messages[-1].finish_reason) == (job.reply_id, "length")
    house.check(chat_id)
    house.chats.select(OWNER, edited.messages[0].id, -1)
    house.say("And?", chat_id)
    house.check(chat_id)


def test_a_verb_on_the_version_that_is_shown_stops_the_reply_on_another(
    house: House, passes: Passes, hands: ThreadPoolExecutor
) -> None:
    before = chat_of(house, 1)
    chat_id = before.conversation.id
    hold = passes.hold(4)
    job = hands.submit(house.chats.edit, OWNER, before.messages[0].id, "Else", sampling(max_new_tokens=500))
    hold.wait_until_reached()
    written = job.result(PATIENCE_S)
    view = house.chats.select(OWNER, house.chats.view(OWNER, chat_id).messages[0].id, -1)
    again = hands.submit(house.chats.regenerate, OWNER, view.messages[-1].id, GREEDY)
    assert written._stop.wait(PATIENCE_S)  # pyright: ignore[reportPrivateUsage]
    hold.release()
    view = house.finish(again.result(PATIENCE_S))
    assert end_view(written).state == "stopped"
    assert view.messages[0] == before.messages[0]
    house.check(chat_id)


@pytest.mark.parametrize("number", [1, 2])
def test_an_edit_while_the_old_question_is_still_being_read_stops_that(
    house: House, passes: Passes, hands: ThreadPoolExecutor, number: int
) -> None:
    before = chat_of(house, 1)
    chat_id = before.conversation.id
    hold = passes.hold(number)
    job = held_reply(house, hold, LONG, chat_id)
    asked = house.chats.view(OWNER, chat_id).messages[2]
    edit = hands.submit(house.chats.edit, OWNER, asked.id, "Something shorter", GREEDY)
    assert job._stop.wait(PATIENCE_S)  # pyright: ignore[reportPrivateUsage]
    hold.release()
    view = house.finish(edit.result(PATIENCE_S))
    house.check(chat_id)
    assert [message.text for message in view.messages][2] == "Something shorter"
    assert end_view(job).state == "stopped"


def test_a_verb_on_a_waiting_reply_takes_it_out_of_the_line(house: House, passes: Passes) -> None:
    chat_id = chat_of(house, 1).conversation.id
    hold = passes.hold()
    running = held_reply(house, hold, "First")
    waiting = house.start("Second", chat_id)
    edited = house.chats.edit(OWNER, house.chats.view(OWNER, chat_id).messages[2].id, "Other", GREEDY)
    assert end_view(waiting).state == "stopped"
    assert not running.view.ended
    hold.release()
    house.finish(edited)
    house.check(chat_id)


def test_nothing_is_stopped_for_a_verb_that_has_nothing_to_do(house: House, writing: Writing) -> None:
    asked, reply = writing.shown.messages[4], writing.before.messages[1]
    for verb in (
        lambda: house.chats.edit(OWNER, asked.id, asked.text, GREEDY),
        lambda: house.chats.edit(OWNER, reply.id, "x", GREEDY),
        lambda: house.chats.edit_reply(OWNER, asked.id, "x", keep_rest=True),
        lambda: house.chats.edit_reply(OWNER, reply.id, reply.text, keep_rest=True),
        lambda: house.chats.continue_reply(OWNER, asked.id, GREEDY),
    ):
        with pytest.raises(NothingToDo):
            verb()
    assert not writing.job.stop_requested
    writing.hold.release()
    writing.job.request_stop()
    house.finish(writing.job)


def test_other_chats_do_not_wait_for_a_reply_that_is_slow_to_stop(
    house: House, writing: Writing, hands: ThreadPoolExecutor
) -> None:
    """The wait is outside the lock: verbs on other chats, and looks at this one, go on."""
    verb = hands.submit(house.chats.edit, OWNER, writing.before.messages[0].id, "Else", GREEDY)
    assert writing.job._stop.wait(PATIENCE_S)  # pyright: ignore[reportPrivateUsage]
    other = hands.submit(house.start, "In another chat").result(PATIENCE_S)
    assert hands.submit(house.chats.view, OWNER, writing.chat_id).result(PATIENCE_S).job is writing.job
    assert not verb.done()
    writing.hold.release()
    for job in (other, verb.result(PATIENCE_S)):
        end_view(job)
        house.check(job.conversation_id)


def test_a_reply_that_does_not_stop_in_time_leaves_everything_as_it_was(
    house: House, writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat.questions, "STOP_PATIENCE_S", 0.0)
    rows = house.num_rows()
    with pytest.raises(NothingToDo, match="try again"):
        house.chats.edit(OWNER, writing.before.messages[0].id, "Else", GREEDY)
    assert house.num_rows() == rows
    writing.hold.release()
    house.finish(writing.job)


def test_many_verbs_at_once_on_one_busy_chat_leave_it_whole(
    house: House, writing: Writing, hands: ThreadPoolExecutor
) -> None:
    """Each stops what the one before it started; nothing hangs and nothing is lost."""
    edits = [
        hands.submit(house.chats.edit, OWNER, writing.before.messages[0].id, f"Else {number}", GREEDY)
        for number in range(4)
    ]
    assert writing.job._stop.wait(PATIENCE_S)  # pyright: ignore[reportPrivateUsage]
    writing.hold.release()
    for edit in edits:
        end_view(edit.result(PATIENCE_S))
    firsts = {path[0].text for path in house.store.leaves(OWNER, writing.chat_id)}
    assert firsts == {"Turn 0", *(f"Else {number}" for number in range(4))}
    house.say("And?", writing.chat_id)
    house.check(writing.chat_id)


def test_a_long_paste_is_tokenized_while_other_verbs_go_on(
    house: House, hands: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = chat_of(house, 2)
    reached, released = threading.Event(), threading.Event()
    check_fits = ChatSession.check_fits

    def slow(session: ChatSession, path: Any, *args: Any) -> None:
        if "pasted" in path[-1].text:
            reached.set()
            assert released.wait(PATIENCE_S)
        check_fits(session, path, *args)

    monkeypatch.setattr(ChatSession, "check_fits", slow)
    verbs: list[Callable[[], Job]] = [
        lambda: house.start("pasted"),
        lambda: house.start("pasted", view.conversation.id),
        lambda: house.chats.edit(OWNER, view.messages[0].id, "pasted", sampling()),
    ]
    for verb in verbs:
        reached.clear()
        released.clear()
        job = hands.submit(verb)
        assert reached.wait(PATIENCE_S)
        house.say("Meanwhile, elsewhere")
        assert not job.done()
        released.set()
        end_view(job.result(PATIENCE_S))

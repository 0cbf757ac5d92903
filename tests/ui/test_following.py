"""Followers only watch: which looks they pass on, when they end, and what they draw."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from cache_store.records import Conversation, Message
from chat.chats import ChatView
from chat.job import Job, JobView
from ui.following import Writing, looks, pictures
from ui.live import IDLE, live
from ui.screen import Parts
from ui.tabs import Tabs

QUESTION = Message("q1", "c1", None, "user", "Why?", "done", 0.0)
REPLY = Message("a1", "c1", "q1", "assistant", "", "running", 0.0)
PARTS = cast("Parts", SimpleNamespace(chat="chat", live="live"))


def job_of(owner: str = "me", conversation_id: str = "c1", reply_id: str = "a1") -> Job:
    return Job(owner, conversation_id, reply_id)


def view_of(job: Job | None, *messages: Message) -> ChatView:
    return ChatView(Conversation("c1", "me", "A chat", "", 0.0, 0.0), messages, {}, job)


def seen_by(
    job: Job, steps: list[Callable[[], None]], wanted: Callable[[], bool] = lambda: True
) -> list[JobView]:
    """The looks of one follower; each pause runs the next step instead of waiting."""
    remaining = iter(steps)

    async def pause(_: float) -> None:
        next(remaining, lambda: job.publish(state="done"))()

    async def follow() -> list[JobView]:
        return [look async for look in looks(job, wanted, pause)]

    return asyncio.run(follow())


def test_a_follower_sees_each_state_and_ends_with_the_ended_one() -> None:
    job = job_of()
    seen = seen_by(
        job,
        [
            lambda: job.publish(state="prefill", num_read=3, num_to_read=9),
            lambda: job.publish(state="decode", text="Be"),
            lambda: job.publish(state="done", text="Because."),
        ],
    )
    assert [look.state for look in seen] == ["queued", "prefill", "decode", "done"]
    assert seen[-1].text == "Because."


def test_nothing_is_passed_on_while_nothing_changes() -> None:
    """C44."""
    job = job_of()
    seen = seen_by(job, [lambda: None] * 50)
    assert [look.state for look in seen] == ["queued", "done"]


def test_many_tokens_between_two_looks_are_one_update() -> None:
    """C44."""
    job = job_of()

    def burst() -> None:
        for count in range(100):
            job.publish(state="decode", text="x" * count)

    assert len(seen_by(job, [burst])) == 3


def test_a_follower_that_is_not_wanted_any_more_ends_and_the_reply_goes_on() -> None:
    """C38, C40."""
    job, tabs = job_of(), Tabs()
    ticket = tabs.follow("tab", "c1")
    assert ticket is not None
    seen = seen_by(job, [lambda: None, lambda: tabs.draw("tab", "c2")], lambda: tabs.is_newest("tab", ticket))
    assert [look.state for look in seen] == ["queued"]
    assert not job.stop_requested
    assert not job.view.ended


def test_a_follower_of_an_ended_reply_looks_once() -> None:
    job = job_of()
    job.publish(state="stopped", text="Half")
    assert [look.state for look in seen_by(job, [])] == ["stopped"]


def pictures_of(
    job: Job, view: ChatView, limit: int, steps: list[Callable[[], None]]
) -> list[dict[str, object]]:
    """The pictures of a follower whose pauses run `steps`."""
    remaining = iter(steps)

    async def pause(_: float) -> None:
        next(remaining, lambda: job.publish(state="done"))()

    async def follow() -> list[dict[str, object]]:
        drawn = pictures(PARTS, view, limit, lambda: True, pause)
        return [cast("dict[str, object]", picture) async for picture in drawn]

    return asyncio.run(follow())


def test_the_rows_above_are_handed_on_as_they_are() -> None:
    """C44: finished rows are the same objects in every update, so nothing is drawn twice."""
    job = job_of()
    steps = [lambda: job.publish(state="decode", text="Be"), lambda: job.publish(text="Because")]
    drawn = pictures_of(job, view_of(job, QUESTION, REPLY), 40, steps)
    chats = [cast("list[object]", picture["chat"]) for picture in drawn if "chat" in picture]
    assert len(chats) == 2
    assert chats[0] is not chats[1]
    assert chats[0][0] is chats[1][0]


def test_an_update_is_as_long_as_the_window_and_not_as_the_chat() -> None:
    """C44."""
    job = job_of()
    earlier = [QUESTION] * 500
    drawn = pictures_of(
        job, view_of(job, *earlier, REPLY), 40, [lambda: job.publish(state="decode", text="Be")]
    )
    assert [len(cast("list[object]", p["chat"])) for p in drawn if "chat" in p] == [40]


def test_progress_does_not_redraw_the_chat() -> None:
    job = job_of()
    steps = [lambda: job.publish(state="prefill", num_read=1, num_to_read=9)]
    drawn = pictures_of(job, view_of(job, QUESTION, REPLY), 40, steps)
    assert ["chat" in picture for picture in drawn] == [False] * len(drawn)
    assert drawn


def test_a_reply_on_another_branch_is_not_drawn_into_this_one() -> None:
    """C40."""
    job = job_of(reply_id="elsewhere")
    assert pictures_of(job, view_of(job, QUESTION, REPLY), 40, []) == []


@pytest.mark.parametrize(
    ("view", "line"),
    [
        (JobView(state="queued", position=0), "Starting…"),
        (JobView(state="queued", position=1), "1 reply ahead of yours"),
        (JobView(state="queued", position=2), "2 replies ahead of yours"),
        (JobView(state="loading"), "Waiting for the model to load…"),
        (JobView(state="prefill", num_read=1204, num_to_read=5310), "Reading 1,204 of 5,310 tokens…"),
        (JobView(state="prefill"), "Reading…"),
        (JobView(state="decode"), "Writing…"),
        (JobView(state="decode", text="Be"), ""),
    ],
)
def test_a_reply_without_text_says_what_it_waits_for(view: JobView, line: str) -> None:
    assert live(view)["line"] == line


def test_the_bar_is_full_when_everything_is_read() -> None:
    assert live(JobView(state="prefill", num_read=9, num_to_read=9))["fraction"] == 1.0


def test_an_ended_reply_is_idle() -> None:
    assert live(JobView(state="failed", error="No memory.")) == IDLE


def test_writing_lists_only_this_owners_running_replies() -> None:
    """C46."""
    writing = Writing()
    mine, other, ended = job_of("me", "c1", "a1"), job_of("you", "c2", "a2"), job_of("me", "c3", "a3")
    ended.publish(state="done")
    for job in (mine, other, ended, None):
        writing.note(job)
    assert writing.of("me") == ["c1"]
    mine.publish(state="stopped")
    assert writing.of("me") == []

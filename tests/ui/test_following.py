"""Followers only watch: which looks they pass on, when they end, and what they draw."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cache_store.records import Conversation, Message
from chat.chats import ChatView
from chat.job import Job, JobView
from tests.ui.own_loop import run
from ui.following import LOOKS_PER_BEAT, pictures
from ui.live import IDLE, elsewhere, live
from ui.screen import Parts
from ui.tabs import Tabs

QUESTION = Message("q1", "c1", None, "user", "Why?", "done", 0.0)
REPLY = Message("a1", "c1", "q1", "assistant", "", "running", 0.0)
PARTS = cast("Parts", SimpleNamespace(chat="chat", live="live"))


def job_of(owner: str = "me", conversation_id: str = "c1", reply_id: str = "a1") -> Job:
    return Job(owner, conversation_id, reply_id)


def view_of(job: Job | None, *messages: Message) -> ChatView:
    return ChatView(Conversation("c1", "me", "A chat", "", 0.0, 0.0), messages, {}, job)


def pictures_of(
    job: Job,
    view: ChatView,
    steps: list[Callable[[], None]],
    limit: int = 40,
    wanted: Callable[[], bool] = lambda: True,
) -> list[dict[str, Any]]:
    """The pictures of one follower; each pause runs the next step instead of waiting, and then the end."""
    remaining = iter(steps)

    async def pause(_: float) -> None:
        next(remaining, lambda: job.publish(state="done"))()

    async def follow() -> list[dict[str, Any]]:
        drawn = pictures(PARTS, view, limit, wanted, pause)
        return [cast("dict[str, Any]", picture) async for picture in drawn]

    return run(follow())


def test_a_follower_draws_each_state_until_the_end() -> None:
    job = job_of()
    drawn = pictures_of(
        job,
        view_of(job, QUESTION, REPLY),
        [
            lambda: job.publish(state="prefill", num_read=3, num_to_read=9),
            lambda: job.publish(state="decode", text="Be"),
            lambda: job.publish(state="done", text="Because."),
        ],
    )
    assert [picture["live"]["line"] for picture in drawn] == ["Starting…", "Reading 3 of 9 tokens…", ""]
    assert [picture["chat"][-1]["content"][0]["text"] for picture in drawn if "chat" in picture] == ["Be"]


def test_while_nothing_changes_only_the_beat_is_passed_on() -> None:
    """C44; and a page that waits for a long time knows that it is not forgotten."""
    job = job_of()
    drawn = pictures_of(job, view_of(job, QUESTION, REPLY), [lambda: None] * (3 * LOOKS_PER_BEAT))
    assert drawn == [{"live": live(JobView(), beat=beat)} for beat in range(4)]


def test_the_beat_goes_on_under_a_growing_text() -> None:
    job = job_of()
    steps = [partial(job.publish, state="decode", text="x" * n) for n in range(1, 2 * LOOKS_PER_BEAT)]
    drawn = pictures_of(job, view_of(job, QUESTION, REPLY), steps)
    assert [picture["live"]["beat"] for picture in drawn if "live" in picture] == [0, 0, 1]


def test_many_tokens_between_two_looks_are_one_update() -> None:
    """C44."""
    job = job_of()

    def burst() -> None:
        for count in range(100):
            job.publish(state="decode", text="x" * count)

    drawn = pictures_of(job, view_of(job, QUESTION, REPLY), [burst])
    assert [len(picture["chat"][-1]["content"][0]["text"]) for picture in drawn if "chat" in picture] == [99]


def test_a_follower_that_is_not_wanted_any_more_ends_and_the_reply_goes_on() -> None:
    """C38, C40."""
    job, tabs = job_of(), Tabs()
    ticket = tabs.follow("tab", "c1")
    assert ticket is not None
    steps = [lambda: None, lambda: tabs.draw("tab", "c2"), lambda: job.publish(state="decode", text="Be")]
    wanted = partial(tabs.is_newest, "tab", ticket)
    drawn = pictures_of(job, view_of(job, QUESTION, REPLY), steps, wanted=wanted)
    assert drawn == [{"live": live(JobView())}]
    assert not job.stop_requested
    assert not job.view.ended


def test_there_is_nothing_to_follow_in_an_ended_reply() -> None:
    job = job_of()
    job.publish(state="stopped", text="Half")
    assert pictures_of(job, view_of(job, QUESTION, REPLY), []) == []


def test_the_rows_above_are_handed_on_as_they_are() -> None:
    """C44: finished rows are the same objects in every update, so nothing is drawn twice."""
    job = job_of()
    steps = [lambda: job.publish(state="decode", text="Be"), lambda: job.publish(text="Because")]
    drawn = pictures_of(job, view_of(job, QUESTION, REPLY), steps)
    chats = [picture["chat"] for picture in drawn if "chat" in picture]
    assert len(chats) == 2
    assert chats[0] is not chats[1]
    assert chats[0][0] is chats[1][0]


def test_an_update_is_as_long_as_the_window_and_not_as_the_chat() -> None:
    """C44."""
    job = job_of()
    earlier = [QUESTION] * 500
    drawn = pictures_of(
        job, view_of(job, *earlier, REPLY), [lambda: job.publish(state="decode", text="Be")], limit=40
    )
    assert [len(p["chat"]) for p in drawn if "chat" in p] == [40]


def test_progress_does_not_redraw_the_chat() -> None:
    job = job_of()
    steps = [lambda: job.publish(state="prefill", num_read=1, num_to_read=9)]
    drawn = pictures_of(job, view_of(job, QUESTION, REPLY), steps)
    assert ["chat" in picture for picture in drawn] == [False] * len(drawn)
    assert drawn


def test_a_reply_on_another_branch_is_not_drawn_into_this_one() -> None:
    """C40: but it is watched to its end, which the page waits for."""
    job = job_of(reply_id="elsewhere")
    steps = [lambda: job.publish(state="decode", text="Be")] + [lambda: None] * (2 * LOOKS_PER_BEAT)
    drawn = pictures_of(job, view_of(job, QUESTION, REPLY), steps)
    assert drawn == [{"live": elsewhere(beat)} for beat in range(3)]


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

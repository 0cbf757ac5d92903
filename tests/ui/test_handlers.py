"""Handlers over real chats: what a tab is told of a reply, in which order, and for whom."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any, cast

import gradio as gr
import pytest

from chat.job import Job
from tests.chat.passes import Hold, Passes, llama
from tests.house import OWNER, PATIENCE_S, House, end_view
from tests.ui.own_loop import run
from ui.drawing import Drawing
from ui.handlers import Handlers
from ui.layout import lay_out
from ui.live import ELSEWHERE
from ui.screen import Parts


class Tab:
    """A tab of one person, without a browser: what its followers would draw."""

    def __init__(self, house: House, owner: str = OWNER) -> None:
        self.parts = run(_parts())
        self.request = gr.Request(username=owner, session_hash="tab")
        self.handlers = Handlers(house.chats, self.parts, Drawing(house.chats, self.parts, ""))

    def follow(self, job: Job, *, writing: bool) -> AsyncIterator[Any]:
        """`writing`: whether the tab shows a reply on its way."""
        address = {"conversation": job.conversation_id, "rows": [], "limit": 40, "writing": writing}
        return cast("AsyncIterator[Any]", self.handlers.follow(self.request, json.dumps(address)))

    def is_writing(self, picture: dict[Any, Any]) -> bool | None:
        """Whether the tab shows a reply on its way from this picture on; None when it does not say."""
        shown = picture.get(self.parts.shown)
        return None if shown is None else json.loads(shown)["writing"]

    async def rest_of(self, follower: AsyncIterator[Any]) -> list[dict[Any, Any]]:
        """The pictures up to the follower's end; the last word of each is "nothing new"."""
        pictures = [picture async for picture in follower]
        assert pictures.pop().get("__type__") == "update"
        return pictures

    async def all_of(self, job: Job, hold: Hold) -> list[dict[Any, Any]]:
        """What is drawn of a reply that is being held: one picture before it is let go, and the rest."""
        follower = self.follow(job, writing=True)
        first = await anext(follower)
        hold.release()
        return [first, *await self.rest_of(follower)]


async def _parts() -> Parts:
    """Made where an event loop runs, because Gradio else makes one that nobody closes."""
    with gr.Blocks(analytics_enabled=False):
        return lay_out("")


@pytest.fixture
def house(tmp_path: Path) -> Generator[House]:
    with House(tmp_path, llama()) as house:
        yield house


@pytest.fixture
def tab(house: House) -> Tab:
    return Tab(house)


def test_a_follower_draws_a_reply_and_its_end(house: House, tab: Tab) -> None:
    with Passes(house.loaded.model) as passes:
        hold = passes.hold(4)
        job = house.start("Hi")
        hold.wait_until_reached()
        first, *_, last = run(tab.all_of(job, hold))
    assert tab.is_writing(first) is None
    assert tab.is_writing(last) is False
    assert json.loads(last[tab.parts.marks])["rows"][-1]["note"] == "Stopped at the limit of new tokens"


def test_a_follower_that_comes_after_the_end_draws_it(house: House, tab: Tab) -> None:
    """The reply was over before the browser asked for it."""
    job = house.start("Hi")
    end_view(job)
    pictures = run(tab.rest_of(tab.follow(job, writing=True)))
    assert [tab.is_writing(picture) for picture in pictures] == [False]


def test_a_finished_chat_is_not_drawn_again(house: House, tab: Tab) -> None:
    job = house.start("Hi")
    end_view(job)
    assert run(tab.rest_of(tab.follow(job, writing=False))) == []


def test_a_follower_that_drew_a_reply_on_its_way_draws_its_end_too(house: House, tab: Tab) -> None:
    """C40: it was asked for before the tab knew of the reply, came after the reply's own follower, and the
    reply ends just after its first picture."""

    async def overtake(job: Job) -> list[dict[Any, Any]]:
        older = tab.follow(job, writing=True)
        await anext(older)
        newer = tab.follow(job, writing=False)
        first = asyncio.ensure_future(anext(newer))
        assert await tab.rest_of(older) == []
        seen = await first
        hold.release()
        await asyncio.to_thread(job.wait_until_ended, PATIENCE_S)
        return [seen, *await tab.rest_of(newer)]

    with Passes(house.loaded.model) as passes:
        hold = passes.hold(4)
        job = house.start("Hi")
        hold.wait_until_reached()
        pictures = run(overtake(job))
    assert tab.is_writing(pictures[0]) is True
    assert tab.is_writing(pictures[-1]) is False


def test_a_tab_that_shows_another_version_is_told_that_a_reply_is_written_and_when_it_has_ended(
    house: House, tab: Tab
) -> None:
    """C40: nothing of the reply is drawn there."""
    before = house.say("Hi")
    edited = house.edit(before.messages[0].id, "Else")

    with Passes(house.loaded.model) as passes:
        hold = passes.hold(4)
        job = house.start("Go on", before.conversation.id)
        hold.wait_until_reached()
        house.chats.select(OWNER, edited.messages[0].id, -1)
        first, *_, last = run(tab.all_of(job, hold))
    assert json.loads(first[tab.parts.live])["line"] == ELSEWHERE
    assert tab.parts.chat not in first
    assert tab.is_writing(last) is False
    assert json.loads(last[tab.parts.shown])["rows"] == [message.id for message in before.messages]


def test_only_this_owners_running_replies_have_a_dot(house: House, tab: Tab) -> None:
    """C46."""

    def dots() -> list[str]:
        picture = cast("dict[Any, Any]", tab.handlers.pulse(tab.request))
        return json.loads(picture[tab.parts.status])["writing"]

    with Passes(house.loaded.model) as passes:
        hold = passes.hold(2)
        mine, other = house.start("Hi"), house.start("Hi", owner="bob")
        hold.wait_until_reached()
        assert dots() == [mine.conversation_id]
        hold.release()
        end_view(mine)
        end_view(other)
    assert dots() == []

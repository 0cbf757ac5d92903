"""Where caches cannot be saved the page says so, for as long as it is so. (C24)"""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import gradio as gr
import pytest

from tests.chat.passes import llama
from tests.house import OWNER, PATIENCE_S, House
from tests.ui.own_loop import run
from ui.drawing import Drawing
from ui.handlers import Handlers
from ui.layout import lay_out
from ui.screen import Parts

TOO_LITTLE, PLENTY = 1000, 10**9


class Page:
    """What the page is told when it asks how things are."""

    def __init__(self, house: House) -> None:
        self.parts = run(_parts())
        self.handlers = Handlers(house.chats, self.parts, Drawing(house.chats, self.parts, ""))

    def pulse(self) -> tuple[str, bool]:
        """The notice about saving, and whether the page asks again by itself."""
        request = gr.Request(username=OWNER, session_hash="tab")
        picture = cast("dict[Any, Any]", self.handlers.pulse(request))
        return json.loads(picture[self.parts.status])["saving"], picture[self.parts.pulse].active


async def _parts() -> Parts:
    with gr.Blocks(analytics_enabled=False):
        return lay_out("")


@pytest.fixture
def house(tmp_path: Path) -> Generator[House]:
    with House(tmp_path, llama(), max_disk_bytes=PLENTY) as house:
        yield house


def say(house: House, text: str, chat: str | None = None) -> str:
    """A turn and the end of its saving; its chat."""
    assert house.saver is not None
    chat = house.say(text, chat).conversation.id
    assert house.saver.wait_for(chat, PATIENCE_S)
    return chat


def allow(house: House, max_bytes: int) -> None:
    assert house.segments is not None
    house.segments._max_bytes = max_bytes  # pyright: ignore[reportPrivateUsage]


def test_the_page_says_that_caches_are_not_saved_until_they_are_again(house: House) -> None:
    page = Page(house)
    chat = say(house, "One.")
    assert page.pulse() == ("", False)
    allow(house, TOO_LITTLE)
    say(house, "Two.", chat)
    notice, _ = page.pulse()
    assert "not saved" in notice
    assert "the chat is safe" in notice
    allow(house, PLENTY)
    say(house, "Three.", chat)
    assert page.pulse() == ("", False)


def test_the_page_asks_on_while_rows_of_an_ended_reply_are_being_saved(house: House) -> None:
    """The notice may come after the reply's last picture."""
    assert house.segments is not None
    assert house.saver is not None
    page = Page(house)
    allow(house, TOO_LITTLE)
    with house.segments._writing:  # pyright: ignore[reportPrivateUsage]
        chat = house.say("One.").conversation.id
        assert page.pulse() == ("", True)
    house.saver.wait_for(chat, PATIENCE_S)
    notice, asks_again = page.pulse()
    assert notice
    assert not asks_again


def test_where_nobody_wished_caches_to_be_saved_there_is_no_notice(tmp_path: Path) -> None:
    with House(tmp_path, llama()) as house:
        house.say("One.")
        assert Page(house).pulse() == ("", False)

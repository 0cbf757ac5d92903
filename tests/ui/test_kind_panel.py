"""What the drawer says of kinds, in words; and that choosing is for the owner of the chat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast, get_args

import gradio as gr
import pytest

from cache_store.records import KindQuality
from chat.chat_view import Cost
from chat.kind_choices import KindMenu, KindView
from chat.layers.kinds import Availability
from chat.memory_forecast import KindForecast
from chat.settings import CacheKind
from tests.chat.passes import llama
from tests.house import OWNER, House
from tests.ui.own_loop import run
from ui.drawing import Drawing
from ui.kind_panel import KindRow, KindVerbs, kind_panel
from ui.layout import lay_out
from ui.screen import Parts


def row(
    kind: CacheKind = "native8",
    availability: Availability | None = None,
    quality: KindQuality | None = None,
    cost: Cost | None = None,
    num_tokens: int = 8192,
    is_being_measured: bool = False,
) -> KindRow:
    """What is said of one kind that is not in use, on a model that reads 8,192 tokens."""
    forecast = KindForecast(kind, 12_288, num_tokens, num_tokens == 8192)
    view = KindView(kind, availability or Availability(), forecast, quality, is_being_measured, cost)
    return kind_panel(KindMenu("dynamic", "", False, (view,)))["rows"][0]


def test_how_long_a_chat_can_become() -> None:
    assert row()["line"] == "12 KB per token · fits all 8,192 tokens"
    assert row(num_tokens=1504)["line"] == "12 KB per token · fits 1,504 tokens on this machine"
    assert [row()["is_short"], row(num_tokens=1504)["is_short"]] == [False, True]


@pytest.mark.parametrize(
    ("quality", "expected", "is_bad"),
    [
        (None, "", False),
        (KindQuality(0.0001, 1.0), "Same answers", False),
        (KindQuality(0.01, 0.95), "Slightly different answers", False),
        (KindQuality(2.2, 0.26), "Not recommended for this model", True),
    ],
)
def test_how_good_the_answers_are(quality: KindQuality | None, expected: str, is_bad: bool) -> None:
    told = row(quality=quality)
    assert (told["quality"], told["is_bad"]) == (expected, is_bad)
    assert row(quality=quality, is_being_measured=True)["quality"] == "Being measured…"


@pytest.mark.parametrize("kind", ["offloaded", "static", "offloaded_static"])
def test_dense_kinds_answer_alike_and_are_not_measured(kind: CacheKind) -> None:
    assert (row(kind)["quality"], row(kind)["is_bad"]) == ("Same answers", False)
    assert row("dynamic")["quality"] == "", "alike to itself"
    forecast = KindForecast(kind, 1, 1, True)
    view = KindView(kind, Availability(), forecast, None, False, None)
    assert not kind_panel(KindMenu("dynamic", "", False, (view,)))["to_measure"]


def test_every_kind_has_a_name_of_its_own() -> None:
    names = [row(kind)["name"] for kind in get_args(CacheKind)]
    assert len({*names, *get_args(CacheKind)}) == 2 * len(names)
    assert row("offloaded")["name"] == "Full precision in the computer's memory"


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (None, ""),
        (
            Cost(0, 0.0),
            "Nothing is read again: what is remembered is converted, or saved in this form already.",
        ),
        (Cost(1, None), "1 token is read again with your next message."),
        (Cost(1204, 3.41), "1,204 tokens are read again with your next message, which takes about 3.4 s."),
    ],
)
def test_what_a_change_costs(cost: Cost | None, expected: str) -> None:
    assert row(cost=cost)["cost"] == expected


def test_why_a_kind_cannot_be_chosen_and_what_there_is_to_measure() -> None:
    missing = Availability("The package hqq is not installed.", "pip install -r requirements-quant.txt")
    told = row("hqq4", missing)
    assert (told["name"], told["reason"], told["install"]) == (
        "4 bit by hqq",
        missing.reason,
        missing.install,
    )
    forecast = KindForecast("hqq4", 1, 1, True)
    view = KindView("hqq4", missing, forecast, None, False, None)
    panel = kind_panel(KindMenu("dynamic", "", True, (view,)))
    assert (panel["to_measure"], panel["measuring"], panel["shrink"]) == (False, False, True)
    loading = kind_panel(None)
    assert loading["rows"] == []
    assert "once the model is loaded" in loading["notice"]


class Tab:
    """A tab of one person, without a browser."""

    def __init__(self, house: House, owner: str = OWNER) -> None:
        self.parts = run(_parts())
        self.request = gr.Request(username=owner, session_hash="tab")
        self.verbs = KindVerbs(house.chats, self.parts, Drawing(house.chats, self.parts, ""))

    def choose(self, chat: str | None, kind: str) -> Any:
        data = cast("Any", gr.EventData(None, {"kind": kind}))
        return self.verbs.choose(self.request, data, json.dumps({"conversation": chat}), "")

    def rows(self, picture: Any) -> dict[str, KindRow]:
        return {each["kind"]: each for each in json.loads(picture[self.parts.kinds])["rows"]}


async def _parts() -> Parts:
    """Made where an event loop runs, because Gradio else makes one that nobody closes."""
    await asyncio.sleep(0)
    with gr.Blocks(analytics_enabled=False):
        return lay_out("")


@pytest.fixture
def house(tmp_path: Path) -> Generator[House]:
    with House(tmp_path, llama()) as house:
        yield house


def test_a_kind_is_chosen_for_the_chat_that_is_shown_or_for_a_new_one(house: House) -> None:
    tab = Tab(house)
    chat = house.say("Hello").conversation.id
    rows = tab.rows(tab.choose(chat, "native8"))
    assert [kind for kind, each in rows.items() if each["in_use"]] == ["native8"]
    picture = tab.choose(None, "native4")
    made = json.loads(picture[tab.parts.shown])["conversation"]
    assert house.chats.view(OWNER, made).conversation.cache_kind == "native4"
    assert house.chats.view(OWNER, chat).conversation.cache_kind == "native8"


@pytest.mark.parametrize(("owner", "kind"), [("eve", "native8"), (OWNER, "native9")])
def test_what_may_not_be_chosen_changes_nothing(
    house: House, owner: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(gr, "Warning", lambda text, **_: told.append(text))
    chat = house.say("Hello").conversation.id
    assert Tab(house, owner).choose(chat, kind) == gr.skip()
    assert len(told) == 1
    assert house.chats.view(OWNER, chat).conversation.cache_kind is None


def test_the_switch_is_the_persons_own(house: House) -> None:
    tab = Tab(house)
    allowed = cast("Any", gr.EventData(None, {"allowed": True}))
    picture: Any = tab.verbs.shrink(tab.request, allowed, "{}")
    assert json.loads(picture[tab.parts.kinds])["shrink"] is True
    assert house.store.may_shrink_caches(OWNER)
    assert not house.store.may_shrink_caches("eve")

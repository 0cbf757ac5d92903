"""The panel of caches in words, and for whom."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import gradio as gr
import pytest

from chat.cache_tree import CacheBranch, CacheNode, CacheTree, ChatCaches
from tests.chat.passes import llama
from tests.house import OWNER, House
from tests.ui.own_loop import run
from ui.cache_panel import NodeRow, Panel, cache_panel
from ui.drawing import Drawing
from ui.handlers import Handlers
from ui.layout import lay_out
from ui.screen import Parts

MB = 2**20


def node(**fields: Any) -> CacheNode:
    usual: dict[str, Any] = {
        "text": "Hello there",
        "start": 40,
        "num_tokens": 1200,
        "num_live_tokens": 0,
        "nbytes": 0,
        "was_evicted": False,
        "num_chats": 1,
        "other_setting": False,
    }
    return CacheNode(**{**usual, **fields})


def panel_of(*nodes: CacheNode, num_hidden: int = 0, max_disk_bytes: int | None = 20 * 2**30) -> Panel:
    parts = (nodes[:1], nodes[1:]) if nodes[1:] else (nodes,)
    branches = tuple(CacheBranch(depth, part) for depth, part in enumerate(parts))
    chat = ChatCaches("c1", "Trip", 1240, 12 * MB, 1, 3 * MB, branches, num_hidden)
    return cache_panel(CacheTree((chat,), num_hidden, 312 * MB, max_disk_bytes, 41 * MB, 2**30))


def row_of(**fields: Any) -> NodeRow:
    return panel_of(node(**fields))["chats"][0]["branches"][0]["nodes"][0]


def test_totals_and_chats_are_told_in_one_line_each() -> None:
    panel = panel_of(node())
    assert panel["summary"] == "312 MB of 20 GB on disk, 41 MB in memory"
    assert (panel["more"], panel["note"], panel["chats"][0]["more"]) == ("", "", "")
    assert panel["chats"][0]["title"] == "Trip"
    assert panel["chats"][0]["line"] == "1,240 tokens on disk (12 MB), 1 token in memory (3 MB)"
    assert panel_of(node(), max_disk_bytes=None)["summary"] == "Nothing is saved on disk, 41 MB in memory"


def test_what_is_left_out_is_told() -> None:
    assert (panel_of(node(), num_hidden=1)["more"], panel_of(node(), num_hidden=2)["more"]) == (
        "and 1 more chat",
        "and 2 more chats",
    )
    assert panel_of(node(), num_hidden=1200)["chats"][0]["more"] == "and 1,200 more parts"


def test_without_any_cache_there_is_a_sentence() -> None:
    panel = cache_panel(CacheTree((), 0, 0, 20 * 2**30, 0, 2**30))
    assert panel["chats"] == []
    assert panel["note"].endswith("will appear here.")


@pytest.mark.parametrize(
    ("fields", "states"),
    [
        ({"num_live_tokens": 1200, "nbytes": MB}, ["in memory", "on disk"]),
        ({"num_live_tokens": 3, "nbytes": MB}, ["partly in memory", "on disk"]),
        ({"num_live_tokens": 1200}, ["in memory"]),
        ({"nbytes": MB}, ["on disk"]),
        ({"was_evicted": True}, ["evicted"]),
        ({"was_evicted": True, "num_live_tokens": 1200}, ["in memory", "evicted"]),
    ],
)
def test_a_node_says_where_it_is(fields: dict[str, Any], states: list[str]) -> None:
    assert row_of(**fields)["states"] == states


def test_a_node_says_what_it_holds_and_what_is_special_about_it() -> None:
    plain = row_of(nbytes=12 * MB)
    assert (plain["text"], plain["size"], plain["notes"]) == ("Hello there", "1,200 tokens, 12 MB", [])
    special = row_of(text="", other_setting=True, num_chats=3)
    assert (special["text"], special["size"]) == ("Tokens 40 to 1,240", "1,200 tokens")
    assert special["notes"] == ["other model or setting", "shared by 3 chats"]


def test_a_branch_says_where_it_forks() -> None:
    first, second = panel_of(node(start=0), node(start=1200))["chats"][0]["branches"]
    assert (first["depth"], first["label"]) == (0, "")
    assert (second["depth"], second["label"]) == (1, "Another branch, from token 1,200 on")


# Over real chats


@pytest.fixture
def house(tmp_path: Path) -> Generator[House]:
    with House(tmp_path, llama(), max_disk_bytes=10**9) as house:
        yield house


async def _parts() -> Parts:
    with gr.Blocks(analytics_enabled=False):
        return lay_out("")


def test_a_page_is_given_the_caches_of_whom_is_signed_in(house: House) -> None:
    parts = run(_parts())
    handlers = Handlers(house.chats, parts, Drawing(house.chats, parts, ""))
    house.say("Mine alone")

    def panel(owner: str) -> Panel:
        request = gr.Request(username=owner, session_hash="tab")
        picture = cast("dict[Any, str]", handlers.caches(request))
        return json.loads(picture[parts.caches])

    assert [chat["title"] for chat in panel(OWNER)["chats"]] == ["Mine alone"]
    assert panel("ben")["chats"] == []
    assert panel("ben")["summary"].startswith("0 bytes of ")

"""What handlers say of a painted part reaches the page as text that says the same."""

from __future__ import annotations

import json

import gradio as gr
import pytest
from gradio.utils import diff
from hypothesis import given
from hypothesis import strategies as st

from tests.ui.own_loop import run
from ui.painted import painted, sealed
from ui.shown import Shown

DATA = st.dictionaries(
    st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists)
)


async def _parts() -> tuple[gr.HTML, gr.Textbox]:
    with gr.Blocks(analytics_enabled=False):
        return painted("part", "<p></p>", ""), gr.Textbox("")


PART, BOX = run(_parts())


@given(DATA)
def test_a_painted_parts_data_travels_as_text_without_a_tag(data: dict[str, object]) -> None:
    picture = sealed({PART: data, BOX: "<b>"})
    assert isinstance(picture, dict)
    assert picture[BOX] == "<b>"
    assert json.loads(picture[PART]) == data
    assert "<" not in picture[PART]
    assert sealed(picture) == picture


def test_the_picture_in_which_nothing_changes_stays_what_it_is() -> None:
    assert sealed(gr.skip()) == gr.skip()


@pytest.mark.parametrize("last", ['{"writing":false}', [{"role": "user"}]], ids=["text", "the chat's rows"])
def test_gradio_ends_an_event_without_touching_what_it_said_last(last: object) -> None:
    """A canary. Of a dict it would take away the keys, also in a picture that nobody has looked at yet."""
    nothing_new = gr.skip()
    assert diff(last, nothing_new) == [["replace", [], nothing_new]]
    assert diff({"writing": False}, nothing_new)[0] == ["delete", ["writing"], None]


def test_what_a_browser_sends_is_read_or_counts_as_not_shown() -> None:
    shown = Shown("c1", ("m1", "m2"), 80, writing=True)
    sent = {"conversation": "c1", "rows": ["m1", "m2"], "limit": 80, "writing": True}
    assert Shown.from_browser(json.dumps(sent)) == shown
    for broken in (None, 7, sent, "", "{", "[1]", '{"conversation": 3, "rows": {}, "limit": "x"}'):
        assert Shown.from_browser(broken) == Shown()

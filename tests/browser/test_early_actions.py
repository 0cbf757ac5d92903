"""What somebody does before the page knows which chat it shows is done afterwards, in that chat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import expect

from tests.browser.chat_page import ChatPage
from tests.browser.gate import JOIN, Gate


@contextmanager
def late_first_answer(tab: ChatPage) -> Iterator[None]:
    """Holds back the page's first question to the server, which asks what to show, until the block ends.
    Nothing else may be asked before."""
    gate = Gate(tab.page)
    with tab.page.expect_request(JOIN):
        tab.page.reload()
    yield
    tab.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    assert gate.num_held == 1, "an action went to the server before the page was open"
    gate.open()


def test_a_message_sent_at_once_goes_to_the_chat_of_the_address(tab: ChatPage) -> None:
    tab.ask("Name a herb.")
    chat = tab.chat_id
    with late_first_answer(tab):
        tab.box.fill("And another?")
        tab.box.press("Enter")
    expect(tab.questions).to_have_text(["Name a herb.", "And another?"])
    expect(tab.box).to_have_value("")
    tab.wait_for_reply()
    assert tab.chat_id == chat


def test_a_new_chat_asked_for_at_once_is_what_is_shown_in_the_end(tab: ChatPage) -> None:
    tab.ask("Name a fish.")
    with late_first_answer(tab):
        tab.page.locator("#new-chat").click()
    expect(tab.titles.first).to_have_text("Name a fish.")
    expect(tab.rows).to_have_count(0)
    assert tab.chat_id is None

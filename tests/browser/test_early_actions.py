"""What somebody does before the page knows which chat it shows is done afterwards, in that chat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Route, expect

from tests.browser.chat_page import ChatPage


@contextmanager
def late_first_answer(tab: ChatPage) -> Iterator[None]:
    """Holds back the page's first question to the server, which asks what to show, until the block ends.
    Nothing else may be asked before."""
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    with tab.page.expect_request("**/queue/join*"):
        tab.page.route("**/queue/join*", hold)
        tab.page.reload()
    yield
    tab.page.evaluate("() => new Promise((done) => setTimeout(done, 100))")
    assert len(held) == 1, "an action went to the server before the page was open"
    tab.page.unroute("**/queue/join*")
    held[0].continue_()


def test_a_message_sent_at_once_is_not_wiped_away_by_the_opening_of_the_page(tab: ChatPage) -> None:
    with late_first_answer(tab):
        tab.box.fill("Name a spice.")
        tab.box.press("Enter")
    expect(tab.questions).to_have_text(["Name a spice."])
    tab.wait_for_reply()
    expect(tab.box).to_have_value("")
    assert tab.chat_id is not None
    expect(tab.titles.first).to_have_text("Name a spice.")


def test_a_message_sent_at_once_goes_to_the_chat_of_the_address(tab: ChatPage) -> None:
    tab.ask("Name a herb.")
    chat = tab.chat_id
    with late_first_answer(tab):
        tab.box.fill("And another?")
        tab.send_button.click()
    expect(tab.questions).to_have_text(["Name a herb.", "And another?"])
    tab.wait_for_reply()
    assert tab.chat_id == chat


def test_a_new_chat_asked_for_at_once_is_what_is_shown_in_the_end(tab: ChatPage) -> None:
    tab.ask("Name a fish.")
    with late_first_answer(tab):
        tab.page.locator("#new-chat").click()
    expect(tab.titles.first).to_have_text("Name a fish.")
    expect(tab.rows).to_have_count(0)
    assert tab.chat_id is None

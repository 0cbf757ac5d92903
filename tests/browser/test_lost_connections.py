"""What the server said and the tab did not hear: the page finds its reply again, by itself."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.chat_page import ChatPage
from tests.browser.conftest import FEW_TOKENS
from tests.browser.gate import Gate, answer_once, nth_join, num_ended_streams, wait_for_the_end_of_a_stream
from tests.browser.profiles import Profiles

CLOSED = 'data: {"msg": "close_stream"}\n\n'
"""The server took its leave, and what it had to say about the reply went nowhere."""

SILENCE_MS = 5_000
"""A second more than the page bears."""


@pytest.fixture
def deaf_tab(profiles: Profiles, request: pytest.FixtureRequest) -> ChatPage:
    """A tab that sent a message and was then told `request.param` instead of anything about its reply, which
    is stored by now. The page's clock is ours."""
    tab = profiles.with_replies_of(FEW_TOKENS).tab()
    tab.page.clock.install()
    tab.open()
    gate = Gate(tab.page, passing=1)
    with tab.page.expect_request(nth_join(2)):
        tab.send("Name a sea.")
    answer_once(tab.page, request.param)
    with tab.page.expect_request("**/queue/data*"):
        gate.open()
    seen = tab.another().open(tab.chat_id)
    seen.wait_for_reply()
    expect(seen.stats).to_have_count(1)
    tab.wait_for_status("running")
    tab.mark()
    return tab


@pytest.mark.parametrize("deaf_tab", [CLOSED], indirect=True)
def test_a_tab_that_hears_nothing_of_its_reply_asks_again(deaf_tab: ChatPage) -> None:
    deaf_tab.page.clock.fast_forward(SILENCE_MS)
    deaf_tab.wait_for_reply()
    expect(deaf_tab.stats).to_have_count(1)
    assert deaf_tab.is_marked(), "the page was loaded again"


@pytest.mark.parametrize("deaf_tab", [""], indirect=True, ids=["no word"])
def test_a_tab_whose_asking_does_not_help_loads_itself_again(deaf_tab: ChatPage) -> None:
    """Gradio takes a stream that ended without a word for open, and waits there for ever."""
    deaf_tab.box.fill("And a lake?")
    for _ in range(4):
        deaf_tab.page.clock.fast_forward(SILENCE_MS)
    deaf_tab.wait_until_loaded_again()
    deaf_tab.wait_for_reply()
    expect(deaf_tab.stats).to_have_count(1)
    expect(deaf_tab.box).to_have_value("And a lake?")


def test_what_is_said_before_the_page_expects_it_is_not_lost(slow_tab: ChatPage) -> None:
    """Everything about the reply is there before the page hears that its question was received. A page that
    takes itself for hidden does not ask again by itself."""
    slow_tab.page.evaluate("() => Object.defineProperty(document, 'hidden', { get: () => true })")
    slow_tab.send("Write a very long story about a river.")
    slow_tab.wait_for_words()
    gate = Gate(slow_tab.page, passing=1, late_answers=True)
    num_before = num_ended_streams(slow_tab.page)
    with slow_tab.page.expect_request(nth_join(2)):
        slow_tab.box.press("Enter")  # sends nothing, and then looks after the reply again
    other = slow_tab.another().open(slow_tab.chat_id)
    other.stop_button.click()
    other.wait_for_status("stopped")
    wait_for_the_end_of_a_stream(slow_tab.page, num_before)
    assert gate.num_held == 1
    slow_tab.wait_for_status("running")
    gate.open()
    slow_tab.wait_for_status("stopped")
    expect(slow_tab.send_button).to_be_visible()
    assert slow_tab.words.inner_text() == other.words.inner_text()


def test_after_a_time_without_network_the_reply_is_followed_again(
    slow_tab: ChatPage, profiles: Profiles
) -> None:
    profiles.server_goes_away()
    slow_tab.send("Write a very long story about a mountain.")
    seen = slow_tab.wait_for_words()
    slow_tab.box.fill("And a valley?")
    slow_tab.mark()
    slow_tab.page.context.set_offline(True)
    expect(slow_tab.toast).to_contain_text("Connection to the server was lost")
    slow_tab.page.context.set_offline(False)
    slow_tab.wait_until_loaded_again()
    expect(slow_tab.box).to_have_value("And a valley?")
    assert slow_tab.wait_for_words().startswith(seen)
    slow_tab.stop_button.click()
    slow_tab.wait_for_status("stopped")

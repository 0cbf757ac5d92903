"""Reloads, closed tabs and restarts, in the middle of a reply and between two."""

from __future__ import annotations

import re

from playwright.sync_api import Route, expect

from tests.browser.chat_page import ChatPage
from tests.browser.profiles import Profiles
from tests.browser.running_app import RunningApp

A_LONG_STORY = "Write a very long story about a lighthouse keeper and her dog."
ENDED_BY_ITSELF = "Stopped at the limit of new tokens"
SOME_TOKENS = 160
"""Enough to be in the middle of a reply after a reload, and soon over."""


def test_a_reload_in_mid_reply_follows_it_to_its_end(profiles: Profiles) -> None:
    tab = profiles.with_replies_of(SOME_TOKENS).tab().open()
    tab.send(A_LONG_STORY)
    chat, seen = tab.chat_id, tab.wait_for_words()
    tab.reload()
    assert tab.chat_id == chat
    tab.wait_for_status("running")
    assert tab.wait_for_words().startswith(seen)
    expect(tab.stop_button).to_be_visible()

    tab.wait_for_reply()
    expect(tab.notes).to_have_text(ENDED_BY_ITSELF)
    followed = tab.words.inner_text()
    tab.reload()
    expect(tab.notes).to_have_text(ENDED_BY_ITSELF)
    assert tab.words.inner_text() == followed


def test_a_reply_is_written_to_its_end_although_the_tab_was_closed(tab: ChatPage, profiles: Profiles) -> None:
    tab.send("Tell me about the moon.")
    chat = tab.chat_id
    tab.page.close()
    another = profiles.new().tab().open(chat)
    expect(another.questions).to_have_text(["Tell me about the moon."])
    another.wait_for_reply()
    expect(another.notes).to_have_text(ENDED_BY_ITSELF)


def test_a_reply_that_ends_before_anybody_watches_it_is_shown_at_its_end(tab: ChatPage) -> None:
    requests: list[Route] = []

    def hold_all_but_the_first(route: Route) -> None:
        requests.append(route)
        if len(requests) == 1:
            route.continue_()

    tab.page.route("**/queue/join*", hold_all_but_the_first)
    tab.send("Tell me about the sun.")
    another = ChatPage(tab.page.context.new_page(), tab.address).open(tab.chat_id)
    another.wait_for_reply()
    tab.wait_for_status("running")
    tab.page.unroute("**/queue/join*")
    requests[1].continue_()
    tab.wait_for_reply()
    expect(tab.stats).to_have_count(1)
    assert tab.words.inner_text() == another.words.inner_text()


def test_after_a_restart_an_open_tab_goes_on_with_its_chat(
    tab: ChatPage, app: RunningApp, profiles: Profiles
) -> None:
    tab.ask("Name a city.")
    chat, answered = tab.chat_id, tab.words.inner_text()
    _let_the_server_go(tab, profiles)
    app.stop()
    tab.box.fill("And a country?")
    tab.box.press("Enter")
    app.start()
    _wait_for_the_reload(tab)

    assert tab.chat_id == chat
    expect(tab.questions).to_have_text(["Name a city."])
    assert tab.words.inner_text() == answered
    expect(tab.box).to_have_value("And a country?")
    tab.ask("And a country?")
    expect(tab.questions).to_have_text(["Name a city.", "And a country?"])
    expect(tab.stats.last).to_have_text(re.compile(r"^\d+ tokens remembered \(\d+ from disk\)"))


def test_after_a_kill_in_mid_reply_nothing_is_lost_and_the_chat_goes_on(
    slow_tab: ChatPage, app: RunningApp, profiles: Profiles
) -> None:
    titles = slow_tab.titles.all_inner_texts()
    slow_tab.send(A_LONG_STORY)
    chat, seen = slow_tab.chat_id, slow_tab.wait_for_words()
    _let_the_server_go(slow_tab, profiles)
    app.kill()
    app.start()
    _wait_for_the_reload(slow_tab)

    slow_tab.wait_for_status("stopped")
    expect(slow_tab.notes).to_have_text("Stopped")
    assert slow_tab.words.inner_text().startswith(seen)
    expect(slow_tab.titles).to_have_text([re.compile("^Write a very long story"), *titles])

    tab = profiles.with_replies_of(8).tab().open(chat)
    tab.ask("What is the dog called?")
    expect(tab.questions).to_have_text([A_LONG_STORY, "What is the dog called?"])
    expect(tab.stats).to_have_count(1)


def _let_the_server_go(tab: ChatPage, profiles: Profiles) -> None:
    """From here on the browser may complain that the server is away. Marks the page that stands there now."""
    profiles.server_goes_away()
    tab.page.evaluate("() => { window.stoodBefore = true; }")


def _wait_for_the_reload(tab: ChatPage) -> None:
    """The page loads itself again when the server is back."""
    tab.page.wait_for_function("() => !window.stoodBefore")
    tab.wait_until_open()

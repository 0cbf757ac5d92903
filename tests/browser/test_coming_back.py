"""Reloads, closed tabs and restarts, in the middle of a reply and between two."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.browser.chat_page import ChatPage
from tests.browser.conftest import FEW_TOKENS
from tests.browser.gate import Gate
from tests.browser.profiles import Profiles
from tests.browser.running_app import RunningApp

A_LONG_STORY = "Write a very long story about a lighthouse keeper and her dog."
ENDED_BY_ITSELF = "Stopped at the limit of new tokens"


def test_a_reload_in_mid_reply_follows_it_on(slow_tab: ChatPage) -> None:
    slow_tab.send(A_LONG_STORY)
    chat, seen = slow_tab.chat_id, slow_tab.wait_for_words()
    slow_tab.reload()
    assert slow_tab.chat_id == chat
    slow_tab.wait_for_status("running")
    after_reload = slow_tab.wait_for_words()
    assert after_reload.startswith(seen)
    expect(slow_tab.words).not_to_have_text(after_reload)
    slow_tab.stop_button.click()
    slow_tab.wait_for_status("stopped")
    followed = slow_tab.words.inner_text()
    assert followed.startswith(after_reload)
    slow_tab.reload()
    expect(slow_tab.notes).to_have_text("Stopped")
    assert slow_tab.words.inner_text() == followed


def test_a_reply_is_written_to_its_end_although_the_tab_was_closed(tab: ChatPage, profiles: Profiles) -> None:
    tab.send("Tell me about the moon.")
    chat = tab.chat_id
    tab.page.close()
    another = profiles.new().tab().open(chat)
    expect(another.questions).to_have_text(["Tell me about the moon."])
    another.wait_for_reply()
    expect(another.notes).to_have_text(ENDED_BY_ITSELF)


def test_a_reply_that_ends_before_anybody_watches_it_is_shown_at_its_end(tab: ChatPage) -> None:
    gate = Gate(tab.page, passing=1)
    tab.send("Tell me about the sun.")
    another = tab.another().open(tab.chat_id)
    another.wait_for_reply()
    tab.wait_for_status("running")
    assert gate.num_held == 1
    gate.open()
    tab.wait_for_reply()
    expect(tab.stats).to_have_count(1)
    assert tab.words.inner_text() == another.words.inner_text()


def test_after_a_restart_an_open_tab_goes_on_with_its_chat(
    tab: ChatPage, app: RunningApp, profiles: Profiles
) -> None:
    tab.ask("Name a city.")
    chat, answered, titles = tab.chat_id, tab.words.inner_text(), tab.titles.all_inner_texts()
    profiles.server_goes_away()
    tab.mark()
    app.stop()
    tab.box.fill("And a country?")
    tab.box.press("Enter")
    app.start()
    tab.wait_until_loaded_again()

    assert tab.chat_id == chat
    expect(tab.questions).to_have_text(["Name a city."])
    assert tab.words.inner_text() == answered
    expect(tab.titles).to_have_text(titles)
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
    profiles.server_goes_away()
    slow_tab.mark()
    with slow_tab.page.expect_event("requestfailed", lambda request: request.method == "HEAD"):
        app.kill()
    assert slow_tab.is_marked(), "the chat stays until there is a server to load it from"
    app.start()
    slow_tab.wait_until_loaded_again()

    slow_tab.wait_for_status("stopped")
    expect(slow_tab.notes).to_have_text("Stopped")
    assert slow_tab.words.inner_text().startswith(seen)
    expect(slow_tab.titles).to_have_text([re.compile("^Write a very long story"), *titles])

    tab = profiles.with_replies_of(FEW_TOKENS).tab().open(chat)
    tab.ask("What is the dog called?")
    expect(tab.questions).to_have_text([A_LONG_STORY, "What is the dog called?"])
    expect(tab.stats).to_have_count(1)

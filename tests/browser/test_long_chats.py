"""Long messages and long chats: told before, shown while they are read, and never in the way."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.browser.chat_page import ChatPage
from tests.browser.seeding import LONG_TITLE, LONG_TURNS

TOO_LONG = "word " * 9_000
"""More tokens than the default model's context of 8,192."""

A_REPORT = "The harbour was calm that day, and nobody came. " * 350


def test_a_paste_longer_than_the_context_is_refused_and_stays_in_the_box(tab: ChatPage) -> None:
    tab.box.fill(TOO_LONG)
    tab.box.press("Enter")
    expect(tab.toast).to_contain_text(re.compile(r"\d+,\d+ .*8,192"))
    expect(tab.box).to_have_value(TOO_LONG)
    expect(tab.rows).to_have_count(0)
    tab.ask("Say yes.")
    expect(tab.questions).to_have_text(["Say yes."])


def test_a_long_paste_shows_how_far_it_is_read_and_can_be_stopped(tab: ChatPage) -> None:
    tab.send(A_REPORT)
    bar = tab.page.get_by_role("progressbar", name="Reading")
    expect(bar).to_be_visible()
    expect(tab.waiting).to_contain_text(re.compile(r"Reading [\d,]+ of 3,\d+ tokens"))
    tab.stop_button.click()
    tab.wait_for_status("stopped")
    expect(bar).to_have_count(0)
    expect(tab.notes).to_have_text("Stopped")
    tab.new_chat()
    tab.ask("Say yes.")


def test_a_chat_of_240_messages_opens_at_its_end_and_shows_more_on_demand(tab: ChatPage) -> None:
    tab.open_entry(LONG_TITLE)
    expect(tab.rows).to_have_count(40)
    expect(tab.questions.last).to_have_text(f"Question {LONG_TURNS}")
    expect(tab.questions.last).to_be_in_viewport()
    tab.chat.locator(".kw-earlier").click()
    expect(tab.rows).to_have_count(80)
    expect(tab.questions.first).to_have_text(f"Question {LONG_TURNS - 39}")

    tab.send("Which number is next?")
    expect(tab.questions.last).to_be_in_viewport()
    tab.stop_button.click()
    tab.wait_for_status("stopped")
    expect(tab.questions.last).to_have_text("Which number is next?")
    expect(tab.questions.first).to_have_text(f"Question {LONG_TURNS - 38}")

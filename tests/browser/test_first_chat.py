"""The main job: type, read along, ask on."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.browser.chat_page import ChatPage

A_LONG_STORY = "Write a very long story about a lighthouse keeper and her dog."

STATS_LINE = re.compile(
    r"^(\d+ tokens remembered( \(\d+ from disk\))?, )?"
    r"\d+ (tokens )?read, first word in [\d.]+ s · [\d.]+ tok/s$"
)
"""A first message may find the template's own beginning in another chat's cache."""


def test_a_first_message_is_answered_and_the_follow_up_remembers_it(tab: ChatPage) -> None:
    tab.send("Which colour has the sky?")
    assert tab.chat_id is not None
    tab.wait_for_words()
    tab.wait_for_reply()
    expect(tab.stats).to_have_text(STATS_LINE)
    expect(tab.page).to_have_title("Which colour has the sky? · Keepwarm")

    tab.ask("And at night?")
    expect(tab.questions).to_have_text(["Which colour has the sky?", "And at night?"])
    expect(tab.stats.last).to_have_text(re.compile(r"^\d+ tokens remembered, \d+ read, first word in"))


def test_stop_keeps_what_was_written_and_says_so(slow_tab: ChatPage) -> None:
    slow_tab.send(A_LONG_STORY)
    seen = slow_tab.wait_for_words()
    slow_tab.stop_button.click()
    slow_tab.wait_for_status("stopped")
    expect(slow_tab.notes).to_have_text("Stopped")
    expect(slow_tab.send_button).to_be_visible()
    kept = slow_tab.words.inner_text()
    assert kept.startswith(seen)

    slow_tab.reload()
    expect(slow_tab.notes).to_have_text("Stopped")
    assert slow_tab.words.inner_text() == kept


def test_escape_stops_a_reply(slow_tab: ChatPage) -> None:
    slow_tab.send(A_LONG_STORY)
    slow_tab.wait_for_words()
    slow_tab.page.keyboard.press("Escape")
    slow_tab.wait_for_status("stopped")
    assert slow_tab.words.inner_text().strip()


def test_nothing_is_sent_without_a_visible_character(tab: ChatPage) -> None:
    for nothing in ("", "   ", "\n\n", "\u200b"):
        tab.box.fill(nothing)
        tab.box.press("Enter")
    tab.ask("Say yes.")
    expect(tab.questions).to_have_text(["Say yes."])
    expect(tab.toast).to_have_count(0)


def test_regenerate_adds_a_version_and_keeps_the_first(tab: ChatPage) -> None:
    tab.ask("Name a fruit.")
    first = tab.words.inner_text()
    tab.last_button("Regenerate").click()
    expect(tab.versions).to_contain_text("2/2")
    tab.wait_for_reply()
    expect(tab.stats.last).to_have_text(re.compile(r"^\d+ tokens remembered, 1 read"))
    tab.last_button("Previous version").click()
    expect(tab.versions).to_contain_text("1/2")
    assert tab.words.inner_text() == first


def test_an_edited_question_gets_a_branch_that_the_keyboard_can_switch(tab: ChatPage) -> None:
    tab.ask("Name a bird.")
    old = tab.words.inner_text()
    question = tab.rows.first
    tab.tool(question, "Edit").click()
    tab.last_button("Send").click()
    expect(tab.editor).to_have_count(0)
    expect(tab.words).to_have_text(old)
    expect(tab.versions).to_have_count(0)  # what was not changed has no version of its own
    tab.tool(question, "Edit").click()
    expect(tab.editor).to_have_value("Name a bird.")
    tab.editor.fill("Name a river.")
    tab.last_button("Send").click()
    expect(tab.questions).to_have_text(["Name a river."])
    tab.wait_for_reply()
    new = tab.words.inner_text()
    expect(tab.versions).to_contain_text("2/2")

    tab.press_button("Previous version")
    expect(tab.questions).to_have_text(["Name a bird."])
    expect(tab.words).to_have_text(old)
    tab.press_button("Next version", "Space")
    expect(tab.questions).to_have_text(["Name a river."])
    expect(tab.words).to_have_text(new)

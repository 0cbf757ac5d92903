"""What can be done with a message and with a chat, by mouse, keyboard and touch."""

from __future__ import annotations

import re

from playwright.sync_api import Locator, expect

from tests.browser.chat_page import ChatPage
from tests.browser.conftest import FEW_TOKENS
from tests.browser.profiles import Profiles
from tests.browser.seeding import COSTLY_TITLE
from tests.browser.test_first_chat import A_LONG_STORY
from ui.live import ELSEWHERE

KEEP = "Save and keep what follows"
END_HERE = "Save as a branch that ends here"
BLUE = "**Blue**.\n\n    Navy, to be <b>exact</b>."
TOO_LONG = "word " * 9_000
"""More tokens than the default model's context of 8,192."""

ONLY_THE_NEW = re.compile(r"^\d+ tokens remembered( \(\d+ from disk\))?, 1?\d read")
"""A short message, and what the template puts around it."""


def test_regenerating_the_first_reply_leaves_the_rest_on_its_own_branch(tab: ChatPage) -> None:
    tab.ask("Name a fruit.")
    tab.ask("Another one?")
    tab.tool(tab.replies.first, "Regenerate").click()
    expect(tab.questions).to_have_count(1)
    expect(tab.versions).to_contain_text("2/2")
    tab.wait_for_reply()
    expect(tab.stats).to_have_text(re.compile(r"^\d+ tokens remembered, 1 read"))
    tab.last_button("Previous version").click()
    expect(tab.questions).to_have_text(["Name a fruit.", "Another one?"])

    tab.tool(tab.replies.first, "Regenerate").press("Enter")
    expect(tab.versions).to_contain_text("3/3")
    tab.wait_for_reply()
    expect(tab.last_button("Regenerate")).to_be_focused()
    expect(tab.question_whether).to_have_count(0)


def test_a_cut_reply_is_continued_and_a_new_one_begins_as_told(tab: ChatPage) -> None:
    tab.ask(A_LONG_STORY)
    cut = tab.words.inner_text()
    expect(tab.notes).to_have_text("Stopped at the limit of new tokens")
    tab.last_button("Continue").click()
    expect(tab.versions).to_contain_text("2/2")
    tab.wait_for_reply()
    longer = tab.words.inner_text()
    assert longer.startswith(cut)
    assert len(longer) > len(cut)
    expect(tab.stats).to_have_text(re.compile(r"^\d+ tokens remembered, 1 read"))

    tab.press_button("More")
    expect(tab.menu.get_by_role("menuitem").first).to_be_focused()
    tab.page.keyboard.press("ArrowDown")
    expect(tab.menu.get_by_role("menuitem", name="Continue")).to_be_focused()
    tab.page.keyboard.press("Enter")
    expect(tab.versions).to_contain_text("3/3")
    tab.wait_for_reply()
    assert tab.words.inner_text().startswith(longer)

    tab.choose(tab.last_reply, "Regenerate, starting with…")
    field = tab.page.get_by_label("The new reply starts with")
    expect(field).to_be_focused()
    tab.page.keyboard.press("Enter")  # nothing typed yet: nothing to do
    field.fill("Far away, on a rock")
    tab.page.keyboard.press("Enter")
    expect(tab.versions).to_contain_text("4/4")
    tab.wait_for_reply()
    assert tab.words.inner_text().startswith("Far away, on a rock")


def test_an_edited_reply_keeps_what_follows_or_ends_the_chat(tab: ChatPage) -> None:
    """C12."""
    tab.ask("Name a colour.")
    said = tab.words.inner_text()
    tab.ask("Another one?")
    first = tab.replies.first
    tab.tool(first, "Edit").click()
    expect(tab.editor).to_have_value(said)
    tab.editor.fill(BLUE)
    tab.last_button(KEEP).click()
    expect(tab.editor).to_have_count(0)
    expect(tab.notes.first).to_have_text("Edited")
    expect(first.locator("strong")).to_have_text("Blue")
    expect(tab.questions).to_have_text(["Name a colour.", "Another one?"])
    expect(tab.versions).to_contain_text("2/2")
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.tool(first, "Copy").click()
    expect(first.get_by_role("button", name="Copied")).to_be_visible()
    assert tab.page.evaluate("() => navigator.clipboard.readText()") == BLUE

    tab.tool(first, "Edit").press("Enter")
    expect(tab.editor).to_have_value(BLUE)
    expect(tab.editor).to_be_focused()
    tab.page.keyboard.press("Escape")
    expect(tab.editor).to_have_count(0)
    expect(tab.tool(first, "Edit")).to_be_focused()
    tab.page.keyboard.press("Enter")
    tab.editor.fill("Green.")
    tab.press_button(END_HERE)
    expect(tab.questions).to_have_text(["Name a colour."])
    expect(tab.words).to_have_text("Green.")
    expect(tab.versions).to_contain_text("3/3")

    tab.tool(tab.last_reply, "Edit").click()
    expect(tab.editor).to_have_value("Green.")
    expect(tab.last_button("Save")).to_be_visible()
    expect(tab.last_button(END_HERE)).to_have_count(0)
    tab.editor.press("Control+Enter")  # the same text: nothing to do
    expect(tab.editor).to_have_count(0)
    expect(tab.versions).to_contain_text("3/3")


def test_words_of_an_edit_that_were_not_sent_survive_a_reload_and_another_chat(tab: ChatPage) -> None:
    tab.ask("Name a flower.")
    question = tab.rows.first
    tab.tool(question, "Edit").click()
    tab.editor.fill("Name a weed.")
    tab.reload()
    expect(tab.editor).to_have_value("Name a weed.")
    tab.new_chat()
    tab.open_entry("Name a flower.")
    expect(tab.questions).to_have_count(1)
    expect(tab.editor).to_have_count(0)
    tab.tool(question, "Edit").click()
    expect(tab.editor).to_have_value("Name a weed.")
    tab.page.keyboard.press("Escape")
    tab.tool(question, "Edit").click()
    expect(tab.editor).to_have_value("Name a flower.")
    tab.reload()
    expect(tab.questions).to_have_count(1)
    expect(tab.editor).to_have_count(0)


def test_an_edit_that_is_empty_refused_or_given_up_changes_nothing(tab: ChatPage) -> None:
    """C16, C41."""
    tab.ask("Name a tree.")
    said = tab.words.inner_text()
    question = tab.rows.first
    for empty in ("", "  \n "):
        tab.tool(question, "Edit").click()
        tab.editor.fill(empty)
        tab.editor.press("Control+Enter")
        expect(tab.editor).to_have_count(0)
    tab.tool(question, "Edit").click()
    tab.editor.fill(TOO_LONG)
    tab.last_button("Send").click()
    expect(tab.toast).to_contain_text(re.compile(r"\d+,\d+ .*8,192"))
    expect(tab.editor).to_have_value(TOO_LONG)
    tab.last_button("Cancel").click()
    expect(tab.editor).to_have_count(0)
    expect(tab.questions).to_have_text(["Name a tree."])
    expect(tab.words).to_have_text(said)
    expect(tab.versions).to_have_count(0)
    tab.reload()
    expect(tab.questions).to_have_text(["Name a tree."])
    expect(tab.versions).to_have_count(0)


def test_an_edit_while_a_reply_is_written_stops_it_and_keeps_what_there_was(slow_tab: ChatPage) -> None:
    slow_tab.send(A_LONG_STORY)
    seen = slow_tab.wait_for_words()
    reply = slow_tab.last_reply
    slow_tab.tool(reply, "Edit").click()
    expect(slow_tab.editor).to_have_value(re.compile("^" + re.escape(seen)))
    slow_tab.page.keyboard.press("Escape")
    expect(slow_tab.editor).to_have_count(0)
    slow_tab.tool(reply, "More").click()
    seen = slow_tab.wait_for_more_than(seen)
    expect(slow_tab.menu).to_be_visible()
    slow_tab.page.keyboard.press("Escape")
    expect(slow_tab.menu).to_be_hidden()
    expect(slow_tab.stop_button).to_be_visible()  # what was closed is the editor, and the menu
    slow_tab.tool(reply, "Edit").click()
    slow_tab.editor.fill("The end.")
    slow_tab.last_button("Save").click()
    expect(slow_tab.words).to_have_text("The end.")
    expect(slow_tab.stop_button).to_be_hidden()
    slow_tab.last_button("Previous version").click()
    expect(slow_tab.notes).to_have_text("Stopped")
    assert slow_tab.words.inner_text().startswith(seen)

    slow_tab.tool(reply, "Regenerate").click()
    slow_tab.wait_for_words()
    slow_tab.tool(slow_tab.rows.first, "Edit").click()
    slow_tab.editor.fill("Write a very long poem.")
    slow_tab.editor.press("Control+Enter")
    expect(slow_tab.questions).to_have_text(["Write a very long poem."])
    slow_tab.wait_for_words()
    slow_tab.chat.get_by_role("button", name="Previous version").first.click()
    expect(slow_tab.questions).to_have_text([A_LONG_STORY])
    expect(slow_tab.waiting).to_have_text(ELSEWHERE)
    slow_tab.chat.get_by_role("button", name="Next version").first.click()
    expect(slow_tab.questions).to_have_text(["Write a very long poem."])
    slow_tab.wait_for_status("running")
    slow_tab.stop_button.click()
    slow_tab.wait_for_status("stopped")
    slow_tab.chat.get_by_role("button", name="Previous version").first.click()
    expect(slow_tab.questions).to_have_text([A_LONG_STORY])
    expect(slow_tab.versions).to_contain_text(["1/2", "3/3"])
    expect(slow_tab.notes).to_have_text("Stopped")


def test_undo_hands_the_question_back_and_redo_shows_it_again(tab: ChatPage) -> None:
    """C41."""
    undo, redo = (tab.page.get_by_role("button", name=name, exact=True) for name in ("Undo", "Redo"))
    expect(undo).to_be_hidden()
    tab.ask("Name a bird.")
    tab.ask("Name a river.")
    expect(redo).to_be_hidden()
    undo.click()
    expect(tab.questions).to_have_text(["Name a bird."])
    expect(tab.box).to_have_value("Name a river.")
    expect(tab.box).to_be_focused()
    undo.press("Enter")
    expect(tab.rows).to_have_count(0)
    expect(tab.box).to_have_value("Name a bird.")
    expect(undo).to_be_hidden()
    redo.click()
    expect(tab.questions).to_have_text(["Name a bird."])
    expect(tab.box).to_have_value("")

    tab.box.fill("My own words")
    tab.box.press("Control+z")  # a matter of the text in the box
    expect(tab.box).to_have_value("")
    tab.box.fill("My own words")
    tab.chat.click(position={"x": 5, "y": 5})
    tab.page.keyboard.press("Control+Shift+z")
    expect(tab.questions).to_have_text(["Name a bird.", "Name a river."])
    expect(redo).to_be_hidden()
    tab.page.keyboard.press("Control+z")
    expect(tab.questions).to_have_text(["Name a bird."])
    expect(tab.box).to_have_value("My own words")
    tab.reload()
    expect(redo).to_be_visible()


def test_a_branch_is_deleted_only_after_it_was_asked_for_again(tab: ChatPage) -> None:
    tab.ask("Name a fish.")
    tab.ask("Another one?")
    tab.choose(tab.replies.first, "Delete this branch…")
    expect(tab.question_whether).to_have_text("Delete this reply and what follows it for ever?")
    expect(tab.last_button("Keep")).to_be_focused()
    tab.page.keyboard.press("Escape")
    expect(tab.question_whether).to_have_count(0)
    expect(tab.rows).to_have_count(4)

    tab.press_button("More")
    tab.page.keyboard.press("End")
    tab.page.keyboard.press("Enter")
    expect(tab.question_whether).to_have_text("Delete this reply for ever?")
    tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("Enter")
    expect(tab.rows).to_have_count(3)
    expect(tab.notes.last).to_have_text("This message has no reply")
    tab.box.fill("And a third one?")
    tab.box.press("Enter")
    expect(tab.toast).to_contain_text("Write a reply")
    tab.press_button("Write a reply")
    expect(tab.rows).to_have_count(4)
    tab.wait_for_reply()
    expect(tab.versions).to_have_count(0)
    expect(tab.box).to_have_value("And a third one?")
    tab.ask("And a third one?")
    expect(tab.rows).to_have_count(6)

    tab.choose(tab.rows.first, "Delete this branch…")
    tab.last_button("Delete").click()
    expect(tab.rows).to_have_count(0)
    expect(tab.titles.first).to_have_text("New chat")
    tab.reload()
    expect(tab.rows).to_have_count(0)


def test_a_fork_is_a_new_chat_that_reads_only_its_new_message(tab: ChatPage) -> None:
    tab.ask("Name a herb.")
    tab.ask("Another one?")
    chat = tab.chat_id
    tab.choose(tab.replies.first, "Fork here")
    expect(tab.titles.first).to_have_text("Name a herb. (fork)")
    expect(tab.rows).to_have_count(2)
    assert tab.chat_id != chat
    tab.ask("And a spice?")
    expect(tab.stats.last).to_have_text(ONLY_THE_NEW)
    tab.open(chat)
    expect(tab.questions).to_have_text(["Name a herb.", "Another one?"])


def test_what_reads_much_is_told_before(tab: ChatPage) -> None:
    tab.open_entry(COSTLY_TITLE)
    expect(tab.rows).to_have_count(40)
    price = re.compile(r"^This reads 2,\d{3} tokens again(, about \d+ (s|min))?\.$")
    tab.tool(tab.last_reply, "Regenerate").click()
    expect(tab.question_whether).to_have_text(price)
    tab.last_button("Cancel").click()
    expect(tab.question_whether).to_have_count(0)
    expect(tab.versions).to_have_count(0)

    edited = tab.replies.nth(5)
    tab.tool(edited, "Edit").click()
    tab.editor.fill("Something else")
    tab.last_button(KEEP).click()
    expect(tab.question_whether).to_have_text(price)
    expect(tab.last_button("Go on")).to_be_focused()
    tab.last_button("Cancel").click()
    expect(tab.editor).to_have_value("Something else")
    tab.press_button(KEEP)
    expect(tab.last_button("Go on")).to_be_focused()
    tab.page.keyboard.press("Enter")
    expect(edited).to_contain_text("Something else")
    expect(tab.rows).to_have_count(40)

    tab.tool(tab.last_reply, "Regenerate").press("Enter")
    expect(tab.last_button("Go on")).to_be_focused()
    tab.page.keyboard.press("Enter")
    expect(tab.stop_button).to_be_visible()
    tab.stop_button.click()
    tab.wait_for_status("stopped")


def test_on_a_phone_every_verb_is_in_one_menu(profiles: Profiles) -> None:
    kept = profiles.with_replies_of(FEW_TOKENS)
    phone = profiles.new(
        storage_state=kept.kept_for(kept.address),
        viewport={"width": 390, "height": 844},
        has_touch=True,
        is_mobile=True,
    )
    tab = phone.tab().open()
    tab.ask("Name an animal.")
    more = tab.last_button("More")
    assert min(size(more)) >= 44
    expect(tab.last_button("Edit")).to_have_count(0)
    more.tap()
    items = tab.menu.get_by_role("menuitem")
    expect(items.first).to_have_text("Copy")
    expect(items.last).to_be_in_viewport(ratio=1)
    assert min(size(items.last)) >= 44
    items.get_by_text("Edit", exact=True).tap()
    tab.editor.fill("A cat.")
    assert tab.page.evaluate("() => document.documentElement.scrollWidth") <= 390
    tab.last_button("Save").tap()
    expect(tab.words).to_have_text("A cat.")


def size(where: Locator) -> tuple[float, float]:
    box = where.bounding_box()
    assert box is not None
    return box["width"], box["height"]

"""Several chats and several tabs: nothing mixes; the list renames, deletes and finds."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.browser.chat_page import ChatPage

ABOUT_THE_SEA = "Write a very long story about the sea."
ABOUT_BREAD = "What is bread made of?"


def test_switching_while_one_chat_writes_mixes_nothing(slow_tab: ChatPage, tab: ChatPage) -> None:
    tab.ask(ABOUT_BREAD)
    bread = tab.words.inner_text()
    tab.page.close()
    slow_tab.reload()
    slow_tab.send(ABOUT_THE_SEA)
    sea = slow_tab.wait_for_words()
    for _ in range(4):
        slow_tab.open_entry(ABOUT_BREAD)
        expect(slow_tab.questions).to_have_text([ABOUT_BREAD])
        expect(slow_tab.words).to_have_text(bread)
        expect(slow_tab.send_button).to_be_visible()
        expect(slow_tab.entry(ABOUT_THE_SEA)).to_have_class("writing")
        slow_tab.open_entry(ABOUT_THE_SEA)
        expect(slow_tab.questions).to_have_text([ABOUT_THE_SEA])
        assert slow_tab.wait_for_words().startswith(sea)
        expect(slow_tab.stop_button).to_be_visible()
    slow_tab.new_chat()
    expect(slow_tab.send_button).to_be_visible()
    slow_tab.open_entry(ABOUT_THE_SEA)
    slow_tab.stop_button.click()
    slow_tab.wait_for_status("stopped")
    expect(slow_tab.entry(ABOUT_THE_SEA)).not_to_have_class("writing")


def test_who_waits_sees_how_many_replies_are_ahead_and_each_gets_the_own_one(
    slow_tab: ChatPage, tab: ChatPage
) -> None:
    slow_tab.send(ABOUT_THE_SEA)
    slow_tab.wait_for_words()
    tab.send("Name a colour of the rainbow.")
    expect(tab.waiting).to_have_text("1 reply ahead of yours")
    last = tab.another().open()
    last.send("Name a planet.")
    expect(last.waiting).to_have_text("2 replies ahead of yours")
    slow_tab.stop_button.click()
    tab.wait_for_reply()
    last.wait_for_reply()
    assert len({slow_tab.chat_id, tab.chat_id, last.chat_id}) == 3
    expect(slow_tab.questions).to_have_text([ABOUT_THE_SEA])
    expect(tab.questions).to_have_text(["Name a colour of the rainbow."])
    expect(last.questions).to_have_text(["Name a planet."])
    assert len({slow_tab.words.inner_text(), tab.words.inner_text(), last.words.inner_text()}) == 3


def test_a_tab_that_fell_behind_keeps_its_text_and_shows_what_is_new(tab: ChatPage) -> None:
    tab.ask("Name a metal.")
    other = tab.another().open(tab.chat_id)
    other.ask("And a wood?")
    tab.box.fill("And a stone?")
    tab.box.press("Enter")
    expect(tab.toast).to_contain_text("moved on in another window")
    expect(tab.questions).to_have_text(["Name a metal.", "And a wood?"])
    expect(tab.box).to_have_value("And a stone?")
    tab.ask("And a stone?")
    expect(tab.questions).to_have_text(["Name a metal.", "And a wood?", "And a stone?"])


def test_a_chat_can_be_renamed_found_and_deleted(tab: ChatPage) -> None:
    tab.ask("Name a flower.")
    chat = tab.chat_id
    entry = tab.entry("Name a flower.")
    entry.hover()
    entry.get_by_role("button", name="Rename “Name a flower.”").click()
    tab.page.get_by_label("New title").fill("Gardening")
    tab.page.keyboard.press("Enter")
    expect(tab.entry("Gardening")).to_have_count(1)
    expect(tab.page).to_have_title("Gardening · Keepwarm")

    search = tab.page.locator("#search").get_by_role("textbox")
    search.fill("NAME A FLOWER")
    expect(tab.titles).to_have_text(["Gardening"])
    search.fill("no chat has this in it")
    expect(tab.listing).to_contain_text("Nothing matches this search.")
    search.fill("")
    expect(tab.entry("The long one")).to_have_count(1)

    tab.entry("Gardening").hover()
    tab.page.get_by_role("button", name="Delete “Gardening”").click()
    tab.page.get_by_role("button", name="Keep", exact=True).click()
    expect(tab.entry("Gardening")).to_have_count(1)
    tab.entry("Gardening").hover()
    tab.page.get_by_role("button", name="Delete “Gardening”").click()
    tab.page.locator(".kw-confirm .kw-delete").click()
    expect(tab.entry("Gardening")).to_have_count(0)
    expect(tab.rows).to_have_count(0)
    assert tab.chat_id is None
    tab.open(chat)
    expect(tab.toast).to_contain_text("There is no such chat")
    expect(tab.rows).to_have_count(0)


def test_a_saved_system_prompt_is_followed_and_kept(tab: ChatPage) -> None:
    page = tab.page
    page.get_by_role("button", name="Settings", exact=True).click()
    prompt = page.locator("#system-prompt textarea")
    prompt.fill("Your name is Ahoy.")
    page.locator("#save-system-prompt").click()
    expect(tab.toast).to_contain_text("The system prompt is saved")
    page.get_by_role("button", name="Close settings").click()
    tab.ask("What is your name?")
    expect(tab.words).to_contain_text("Ahoy")
    tab.reload()
    expect(prompt).to_have_value("Your name is Ahoy.")
    tab.new_chat()
    expect(prompt).to_have_value("")

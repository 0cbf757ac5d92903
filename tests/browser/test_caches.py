"""The caches in the drawer, and the notice where they cannot be saved."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, Locator, expect

from tests.browser.chat_page import ChatPage
from tests.browser.running_app import RunningApp

QUESTION = "What are <b>bricks</b> made of, ${7 * 7}?"


def caches_of(tab: ChatPage, title: str) -> Locator:
    """The part of the drawer about one chat."""
    return tab.page.locator("#caches details").filter(has_text=title)


def test_the_drawer_shows_what_is_kept_of_a_chat_and_follows_its_replies(tab: ChatPage) -> None:
    page = tab.page
    tab.ask(QUESTION)
    expect(page.locator("#caches details")).to_have_count(0)
    page.get_by_role("button", name="Settings", exact=True).click()
    chat = caches_of(tab, QUESTION)
    nodes = chat.locator("li")
    expect(page.locator("#caches")).to_contain_text("20 GB on disk")
    expect(chat).to_have_attribute("open", "")
    expect(nodes.filter(has_text="in memory").filter(has_text="on disk")).not_to_have_count(0)
    num_nodes = nodes.count()

    summary = chat.locator("summary")
    summary.press("Enter")
    expect(nodes.first).to_be_hidden()
    summary.press("Enter")
    expect(nodes.first).to_be_visible()

    tab.ask("And tiles?")
    expect(nodes.nth(num_nodes)).to_be_visible()
    expect(nodes.filter(has_text="And tiles?")).to_have_count(1)
    expect(chat).to_have_attribute("open", "")
    expect(page.locator("#caches b")).to_have_count(0)

    tab.entry("What are").hover()
    page.get_by_role("button", name="Delete “What are").click()
    page.locator(".kw-confirm .kw-delete").click()
    expect(chat).to_have_count(0)


def test_the_page_says_from_the_start_that_caches_cannot_be_saved(
    browser: Browser, default_model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "kv").write_text("in the way")
    with RunningApp(tmp_path / "data", default_model_folder.parent) as app:
        page = browser.new_page()
        ChatPage(page, app.address).open()
        notice = (
            page.locator("#notice").get_by_role("status").filter(has_text="Caches are not saved this time")
        )
        expect(notice).to_be_visible()
        expect(page.locator("html")).to_have_attribute("data-model", "ready")
        expect(notice).to_be_visible()
        page.close()

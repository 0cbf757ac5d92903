"""The kind of a chat's cache, changed in the middle: what is told before, and that nothing is read again."""

from __future__ import annotations

import re

from playwright.sync_api import Locator, expect

from chat.layers.kinds import available_kinds
from tests.browser.chat_page import ChatPage
from tests.browser.profiles import Profiles
from tests.browser.running_app import RunningApp

REMEMBERED = re.compile(r"^\d+ tokens remembered, ")
FROM_DISK = re.compile(r"^\d+ tokens remembered \(\d+ from disk\), ")
AGAIN = re.compile("again")


def kind(tab: ChatPage, name: str) -> Locator:
    """The radio button of a kind."""
    return tab.page.locator(f'#kinds input[value="{name}"]')


def test_a_chat_becomes_smaller_in_the_middle_and_nothing_is_read_again(
    tab: ChatPage, app: RunningApp, profiles: Profiles
) -> None:
    page, section = tab.page, tab.page.locator("#kinds")
    # In words of this test alone: chats share what they have in common, and other tests leave dense rows.
    tab.ask("Name a musical instrument.")
    page.get_by_role("button", name="Settings", exact=True).click()
    expect(kind(tab, "dynamic")).to_be_checked()
    expect(section.locator('li[data-kind="native8"]')).to_contain_text(re.compile("KB per token · fits"))
    expect(section.get_by_text("Recommended")).to_have_count(1)
    for name, found in available_kinds("cpu").items():
        expect(kind(tab, name)).to_be_enabled(enabled=found.is_available)
        if not found.is_available:
            expect(section.locator(f'li[data-kind="{name}"] .kw-reason')).to_have_text(found.reason)
            expect(section.locator("details")).to_contain_text(found.install)

    kind(tab, "native8").check()
    expect(section.locator(".kw-change")).to_contain_text("Nothing is read again")
    section.get_by_role("button", name="Cancel").click()
    expect(kind(tab, "dynamic")).to_be_checked()
    kind(tab, "native8").check()
    section.get_by_role("button", name="Use 8 bit", exact=True).click()
    expect(section.locator(".kw-change")).to_have_count(0)
    expect(kind(tab, "native8")).to_be_checked()

    tab.ask("And a composer?")
    expect(tab.stats.last).to_have_text(REMEMBERED)
    expect(tab.stats.last).not_to_have_text(AGAIN)
    kind(tab, "dynamic").check()
    expect(section.locator(".kw-change")).to_contain_text("read again with your next message")
    section.get_by_role("button", name="Cancel").click()

    profiles.server_goes_away()
    app.stop()
    app.start()
    tab.reload()
    tab.ask("And a painter?")
    expect(tab.stats.last).to_have_text(FROM_DISK)
    expect(tab.stats.last).not_to_have_text(AGAIN)
    page.get_by_role("button", name="Settings", exact=True).click()
    expect(kind(tab, "native8")).to_be_checked()

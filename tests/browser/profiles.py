"""Browser profiles: what one person's browser keeps, and a watch over everything it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, expect
from playwright.sync_api import Error as PlaywrightError

from tests.browser.chat_page import ChatPage
from tests.browser.watch import OUTAGE, Watch

KEPT = "() => localStorage.getItem('keepwarm.sampling')"
"""What the browser keeps of the sampling fields; written anew, and differently, at every change."""


class Profile:
    """A browser context with its watch. `options` are those of `Browser.new_context`."""

    def __init__(self, browser: Browser, address: str, **options: Any) -> None:
        settings = {"locale": "en-US", "viewport": {"width": 1280, "height": 860}, **options}
        self.context: BrowserContext = browser.new_context(**settings)
        self.address = address
        self.watch = Watch(self.context)

    def tab(self) -> ChatPage:
        """A fresh tab that has not gone anywhere yet."""
        return ChatPage(self.context.new_page(), self.address)

    def kept_for(self, address: str) -> Any:
        """What this browser keeps for our page, as if the page had been at `address`."""
        state = json.dumps(self.context.storage_state())
        return json.loads(state.replace(json.dumps(self.address), json.dumps(address)))

    def close_tabs(self) -> list[str]:
        """Stop the replies that are still shown being written, and close every tab, whatever happens. The
        addresses of tabs whose reply did not stop."""
        stuck: list[str] = []
        for page in self.context.pages:
            try:
                ChatPage(page, self.address).stop_if_writing()
            except (AssertionError, PlaywrightError):
                stuck.append(page.url)
            page.close()
        return stuck


class Profiles:
    """All profiles of a run. `address` is where their tabs go unless they are told otherwise."""

    def __init__(self, browser: Browser, address: str, patience_ms: float) -> None:
        self._browser = browser
        self._address = address
        self._patience_ms = patience_ms
        self._all: list[Profile] = []
        self._by_length: dict[int, Profile] = {}

    def new(self, address: str = "", **options: Any) -> Profile:
        """A fresh browser that has never been here, for this test."""
        profile = Profile(self._browser, address or self._address, **options)
        profile.context.set_default_timeout(self._patience_ms)
        self._all.append(profile)
        return profile

    def with_replies_of(self, num_tokens: int) -> Profile:
        """One whose replies are greedy and end after so many tokens; made when first asked for."""
        if num_tokens not in self._by_length:
            profile = self.new()
            set_sampling(profile.tab().open(), num_tokens)
            self._by_length[num_tokens] = profile
        return self._by_length[num_tokens]

    def server_goes_away(self) -> None:
        """Until the end of this test, a browser may say that it does not reach the server."""
        for profile in self._all:
            profile.watch.expect_complaints(*OUTAGE)

    def end_test(self) -> None:
        """Close every tab and every profile that was made for this test, and fail then on what no test may
        cause: a reply that could not be stopped, and what `Watch` names."""
        faults: list[object] = []
        for profile in list(self._all):
            faults += profile.close_tabs()
            faults += profile.watch.faults()
            if profile not in self._by_length.values():
                profile.context.close()
                self._all.remove(profile)
        assert not faults, f"tabs that are stuck, requests elsewhere, dialogs, console: {faults}"

    def take_pictures(self, folder: Path) -> None:
        pages = [page for profile in self._all for page in profile.context.pages]
        for number, page in enumerate(pages):
            page.screenshot(path=folder / f"tab-{number}.png")
            print(f"{folder / f'tab-{number}.png'}: {page.url}")

    def close(self) -> None:
        for profile in self._all:
            profile.context.close()


def set_sampling(tab: ChatPage, max_new_tokens: int) -> None:
    """Through the drawer: greedy, and at most so many tokens. The browser keeps it for later visits."""
    page = tab.page
    temperature = page.get_by_label("number input for Temperature")
    limit = page.locator("#max-new-tokens input")
    page.get_by_role("button", name="Settings", exact=True).click()
    for field, value in ((temperature, "0"), (limit, str(max_new_tokens))):
        kept = page.evaluate(KEPT)
        field.fill(value)
        field.press("Tab")
        page.wait_for_function(f"kept => ({KEPT})() !== kept", arg=kept)
    tab.reload()
    expect(temperature).to_have_value("0")
    expect(limit).to_have_value(str(max_new_tokens))

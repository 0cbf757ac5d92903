"""One tab as a person uses it. Waits look at the page's own elements, never at a clock."""

from __future__ import annotations

import re
from urllib.parse import parse_qs, urlsplit

from playwright.sync_api import Locator, Page, expect

IS_OPEN = "() => window.keepwarm && 'limit' in window.keepwarm.shown"
"""The page knows which chat it shows."""

STOP_MS = 20_000

ENDED = re.compile("done|stopped|failed")


class ChatPage:
    """Selectors and gestures. Attributes are Playwright locators, looked up anew at each use."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.address = address
        self.box = page.locator("#message textarea")
        self.send_button = page.get_by_role("button", name="Send message")
        self.stop_button = page.get_by_role("button", name="Stop", exact=True)
        self.chat = page.locator("#chat")
        self.questions = page.locator("#chat .user-row .kw-text")
        self.rows = page.locator("#chat .message-row")
        self.replies = page.locator("#chat .bot-row")
        self.last_reply = self.replies.last
        self.words = self.last_reply.locator("[data-testid=bot] .prose")
        self.waiting = page.locator("#chat .kw-live")
        self.stats = page.locator("#chat .kw-stats summary")
        self.notes = page.locator("#chat .kw-note")
        self.versions = page.locator("#chat .kw-versions")
        self.editor = page.locator("#chat .kw-area")
        self.question_whether = page.locator("#chat .kw-ask p")
        self.menu = page.get_by_role("menu")
        self.toast = page.locator(".toast-body")
        self.listing = page.locator("#conversations")
        self.titles = page.locator("#conversations .kw-title")

    def open(self, chat: str | None = None) -> ChatPage:
        """Load the page, at a chat if one is given, and wait until it knows what it shows."""
        self.page.goto(self.address if chat is None else f"{self.address}/?chat={chat}")
        return self.wait_until_open()

    def reload(self) -> ChatPage:
        self.page.reload()
        return self.wait_until_open()

    def wait_until_open(self) -> ChatPage:
        self.page.wait_for_function(IS_OPEN)
        return self

    def another(self) -> ChatPage:
        """One more tab of the same browser."""
        return ChatPage(self.page.context.new_page(), self.address)

    def mark(self) -> None:
        """Mark the page that stands there now, to see whether it is loaded again."""
        self.page.evaluate("() => { window.stoodBefore = true; }")

    def wait_until_loaded_again(self) -> ChatPage:
        """The page loads itself when it had lost the server."""
        self.page.wait_for_function("() => !window.stoodBefore")
        return self.wait_until_open()

    def is_marked(self) -> bool:
        return self.page.evaluate("() => Boolean(window.stoodBefore)")

    @property
    def chat_id(self) -> str | None:
        """The chat in the tab's address."""
        return parse_qs(urlsplit(self.page.url).query).get("chat", [None])[0]

    def send(self, text: str) -> None:
        """Type, Enter, and wait until the message stands in the chat and its reply is on its way."""
        self.box.fill(text)
        self.box.press("Enter")
        expect(self.questions.last).to_have_text(text)
        expect(self.box).to_have_value("")

    def ask(self, text: str) -> None:
        """Send and wait for the whole reply."""
        self.send(text)
        self.wait_for_reply()

    def wait_for_words(self) -> str:
        """Wait until the reply has begun to stand there; return what there is of it."""
        expect(self.words).to_have_text(re.compile(r"\S+\s+\S+"))
        return self.words.inner_text()

    def wait_for_more_than(self, seen: str) -> str:
        """Wait until the reply has grown beyond what was seen of it; return what there is of it."""
        expect(self.words).to_have_text(re.compile("^" + re.escape(seen) + "."))
        return self.words.inner_text()

    def wait_for_reply(self) -> None:
        """Wait until the last reply has ended, however it ended."""
        expect(self.last_reply).to_have_attribute("data-status", ENDED)
        expect(self.stop_button).to_be_hidden()

    def stop_if_writing(self) -> None:
        """End the reply that is shown on its way, if there is one."""
        if self.stop_button.is_visible():
            self.stop_button.click(timeout=STOP_MS)
            expect(self.stop_button).to_be_hidden(timeout=STOP_MS)

    def wait_for_status(self, status: str) -> None:
        expect(self.last_reply).to_have_attribute("data-status", status)

    def entry(self, title: str) -> Locator:
        """The line of the list with this title, whole or its beginning."""
        return self.page.locator("#conversations li").filter(has_text=title)

    def open_entry(self, title: str) -> None:
        """Click a conversation and wait until it is the one that is shown."""
        entry = self.entry(title).locator(".kw-open")
        entry.click()
        expect(entry).to_have_attribute("aria-current", "page")

    def new_chat(self) -> None:
        self.page.locator("#new-chat").click()
        expect(self.rows).to_have_count(0)

    def tool(self, row: Locator, name: str) -> Locator:
        """One of the buttons under a message; they come when the message is hovered."""
        row.hover()
        return row.locator(".kw-tools").get_by_role("button", name=name, exact=True)

    def choose(self, row: Locator, item: str) -> None:
        """Open the menu under a message and click one of its items."""
        self.tool(row, "More").click()
        self.menu.get_by_role("menuitem", name=item, exact=True).click()

    def press_button(self, name: str, key: str = "Enter") -> None:
        """The lowest button of that name in the chat, with the keyboard."""
        self.last_button(name).focus()
        self.page.keyboard.press(key)

    def last_button(self, name: str) -> Locator:
        """The lowest button of that name in the chat."""
        return self.chat.get_by_role("button", name=name, exact=True).last

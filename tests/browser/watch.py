"""What a browser did behind the test's back: requests, complaints in its console, dialogs."""

from __future__ import annotations

from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, ConsoleMessage, Dialog, Request, WebError

OURS = "127.0.0.1"
BLOCKED = "csp"
"""Why Chromium did not even send a request that the page's content policy forbids."""

HARMLESS = (
    # A picture in a message: that it was not loaded is what we want, `requests_elsewhere` has the proof.
    "violates the following Content Security Policy directive",
    "the server responded with a status of 404",
    # What Gradio says when a page is left while it streams.
    "AbortError: signal is aborted without reason",
    "Connection errored out",
)
OUTAGE = ("net::ERR_", "Failed to fetch", "network error")
"""What a browser says while its server is away."""


class Watch:
    """Listens to every page of a context. `faults` names what must not happen."""

    def __init__(self, context: BrowserContext) -> None:
        self._requested: list[Request] = []
        self._blocked: list[Request] = []
        self._complaints: list[str] = []
        self._dialogs: list[str] = []
        self._harmless: tuple[str, ...] = HARMLESS
        context.on("request", self._on_request)
        context.on("requestfailed", self._on_failed)
        context.on("console", self._on_console)
        context.on("weberror", self._on_error)
        context.on("dialog", self._on_dialog)

    def requests_elsewhere(self) -> list[str]:
        """The addresses of requests that left for another host."""
        sent = [request for request in self._requested if request not in self._blocked]
        web = [request.url for request in sent if request.url.startswith(("http", "ws"))]
        return [url for url in web if urlsplit(url).hostname != OURS]

    def expect_complaints(self, *words: str) -> None:
        """Until the end of this test, the console may say these."""
        self._harmless += words

    def faults(self) -> list[str]:
        """Requests elsewhere, dialogs and errors in the console since the last time this was asked."""
        complaints = [text for text in self._complaints if not self._is_expected(text)]
        seen = [*self.requests_elsewhere(), *self._dialogs, *complaints]
        self._requested, self._blocked, self._complaints, self._dialogs = [], [], [], []
        self._harmless = HARMLESS
        return seen

    def _is_expected(self, complaint: str) -> bool:
        return any(words in complaint for words in self._harmless)

    def _on_request(self, request: Request) -> None:
        self._requested.append(request)

    def _on_failed(self, request: Request) -> None:
        if request.failure == BLOCKED:
            self._blocked.append(request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self._complaints.append(message.text)

    def _on_error(self, error: WebError) -> None:
        self._complaints.append(str(error.error))

    def _on_dialog(self, dialog: Dialog) -> None:
        if dialog.type == "beforeunload":
            dialog.accept()
            return
        self._dialogs.append(dialog.message)
        dialog.dismiss()

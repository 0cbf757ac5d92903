"""A hand on the way between a tab and the server: requests wait, answers come late."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import APIResponse, Page, Request, Route

JOIN = "**/queue/join*"
"""How the page asks for something to be done."""

STREAM = "**/queue/data*"
"""How the page is told what came of it."""


class Gate:
    """Lets the first `passing` requests for `JOIN` through and holds the others until `open`: the requests
    themselves, or with `late_answers` only what the server says to them."""

    def __init__(self, page: Page, *, passing: int = 0, late_answers: bool = False) -> None:
        self._passing = passing
        self._late_answers = late_answers
        self._is_open = False
        self._held: list[tuple[Route, APIResponse | None]] = []
        page.route(JOIN, self._on_request)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def open(self) -> None:
        """Let everything through from now on."""
        self._is_open = True
        for route, answer in self._held:
            route.fulfill(response=answer) if answer else route.continue_()

    def _on_request(self, route: Route) -> None:
        if self._is_open or self._passing > 0:
            self._passing -= 1
            route.continue_()
        else:
            self._held.append((route, route.fetch() if self._late_answers else None))


def nth_join(number: int) -> Callable[[Request], bool]:
    """True for the `number`-th of the page's requests to do something; for `Page.expect_request`."""
    num_seen = 0

    def is_it(request: Request) -> bool:
        nonlocal num_seen
        num_seen += "/queue/join" in request.url
        return num_seen == number

    return is_it


def answer_once(page: Page, body: str) -> None:
    """The next stream that the page opens says `body` and ends; the server never hears of it."""
    page.route(STREAM, lambda route: route.fulfill(content_type="text/event-stream", body=body), times=1)


def num_ended_streams(page: Page) -> int:
    """How many streams of this page have ended, in any way."""
    return page.evaluate(f"() => {ENDED_STREAMS}")


def wait_for_the_end_of_a_stream(page: Page, num_before: int) -> None:
    page.wait_for_function(f"before => {ENDED_STREAMS} > before", arg=num_before)


ENDED_STREAMS = (
    "performance.getEntriesByType('resource').filter((each) => each.name.includes('/queue/data')).length"
)

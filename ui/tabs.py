"""Whose turn it is in each tab. A tab has at most one follower that counts, the newest.

An older follower notices at its next look and ends without another word. What it said just before may
still reach the browser after the newer picture, so the newest one waits for its end and draws afresh:
whatever the order, the last word is the newest follower's.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager

WAIT_S = 0.05
MOST_WAITS = 60
"""Three seconds. A follower whose tab vanished under it may end later than that; nobody waits for it."""


class Tabs:
    """Tickets, by tab. Keys are Gradio's session hashes, used as tab names only."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._tickets = itertools.count(1)  # never the same one twice, or a tab that was closed could wake up
        self._drawn: dict[str, str | None] = {}
        self._following: dict[str, set[int]] = {}
        self._lock = threading.Lock()

    def draw(self, tab: str, conversation_id: str | None) -> None:
        """The tab shows a new picture from here on: every earlier ticket is void."""
        with self._lock:
            self._drawn[tab] = conversation_id
            self._next(tab)

    def follow(self, tab: str, conversation_id: str | None) -> int | None:
        """A ticket for a follower of what the tab shows; every earlier one is void. None when the tab was
        given another conversation meanwhile, whose own follower must not be disturbed."""
        with self._lock:
            if self._drawn.get(tab, conversation_id) != conversation_id:
                return None
            return self._next(tab)

    def is_newest(self, tab: str, ticket: int) -> bool:
        """True as long as nothing came after `ticket` in this tab."""
        with self._lock:
            return self._newest.get(tab) == ticket

    @contextmanager
    def following(self, tab: str, ticket: int) -> Generator[None, None, None]:
        """A follower holds this for as long as it may say something."""
        with self._lock:
            self._following.setdefault(tab, set()).add(ticket)
        try:
            yield
        finally:
            with self._lock:
                self._following[tab].discard(ticket)
                if not self._following[tab]:
                    del self._following[tab]

    async def outlast(
        self, tab: str, ticket: int, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> bool:
        """Wait until the older followers of the tab have ended. True when there was one, so that its last
        words may stand over what is shown; False too when `ticket` has been overtaken meanwhile."""
        num_waits = 0
        while num_waits < MOST_WAITS and self._has_older(tab, ticket) and self.is_newest(tab, ticket):
            num_waits += 1
            await pause(WAIT_S)
        return num_waits > 0 and self.is_newest(tab, ticket)

    def close(self, tab: str) -> None:
        """The tab is gone; its followers end and nothing of it is kept."""
        with self._lock:
            self._newest.pop(tab, None)
            self._drawn.pop(tab, None)

    def _next(self, tab: str) -> int:
        self._newest[tab] = next(self._tickets)
        return self._newest[tab]

    def _has_older(self, tab: str, ticket: int) -> bool:
        with self._lock:
            return any(other < ticket for other in self._following.get(tab, ()))

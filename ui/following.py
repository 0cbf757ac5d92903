"""Followers of replies. A follower only watches a `Job`: it may end at any time and the reply goes on.

It ends by itself once it is not wanted any more (see `ui.tabs`), by cancellation, or with its reply.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

from chat.chats import ChatView
from chat.job import Job, JobView
from ui.live import IDLE, live
from ui.messages import chat_row, chat_rows, window
from ui.screen import Parts, Picture

LOOK_EVERY_S = 0.1
"""Seconds between two looks: at most ten updates a second reach the page."""


async def looks(
    job: Job,
    wanted: Callable[[], bool],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[JobView]:
    """Each changed view of the job, one pause apart, the ended one last. Ends early once not `wanted`."""
    seen = -1
    while wanted():
        view = job.view
        if view.version != seen:
            seen = view.version
            yield view
        if view.ended:
            return
        await pause(LOOK_EVERY_S)


async def pictures(
    parts: Parts,
    view: ChatView,
    limit: int,
    wanted: Callable[[], bool],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[Picture]:
    """What changes on the page until the reply of `view` ends: its last row and its line, nothing else.

    The rows above are drawn once and handed on as they are. A reply on a branch that is not shown is
    waited for without drawing.
    """
    messages = window(view.messages, limit)
    if view.job is None or not messages or messages[-1].id != view.job.reply_id:
        return
    finished, drawn, line = chat_rows(messages[:-1]), "", IDLE
    async for look in looks(view.job, wanted, pause):
        picture: Picture = {}
        if not look.ended and look.text != drawn:
            drawn = look.text
            picture[parts.chat] = [*finished, chat_row("assistant", drawn)]
        if not look.ended and live(look) != line:
            line = live(look)
            picture[parts.live] = line
        if picture:
            yield picture


class Writing:
    """The replies that are being written, by owner, for the dots in the list of conversations."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()

    def note(self, job: Job | None) -> None:
        """Remember a job until it has ended."""
        if job is not None:
            with self._lock:
                self._jobs[job.reply_id] = job

    def of(self, owner: str) -> list[str]:
        """The ids of this owner's conversations with a reply on its way."""
        with self._lock:
            self._jobs = {key: job for key, job in self._jobs.items() if not job.view.ended}
            return sorted({job.conversation_id for job in self._jobs.values() if job.owner == owner})

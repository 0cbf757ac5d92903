"""Followers of replies. A follower only watches a `Job`: it may end at any time and the reply goes on.

It ends by itself once it is not wanted any more (see `ui.tabs`), by cancellation, or with its reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from chat.chats import ChatView
from ui.live import IDLE, elsewhere, live
from ui.messages import chat_row, chat_rows, window
from ui.screen import Parts, Picture

LOOK_EVERY_S = 0.1
"""Seconds between two looks: at most ten updates a second reach the page."""

LOOKS_PER_BEAT = 10
"""A page that hears nothing for several beats takes its follower for lost and asks for another (live.js)."""


async def pictures(
    parts: Parts,
    view: ChatView,
    limit: int,
    wanted: Callable[[], bool],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[Picture]:
    """What changes on the page until the reply of `view` ends: its last row and its line, nothing else,
    and of the line at least the beat. Ends early once not `wanted`.

    The rows above are drawn once and handed on as they are. Of a reply on a branch that is not shown nothing
    is drawn but that it is being written.
    """
    messages = window(view.messages, limit)
    if view.job is None:
        return
    is_shown = view.leaf_id == view.job.reply_id
    finished, drawn, line, num_looks = chat_rows(messages[:-1]), "", IDLE, 0
    while wanted() and not (look := view.job.view).ended:
        picture: Picture = {}
        if is_shown and look.text != drawn:
            drawn = look.text
            picture[parts.chat] = [*finished, chat_row("assistant", drawn)]
        beat = num_looks // LOOKS_PER_BEAT
        if (line_now := live(look, beat) if is_shown else elsewhere(beat)) != line:
            line = line_now
            picture[parts.live] = line
        if picture:
            yield picture
        num_looks += 1
        await pause(LOOK_EVERY_S)

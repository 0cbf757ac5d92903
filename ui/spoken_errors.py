"""One boundary between handlers and the page: every error becomes a sentence that a person sees, and
every picture is sealed (see `ui.painted`).

Handlers raise nothing to Gradio. What `chat` and `cache_store` raise on purpose is shown as it reads;
anything else is logged with its trace and shown as one plain sentence. Outputs are left as they are,
so the typed text stays in the box.
"""

from __future__ import annotations

import functools
import html
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import ParamSpec

import gradio as gr

from cache_store.errors import StoreError
from chat.errors import ChatError
from ui.login import NotSignedIn
from ui.painted import sealed
from ui.sampling_form import InvalidSampling

log = logging.getLogger(__name__)

P = ParamSpec("P")

ON_PURPOSE = (ChatError, StoreError, InvalidSampling, NotSignedIn)

UNEXPECTED = "Something went wrong on our side; your text is kept, please try again. The log has the details."


def spoken(handler: Callable[P, object]) -> Callable[P, object]:
    """Show what the handler raises, and change nothing on the page then."""

    @functools.wraps(handler)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> object:
        try:
            return sealed(handler(*args, **kwargs))
        except Exception as exc:
            say(exc)
            return unchanged()

    return guarded


def spoken_stream(handler: Callable[P, AsyncGenerator[object, None]]) -> Callable[P, AsyncIterator[object]]:
    """The same for a follower. Its last word is always "nothing new", because Gradio sends the last
    values of a generator once more when it ends."""

    @functools.wraps(handler)
    async def guarded(*args: P.args, **kwargs: P.kwargs) -> AsyncIterator[object]:
        try:
            async with aclosing(handler(*args, **kwargs)) as pictures:  # ends with us, not some time later
                async for picture in pictures:
                    yield sealed(picture)
        except Exception as exc:
            say(exc)
        yield unchanged()

    return guarded


def unchanged() -> object:
    """The picture in which every output stays as it is."""
    return gr.skip()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]


def say(exc: Exception) -> None:
    """A toast with the error's sentence. Gradio draws its text as HTML, so it is escaped."""
    if isinstance(exc, ON_PURPOSE):
        gr.Warning(html.escape(str(exc)), title="", duration=12)
        return
    log.error("a page handler failed", exc_info=exc)
    gr.Warning(html.escape(UNEXPECTED), title="", duration=12)

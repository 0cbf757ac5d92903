"""The state of a reply that has no text yet, as one line in the place where the text will be, and the beat
by which the page knows that it is still being told of its reply."""

from __future__ import annotations

from typing import TypedDict

from chat.job import JobView


class Live(TypedDict):
    """What the page shows in the place of a reply while there is no text yet. `fraction` is None
    when there is nothing to measure. `beat` counts up slowly while somebody watches the reply."""

    line: str
    fraction: float | None
    beat: int


IDLE: Live = {"line": "", "fraction": None, "beat": 0}

ELSEWHERE = "A reply is being written in another version of this chat…"
"""Under the last message of what is shown instead."""


def live(view: JobView, beat: int = 0) -> Live:
    """The state of a reply as one line."""
    fraction: float | None = None
    if view.state == "queued":
        line = _queued(view.position)
    elif view.state == "loading":
        line = "Waiting for the model to load…"
    elif view.state == "prefill":
        line, fraction = _reading(view.num_read, view.num_to_read)
    elif view.state == "decode":
        line = "" if view.text else "Writing…"
    else:
        return IDLE
    return {"line": line, "fraction": fraction, "beat": beat}


def elsewhere(beat: int = 0) -> Live:
    """A reply on its way that is not shown."""
    return {"line": ELSEWHERE, "fraction": None, "beat": beat}


def _queued(position: int) -> str:
    if position < 1:
        return "Starting…"
    return "1 reply ahead of yours" if position == 1 else f"{position:,} replies ahead of yours"


def _reading(num_read: int, num_to_read: int) -> tuple[str, float | None]:
    if num_to_read < 1:
        return "Reading…", None
    return f"Reading {num_read:,} of {num_to_read:,} tokens…", min(num_read / num_to_read, 1.0)

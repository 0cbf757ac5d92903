"""The state of a reply that has no text yet, as one line in the place where the text will be."""

from __future__ import annotations

from typing import TypedDict

from chat.job import JobView


class Live(TypedDict):
    """What the page shows in the place of a reply while there is no text yet. `fraction` is None
    when there is nothing to measure."""

    state: str
    line: str
    fraction: float | None


IDLE: Live = {"state": "idle", "line": "", "fraction": None}


def live(view: JobView) -> Live:
    """The state of a reply as one line."""
    if view.state == "queued":
        return {"state": "queued", "line": _queued(view.position), "fraction": None}
    if view.state == "loading":
        return {"state": "loading", "line": "Waiting for the model to load…", "fraction": None}
    if view.state == "prefill":
        return _reading(view.num_read, view.num_to_read)
    if view.state == "decode":
        return {"state": "writing", "line": "" if view.text else "Writing…", "fraction": None}
    return IDLE


def _queued(position: int) -> str:
    if position < 1:
        return "Starting…"
    return "1 reply ahead of yours" if position == 1 else f"{position:,} replies ahead of yours"


def _reading(num_read: int, num_to_read: int) -> Live:
    if num_to_read < 1:
        return {"state": "reading", "line": "Reading…", "fraction": None}
    line = f"Reading {num_read:,} of {num_to_read:,} tokens…"
    return {"state": "reading", "line": line, "fraction": min(num_read / num_to_read, 1.0)}

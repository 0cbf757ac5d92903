"""From stored messages to what the Chatbot draws. The store is the truth; this is only its picture.

Every message becomes exactly one row, so row `i` of the picture is message `i` of the window. Text
goes in as a typed part, because Gradio strips the indentation of a plain string. Marks are what our
script paints around a row: versions, the stats line, how a reply ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from cache_store.records import EDITED, Message, Siblings
from chat.chats import ChatView
from chat.stats import TurnStats
from ui.stats_line import stats_details, stats_line


class TextPart(TypedDict):
    """One part of a row's content, exactly as it was typed or generated."""

    type: str
    text: str


class ChatRow(TypedDict):
    """One row of the Chatbot."""

    role: str
    content: list[TextPart]


class StatsMark(TypedDict):
    """The stats line and the numbers behind it."""

    line: str
    details: list[tuple[str, str]]


Offer = Literal["continue", "answer"]
"""What could come next: more of a reply that was cut or edited, or a reply to a question without one."""


class RowMark(TypedDict):
    """What is painted around one row. `text` is set for a person's messages only, which are shown
    letter by letter instead of as Markdown. `note` is a quiet remark, `error` a sentence."""

    id: str
    role: str
    status: str
    text: str | None
    version: tuple[int, int] | None
    stats: StatsMark | None
    note: str | None
    error: str | None
    offer: Offer | None


ENDINGS = {
    "length": "Stopped at the limit of new tokens",
    "context": "Stopped: the chat fills the model's context",
    "memory": "Stopped: the cache of this chat fills its memory budget",
}
"""Quiet remarks for ends that nobody asked for; every other stop is just "Stopped"."""

UNANSWERED = "This message has no reply"

FULL = frozenset({"context", "memory"})
"""Where there was no room for another token, there is none to go on."""


def window(messages: Sequence[Message], limit: int) -> tuple[Message, ...]:
    """The last `limit` messages, so that an update costs the same in a short and in a long chat."""
    return tuple(messages[-limit:])


def chat_rows(messages: Sequence[Message]) -> list[ChatRow]:
    """One row per message, in order."""
    return [chat_row(message.role, message.text) for message in messages]


def chat_row(role: str, text: str) -> ChatRow:
    """One row with exactly this text."""
    return {"role": role, "content": [{"type": "text", "text": text}]}


def row_marks(view: ChatView, messages: Sequence[Message]) -> list[RowMark]:
    """One mark per row of `chat_rows(messages)`; `messages` is a window of the view's path."""
    marks = [row_mark(message, view.siblings.get(message.id)) for message in messages]
    if marks and marks[-1]["role"] == "user":
        marks[-1] = {**marks[-1], "note": UNANSWERED, "offer": "answer"}
    return marks


def row_mark(message: Message, siblings: Siblings | None) -> RowMark:
    """What to paint around one message."""
    return {
        "id": message.id,
        "role": message.role,
        "status": message.status,
        "text": message.text if message.role == "user" else None,
        "version": _version(siblings),
        "stats": _stats(message.stats) if message.status != "running" else None,
        "note": _note(message),
        "error": _error(message),
        "offer": "continue" if _was_cut(message) else None,
    }


def _version(siblings: Siblings | None) -> tuple[int, int] | None:
    if siblings is None or len(siblings.ids) < 2:
        return None
    return siblings.position + 1, len(siblings.ids)


def _stats(stored: Mapping[str, object]) -> StatsMark | None:
    """None when there are no stats, or when they were written by a version that counts differently."""
    if not stored:
        return None
    try:
        stats = TurnStats.from_json(stored)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        return None
    return {"line": stats_line(stats), "details": stats_details(stats)}


def _note(message: Message) -> str | None:
    notes = [_ending_note(message), str(message.stats.get("note") or "").rstrip(".")]
    return " · ".join(note for note in notes if note) or None


def _ending_note(message: Message) -> str | None:
    if message.status == "stopped":
        return ENDINGS.get(message.finish_reason or "", "Stopped")
    if message.finish_reason == EDITED:
        return "Edited"
    if message.status == "done" and message.role == "assistant" and not message.text.strip():
        return "The model had nothing to say"
    return None


def _was_cut(message: Message) -> bool:
    """Whether there is a reply that did not come to its own end, and something of it to go on from."""
    if message.role != "assistant" or not message.text.strip() or message.finish_reason in FULL:
        return False
    return message.status in ("stopped", "failed") or message.finish_reason == EDITED


def _error(message: Message) -> str | None:
    if message.status != "failed":
        return None
    return message.error or "The reply could not be written; your message is kept, please try again."

"""The parts of the page that handlers change, and the pictures they are given.

A picture is a dict from component to new value; Gradio leaves out what a picture does not name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import gradio as gr
from gradio.components import Component

from cache_store.records import Message
from chat.chats import ChatView, ModelStatus
from chat.job import JobView
from ui.live import IDLE, Live, elsewhere, live
from ui.messages import ChatRow, chat_row, chat_rows, row_marks, window
from ui.shown import Shown

Picture = dict[Component, object]


@dataclass(frozen=True, slots=True)
class Parts:
    """Every component that a handler reads or changes."""

    box: gr.Textbox
    chat: gr.Chatbot
    marks: gr.HTML
    verbs: gr.HTML
    live: gr.HTML
    shown: gr.HTML
    listing: gr.HTML
    status: gr.HTML
    pulse: gr.Timer
    new_chat: gr.Button
    search: gr.Textbox
    system_prompt: gr.Textbox
    save_prompt: gr.Button
    sampling: tuple[Component, ...]
    reset_sampling: gr.Button
    kept_sampling: gr.BrowserState
    kinds: gr.HTML
    caches: gr.HTML

    @property
    def screen(self) -> list[Component]:
        """What an action may change."""
        return [
            *(self.box, self.chat, self.marks, self.verbs, self.live, self.shown),
            *(self.listing, self.status, self.pulse, self.system_prompt),
        ]

    @property
    def followed(self) -> list[Component]:
        """What a follower may change."""
        return [self.chat, self.marks, self.live, self.shown, self.status]


class Status(TypedDict):
    """The model, the conversations with a reply on its way, and why caches are not saved (else empty)."""

    model: dict[str, object]
    writing: list[str]
    saving: str


def status_value(model: ModelStatus, writing: list[str], saving: str) -> Status:
    """What the bar on top, the notice and the drawer show."""
    facts: dict[str, object] = {
        "state": model.state,
        "name": model.name,
        "detail": model.detail,
        "device": model.device,
        "dtype": model.dtype,
        "num_context_tokens": model.num_context_tokens,
        "kv_bytes_per_token": model.kv_bytes_per_token,
    }
    return {"model": facts, "writing": writing, "saving": saving}


def chat_picture(parts: Parts, view: ChatView, limit: int, *, can_redo: bool) -> Picture:
    """The conversation as it stands."""
    messages = window(view.messages, limit)
    job = view.job.view if view.job else None
    busy = job is not None and not job.ended
    here = view.job is not None and view.leaf_id == view.job.reply_id
    return {
        parts.chat: _rows(messages, job if here else None),
        parts.marks: {"rows": row_marks(view, messages), "num_earlier": len(view.messages) - len(messages)},
        parts.live: _live(job, is_shown=here) if job and busy else IDLE,
        parts.shown: _shown_value(view, messages, limit, writing=busy, can_redo=can_redo),
    }


def empty_picture(parts: Parts, system_prompt: str) -> Picture:
    """A new chat: nothing said yet."""
    return {
        parts.chat: [],
        parts.marks: {"rows": [], "num_earlier": 0},
        parts.live: IDLE,
        parts.shown: {
            "conversation": None,
            "title": "",
            "rows": [],
            "limit": Shown().limit,
            "writing": False,
            "canUndo": False,
            "canRedo": False,
        },
        parts.system_prompt: system_prompt,
    }


def _rows(messages: tuple[Message, ...], job: JobView | None) -> list[ChatRow]:
    """The stored rows; the last one is what `job` has written so far, if there is a job."""
    if job is None or not job.text:
        return chat_rows(messages)
    return [*chat_rows(messages[:-1]), chat_row("assistant", job.text)]


def _live(job: JobView, *, is_shown: bool) -> Live:
    return live(job) if is_shown else elsewhere()


def _shown_value(
    view: ChatView, messages: tuple[Message, ...], limit: int, *, writing: bool, can_redo: bool
) -> dict[str, object]:
    return {
        "conversation": view.conversation.id,
        "title": view.conversation.title,
        "rows": [message.id for message in messages],
        "limit": limit,
        "writing": writing,
        "canUndo": bool(messages),
        "canRedo": can_redo,
    }

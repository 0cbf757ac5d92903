"""The kinds of cache in the drawer, as plain data that our script draws (kinds.js), and what people do there.

Each kind says before it is chosen what it takes, how long a chat can become with it, how near its answers
come to those of a dense cache, and what the change would cost this chat.
"""

from __future__ import annotations

from typing import TypedDict

import gradio as gr

from chat.chat_view import Cost
from chat.chats import Chats
from chat.kind_choices import KindMenu, KindView
from chat.kind_names import name_of
from ui.drawing import Drawing
from ui.login import owner_of
from ui.screen import Parts
from ui.shown import Shown
from ui.sizes import size_text
from ui.spoken_errors import spoken
from ui.stats_line import seconds

QUALITIES = {
    "same": "Same answers",
    "slightly different": "Slightly different answers",
    "not recommended": "Not recommended for this model",
}


class KindRow(TypedDict):
    """One kind. `reason` and `install` say why it cannot be chosen. `cost` is told before a change; empty
    where there is nothing that it could cost."""

    kind: str
    name: str
    line: str
    quality: str
    quality_detail: str
    is_bad: bool
    is_short: bool
    in_use: bool
    is_recommended: bool
    reason: str
    install: str
    cost: str


class KindPanel(TypedDict):
    """The whole section. `measuring`: some kinds are being measured; `to_measure`: some could be."""

    rows: list[KindRow]
    notice: str
    shrink: bool
    measuring: bool
    to_measure: bool


def kind_panel(menu: KindMenu | None) -> KindPanel:
    """The menu in words; None is a model that is still being loaded."""
    if menu is None:
        notice = "What there is to choose from is known once the model is loaded."
        return {"rows": [], "notice": notice, "shrink": False, "measuring": False, "to_measure": False}
    here = [view for view in menu.kinds if view.availability.is_available and not view.is_exact]
    return {
        "rows": [_row(view, in_use=view.kind == menu.in_use) for view in menu.kinds],
        "notice": menu.notice,
        "shrink": menu.may_shrink,
        "measuring": any(view.is_being_measured for view in here),
        "to_measure": any(view.quality is None and not view.is_being_measured for view in here),
    }


def _row(view: KindView, *, in_use: bool) -> KindRow:
    verdict = "same" if view.is_exact and view.kind != "dynamic" else view.verdict
    return {
        "kind": view.kind,
        "name": name_of(view.kind).capitalize(),
        "line": _line(view),
        "quality": "Being measured…" if view.is_being_measured else QUALITIES[verdict] if verdict else "",
        "quality_detail": _detail(view),
        "is_bad": verdict == "not recommended",
        "is_short": not view.forecast.fits_context,
        "in_use": in_use,
        "is_recommended": view.forecast.is_recommended,
        "reason": view.availability.reason,
        "install": view.availability.install,
        "cost": _cost(view.cost),
    }


def _line(view: KindView) -> str:
    told = view.forecast
    fits = (
        f"all {told.num_tokens:,} tokens"
        if told.fits_context
        else f"{told.num_tokens:,} tokens on this machine"
    )
    return f"{size_text(told.bytes_per_token)} per token · fits {fits}"


def _detail(view: KindView) -> str:
    if view.quality is None:
        return ""
    return f"{view.quality.top1_agreement:.0%} of first choices alike, divergence {view.quality.mean_kl:.4f}"


def _cost(cost: Cost | None) -> str:
    if cost is None:
        return ""
    if not cost.num_tokens:
        return "Nothing is read again: what is remembered is converted, or saved in this form already."
    tokens = "1 token is" if cost.num_tokens == 1 else f"{cost.num_tokens:,} tokens are"
    about = f", which takes about {seconds(cost.seconds)}" if cost.seconds is not None else ""
    return f"{tokens} read again with your next message{about}."


class KindVerbs:
    """What the section does. Holds no state of any user."""

    def __init__(self, chats: Chats, parts: Parts, draw: Drawing) -> None:
        self._chats = chats
        self._parts = parts
        self._draw = draw

    @spoken
    def look(self, request: gr.Request, address: object) -> object:
        """The drawer is open: what there is to choose from for the chat that this tab shows."""
        return self._panel(owner_of(request), Shown.from_browser(address).conversation_id)

    @spoken
    def choose(self, request: gr.Request, data: gr.EventData, address: object, search: str) -> object:
        """Another kind for this chat, from its next reply on; for a new chat, which is made with it."""
        owner, shown = owner_of(request), Shown.from_browser(address)
        kind, conversation_id = str(data.kind), shown.conversation_id
        if conversation_id is not None:
            self._chats.set_cache_kind(owner, conversation_id, kind)
            return self._panel(owner, conversation_id)
        made = self._chats.create_with_kind(owner, kind)
        return {
            **self._draw.arrive(request, made.id, shown.limit),
            **self._draw.around(owner, search),
            **self._panel(owner, made.id),
        }

    @spoken
    def measure(self, request: gr.Request, address: object) -> object:
        """Measure the kinds that nobody measured yet, when the model has nothing else to do."""
        owner = owner_of(request)
        self._chats.measure_kinds()
        return self._panel(owner, Shown.from_browser(address).conversation_id)

    @spoken
    def shrink(self, request: gr.Request, data: gr.EventData, address: object) -> object:
        """Whether replies of this person may go on in a smaller cache when memory runs out."""
        owner = owner_of(request)
        self._chats.allow_smaller_caches(owner, allowed=data.allowed is True)
        return self._panel(owner, Shown.from_browser(address).conversation_id)

    def _panel(self, owner: str, conversation_id: str | None) -> dict[gr.HTML, KindPanel]:
        return {self._parts.kinds: kind_panel(self._chats.kind_menu(owner, conversation_id))}

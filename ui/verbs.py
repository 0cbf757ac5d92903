"""What somebody does to one message, or to the chat as a whole: regenerate, edit, continue, fork, delete,
switch versions, undo, redo.

The browser names a row of what its tab shows; the id behind it is checked by owner in `Chats`. Every act
carries a number, and its answer the same one, so that only the answer to the last act counts. A verb that
would make the model read much is not done at first: the answer is a sentence, and the page asks (`sure`).
What is cheap is done at once, in the same round trip.
"""

from __future__ import annotations

from dataclasses import dataclass

import gradio as gr

from chat.branches import CostlyVerb
from chat.chat_view import ChatView, Cost
from chat.chats import Chats
from chat.errors import NothingToDo
from ui.drawing import Drawing
from ui.login import owner_of
from ui.sampling_form import sampling_from
from ui.screen import Parts, Picture
from ui.shown import ROWS_AT_FIRST, Shown
from ui.spoken_errors import spoken

WORTH_ASKING_TOKENS = 500
WORTH_ASKING_S = 0.2
"""Less than either is done without asking; a time that is not known yet counts as long."""

NOT_SHOWN = "This message is not shown any more; nothing was changed, reload the page to see the chat."
NO_CHAT = "There is no chat here yet; nothing was changed."


@dataclass(frozen=True, slots=True)
class Act:
    """One act on one row, as a browser sent it. `number`: for the answer. `text`: what was typed, where a
    verb has a text. `sure`: the cost was told, or does not matter."""

    owner: str
    shown: Shown
    message_id: str
    number: int
    text: str
    keep_rest: bool
    sure: bool

    @classmethod
    def read(cls, request: gr.Request, data: gr.EventData, address: object) -> Act:
        """What is missing counts as not given. Raises NothingToDo when there is no such row."""
        shown, text = Shown.from_browser(address), _given(data, "text")
        message_id = shown.row_id(_given(data, "row"))
        if message_id is None:
            raise NothingToDo(NOT_SHOWN)
        return cls(
            owner_of(request),
            shown,
            message_id,
            number=_number(data),
            text=text if isinstance(text, str) else "",
            keep_rest=_given(data, "keepRest") is True,
            sure=_given(data, "sure") is True,
        )


class Verbs:
    """The verbs of one page. Holds no state of any user."""

    def __init__(self, chats: Chats, parts: Parts, draw: Drawing) -> None:
        self._chats = chats
        self._parts = parts
        self._draw = draw

    @spoken
    def regenerate(
        self, request: gr.Request, data: gr.EventData, address: object, *sampling: object
    ) -> object:
        """Another reply, which begins with the text if there is one; or a first one to a question."""
        act = Act.read(request, data, address)
        if price := self._price(act, "regenerate"):
            return price
        self._chats.regenerate(act.owner, act.message_id, sampling_from(sampling), begin_with=act.text)
        return self._done(request, act)

    @spoken
    def edit(self, request: gr.Request, data: gr.EventData, address: object, *sampling: object) -> object:
        """Another version of a question, and a reply to it."""
        act = Act.read(request, data, address)
        if price := self._price(act, "edit"):
            return price
        self._chats.edit(act.owner, act.message_id, act.text, sampling_from(sampling))
        return self._done(request, act)

    @spoken
    def edit_reply(self, request: gr.Request, data: gr.EventData, address: object) -> object:
        """Another version of a reply, in somebody's own words."""
        act = Act.read(request, data, address)
        if price := self._price(act, "edit_reply"):
            return price
        view = self._chats.edit_reply(act.owner, act.message_id, act.text, keep_rest=act.keep_rest)
        return self._drawn(request, act, view)

    @spoken
    def go_on(self, request: gr.Request, data: gr.EventData, address: object, *sampling: object) -> object:
        """Continue a reply that was cut."""
        act = Act.read(request, data, address)
        if price := self._price(act, "continue"):
            return price
        self._chats.continue_reply(act.owner, act.message_id, sampling_from(sampling))
        return self._done(request, act)

    @spoken
    def text(self, request: gr.Request, data: gr.EventData, address: object) -> object:
        """The text of a reply as it was written, to edit it; of one on its way, what there is so far."""
        act = Act.read(request, data, address)
        view = self._chats.view(act.owner, act.shown.conversation_id or "")
        text = next((message.text for message in view.messages if message.id == act.message_id), None)
        if text is None:
            raise NothingToDo(NOT_SHOWN)
        if view.job is not None and view.job.reply_id == act.message_id:
            text = view.job.view.text
        return {self._parts.verbs: {"number": act.number, "text": text}}

    @spoken
    def fork(self, request: gr.Request, data: gr.EventData, address: object, search: str) -> object:
        """A new chat with everything down to this message; the page shows it."""
        act = Act.read(request, data, address)
        forked = self._chats.fork(act.owner, act.message_id)
        picture = self._draw.arrive(request, forked.id, ROWS_AT_FIRST)
        return {**picture, **self._draw.around(act.owner, search)}

    @spoken
    def delete_branch(self, request: gr.Request, data: gr.EventData, address: object, search: str) -> object:
        """Deleted after the page asked once more. The chat may be named anew."""
        act = Act.read(request, data, address)
        view = self._chats.delete_branch(act.owner, act.message_id)
        return {**self._drawn(request, act, view), **self._draw.around(act.owner, search)}

    @spoken
    def version(self, request: gr.Request, data: gr.EventData, address: object) -> object:
        """The arrows of a message with several versions. Nothing is read for a look."""
        act = Act.read(request, data, address)
        view = self._chats.select(act.owner, act.message_id, 1 if _given(data, "step") == 1 else -1)
        return self._drawn(request, act, view)

    @spoken
    def undo(self, request: gr.Request, data: gr.EventData, address: object) -> object:
        """The chat before its last question, whose text the page puts back into the box."""
        owner, shown, conversation_id = self._whole_chat(request, address)
        undone = self._chats.undo(owner, conversation_id)
        answer: Picture = {self._parts.verbs: {"number": _number(data), "back": undone.text}}
        return {**self._draw.view(request, undone.view, shown.limit), **self._draw.signs(owner), **answer}

    @spoken
    def redo(self, request: gr.Request, data: gr.EventData, address: object) -> object:
        """What was undone last, and what followed it."""
        owner, shown, conversation_id = self._whole_chat(request, address)
        view = self._chats.redo(owner, conversation_id)
        answer: Picture = {self._parts.verbs: {"number": _number(data), "back": ""}}
        return {**self._draw.view(request, view, shown.limit), **self._draw.signs(owner), **answer}

    def _whole_chat(self, request: gr.Request, address: object) -> tuple[str, Shown, str]:
        shown = Shown.from_browser(address)
        if shown.conversation_id is None:
            raise NothingToDo(NO_CHAT)
        return owner_of(request), shown, shown.conversation_id

    def _price(self, act: Act, verb: CostlyVerb) -> Picture | None:
        """The question whether to go on, if there is anything to ask. What the model cannot read at all is
        left to the verb to refuse; an edited reply is not refused, so that is said."""
        if act.sure:
            return None
        cost = self._chats.cost_of(act.owner, verb, act.message_id, act.text, keep_rest=act.keep_rest)
        if cost is None or not is_worth_asking(cost):
            return None
        if cost.num_too_many and verb != "edit_reply":
            return None
        return {self._parts.verbs: {"number": act.number, "ask": price_line(cost, verb)}}

    def _done(self, request: gr.Request, act: Act) -> Picture:
        view = self._chats.view(act.owner, act.shown.conversation_id or "")
        return self._drawn(request, act, view)

    def _drawn(self, request: gr.Request, act: Act, view: ChatView) -> Picture:
        """The chat after the act, and the word that it is done."""
        done: Picture = {self._parts.verbs: {"number": act.number, "done": True}}
        return {**self._draw.view(request, view, act.shown.limit), **self._draw.signs(act.owner), **done}


def is_worth_asking(cost: Cost) -> bool:
    """Whether somebody should know before it is read."""
    takes_long = cost.seconds is None or cost.seconds >= WORTH_ASKING_S
    return cost.num_too_many > 0 or (cost.num_tokens >= WORTH_ASKING_TOKENS and takes_long)


def price_line(cost: Cost, verb: CostlyVerb) -> str:
    """`This reads 2,310 tokens again, about 8 s.`, without a time that nobody knows yet. A question that was
    edited may itself be what is long, and that is not read again. Where no reply can follow, that is told."""
    if cost.num_too_many:
        tokens = "1 token" if cost.num_too_many == 1 else f"{cost.num_too_many:,} tokens"
        return f"After this the chat is too long for another reply, by {tokens}."
    again = "" if verb == "edit" else " again"
    takes = "" if cost.seconds is None else f", about {_about(cost.seconds)}"
    return f"This reads {cost.num_tokens:,} tokens{again}{takes}."


def _about(seconds: float) -> str:
    """A guess, and it says so: whole seconds, then whole minutes."""
    return f"{max(1, round(seconds)):,} s" if seconds < 90 else f"{round(seconds / 60):,} min"


def _given(data: gr.EventData, name: str) -> object:
    """What a browser's event says under that name; None when it says nothing."""
    return getattr(data, name, None)


def _number(data: gr.EventData) -> int:
    number = _given(data, "number")
    return number if isinstance(number, int) else 0

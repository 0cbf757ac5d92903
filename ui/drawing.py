"""What a tab is shown after an action: pictures of what the chats hold now, for the one who asked."""

from __future__ import annotations

import time

import gradio as gr

from chat.chats import Chats, ChatView
from ui.conversation_list import listing
from ui.login import owner_of
from ui.screen import Parts, Picture, Status, chat_picture, empty_picture, status_value
from ui.shown import Shown
from ui.tabs import Tabs


class Drawing:
    """Draws for every tab of one page. Holds no state of any user, only who follows what."""

    def __init__(self, chats: Chats, parts: Parts, default_system_prompt: str) -> None:
        self._chats = chats
        self._parts = parts
        self._default_prompt = default_system_prompt
        self.tabs = Tabs()

    def arrive(self, request: gr.Request, conversation_id: str | None, limit: int) -> Picture:
        """Another conversation, or an empty page for None, with its system prompt in the drawer. Whoever
        opens a chat is likely to write in it: its cache is brought back meanwhile."""
        if conversation_id is None:
            self.tabs.draw(tab_of(request), None)
            return empty_picture(self._parts, self._default_prompt)
        view = self._chats.view(owner_of(request), conversation_id)
        self._chats.warm(owner_of(request), conversation_id)
        prompt: Picture = {self._parts.system_prompt: view.conversation.system_prompt}
        return {**self.view(request, view, limit), **prompt}

    def again(self, request: gr.Request, shown: Shown) -> Picture:
        """The conversation that this tab shows, read afresh."""
        if shown.conversation_id is None:
            return self.arrive(request, None, shown.limit)
        return self.view(request, self._chats.view(owner_of(request), shown.conversation_id), shown.limit)

    def view(self, request: gr.Request, view: ChatView, limit: int) -> Picture:
        """The view as a picture; from here on no earlier follower of this tab draws any more."""
        self.tabs.draw(tab_of(request), view.conversation.id)
        return self.chat(owner_of(request), view, limit)

    def chat(self, owner: str, view: ChatView, limit: int) -> Picture:
        """The view as a picture, for whoever may draw it."""
        return chat_picture(
            self._parts, view, limit, can_redo=self._chats.can_redo(owner, view.conversation.id)
        )

    def followed(self, owner: str, view: ChatView | None, limit: int) -> Picture:
        """What a follower may redraw: the view, or an empty page for None, and who is writing."""
        if view is None:
            whole = empty_picture(self._parts, self._default_prompt)
            return {part: value for part, value in whole.items() if part in self._parts.followed}
        return {**self.chat(owner, view, limit), self._parts.status: self.status(owner)}

    def around(self, owner: str, search: str) -> Picture:
        """The list and the signs."""
        return {self._parts.listing: self.listing(owner, search), **self.signs(owner)}

    def signs(self, owner: str) -> Picture:
        """The status, and a pulse for as long as it is going to change."""
        status = self.status(owner)
        going_on = status["writing"] or self._chats.is_saving() or status["model"]["state"] == "loading"
        return {self._parts.status: status, self._parts.pulse: gr.Timer(active=bool(going_on))}

    def status(self, owner: str) -> Status:
        """The model, who is still writing, and what keeps caches from being saved."""
        writing = sorted(self._chats.writing(owner))
        return status_value(self._chats.model_status(), writing, self._chats.saving_notice())

    def listing(self, owner: str, search: str) -> object:
        """The conversations that match what is typed in the search box."""
        return listing(self._chats.list(owner, search or ""), search=search or "", now=time.time())


def tab_of(request: gr.Request) -> str:
    """A name for the tab; tells tabs apart, proves nothing."""
    return str(request.session_hash)

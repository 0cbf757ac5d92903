"""What the page does when somebody acts. Each handler takes the owner from the request, asks `Chats`,
and returns a picture. None of them waits for the model: a reply is watched by `follow` afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial

import gradio as gr

from cache_store.errors import NotFound, StaleView
from chat.chats import Chats, ChatView
from ui.cache_panel import cache_panel
from ui.drawing import Drawing, tab_of
from ui.following import pictures
from ui.login import owner_of
from ui.sampling_form import form_values, kept_values, plain_values, sampling_from
from ui.screen import Parts, Picture
from ui.shown import ROWS_AT_FIRST, Shown
from ui.spoken_errors import say, spoken, spoken_stream, unchanged


class Handlers:
    """All of one page but the verbs (see `ui.verbs`). Holds no state of any user."""

    def __init__(self, chats: Chats, parts: Parts, draw: Drawing) -> None:
        self._chats = chats
        self._parts = parts
        self._draw = draw

    @spoken
    def load(self, request: gr.Request, address: object, kept: object, search: str) -> object:
        """The page opens, or opens again: show the conversation of its address if it is this owner's."""
        shown = Shown.from_browser(address)
        fields = dict(zip(self._parts.sampling, form_values(kept), strict=True))
        try:
            picture = self._draw.arrive(request, shown.conversation_id, shown.limit)
        except NotFound as exc:
            say(exc)
            picture = self._draw.arrive(request, None, shown.limit)
        return {**picture, **fields, **self._draw.around(owner_of(request), search)}

    @spoken
    def send(
        self, request: gr.Request, text: str | None, address: object, search: str, *sampling: object
    ) -> object:
        """Commit the text, then clear the box; the reply is on its way when this returns."""
        owner, shown = owner_of(request), Shown.from_browser(address)
        if not visible(text):
            return unchanged()
        try:
            job = self._chats.send(
                *(owner, text or ""),
                conversation_id=shown.conversation_id,
                leaf_id=shown.leaf_id,
                sampling=sampling_from(sampling),
            )
        except StaleView as exc:
            say(exc)
            return {**self._draw.again(request, shown), **self._draw.around(owner, search)}
        picture = self._draw.view(request, self._chats.view(owner, job.conversation_id), shown.limit)
        return {**picture, self._parts.box: "", **self._draw.around(owner, search)}

    @spoken
    def example(
        self, request: gr.Request, chosen: gr.SelectData, address: object, search: str, *sampling: object
    ) -> object:
        """An example prompt is sent as if it had been typed."""
        return self.send(request, str(chosen.value["text"]), address, search, *sampling)

    @spoken
    def earlier(self, request: gr.Request, address: object) -> object:
        """Forty more messages on top."""
        shown = Shown.from_browser(address)
        return self._draw.again(request, replace(shown, limit=shown.limit + ROWS_AT_FIRST))

    @spoken
    def stop(self, request: gr.Request, address: object) -> None:
        """Ask for the end of the reply in this tab's conversation."""
        conversation_id = Shown.from_browser(address).conversation_id
        if conversation_id:
            self._chats.stop(owner_of(request), conversation_id)

    @spoken
    def open(self, request: gr.Request, data: gr.EventData) -> object:
        """A conversation of the list."""
        return {
            **self._draw.arrive(request, str(data.id), ROWS_AT_FIRST),
            **self._draw.signs(owner_of(request)),
        }

    @spoken
    def new_chat(self, request: gr.Request) -> object:
        """An empty page; a conversation is made when its first message is sent."""
        return self._draw.arrive(request, None, ROWS_AT_FIRST)

    @spoken
    def find(self, request: gr.Request, search: str) -> object:
        """The list for what is typed in the search box."""
        return {self._parts.listing: self._draw.listing(owner_of(request), search)}

    @spoken
    def rename(self, request: gr.Request, data: gr.EventData, address: object, search: str) -> object:
        """A new title, typed in the list."""
        owner, shown = owner_of(request), Shown.from_browser(address)
        self._chats.rename(owner, str(data.id), str(data.title))
        picture: Picture = {self._parts.listing: self._draw.listing(owner, search)}
        if shown.conversation_id == data.id:
            view = self._chats.view(owner, str(data.id))
            picture[self._parts.shown] = self._draw.chat(owner, view, shown.limit)[self._parts.shown]
        return picture

    @spoken
    def delete(self, request: gr.Request, data: gr.EventData, address: object, search: str) -> object:
        """Deleted after the list asked once more; the page shows a new chat if it was this one."""
        owner, shown = owner_of(request), Shown.from_browser(address)
        self._chats.delete(owner, str(data.id))
        picture = self._draw.around(owner, search)
        if shown.conversation_id == data.id:
            picture.update(self._draw.arrive(request, None, ROWS_AT_FIRST))
        return picture

    @spoken
    def save_prompt(self, request: gr.Request, text: str | None, address: object, search: str) -> object:
        """The system prompt of this conversation, or of a new one that starts with it."""
        owner, shown = owner_of(request), Shown.from_browser(address)
        if shown.conversation_id is None:
            conversation = self._chats.create(owner, text or "")
        else:
            conversation = self._chats.set_system_prompt(owner, shown.conversation_id, text or "")
        gr.Info("The system prompt is saved and used from the next reply on.", title="", duration=4)
        return {
            **self._draw.arrive(request, conversation.id, shown.limit),
            **self._draw.around(owner, search),
        }

    @spoken
    def caches(self, request: gr.Request) -> object:
        """The drawer is open: what is kept of this owner's chats."""
        return {self._parts.caches: cache_panel(self._chats.cache_tree(owner_of(request)))}

    @spoken
    def keep_sampling(self, *sampling: object) -> object:
        """What the browser keeps for the next visit."""
        return kept_values(sampling)

    @spoken
    def reset_sampling(self) -> object:
        """The defaults again."""
        return list(plain_values())

    @spoken
    def pulse(self, request: gr.Request) -> object:
        """While something is going on: is the model there, who is still writing."""
        return self._draw.signs(owner_of(request))

    def unload(self, request: gr.Request) -> None:
        """The tab is gone; its follower ends, its reply goes on."""
        self._draw.tabs.close(tab_of(request))

    @spoken_stream
    async def follow(self, request: gr.Request, address: object) -> AsyncGenerator[object, None]:
        """Watch the reply of the conversation that this tab shows now, whatever it shows later."""
        owner, shown, tab = owner_of(request), Shown.from_browser(address), tab_of(request)
        tabs = self._draw.tabs
        ticket = tabs.follow(tab, shown.conversation_id)
        if ticket is None:
            return
        with tabs.following(tab, ticket):
            overtook = await tabs.outlast(tab, ticket)
            view = await asyncio.to_thread(self._view, owner, shown)
            if overtook:
                yield await asyncio.to_thread(self._draw.followed, owner, view, shown.limit)
            if view is None:
                return
            wanted = partial(tabs.is_newest, tab, ticket)
            async for picture in pictures(self._parts, view, shown.limit, wanted):
                yield picture
            if view.job is not None or shown.writing:  # it may have ended before we came
                view = await asyncio.to_thread(self._view, owner, shown)
                picture = await asyncio.to_thread(self._draw.followed, owner, view, shown.limit)
                if wanted():
                    yield picture

    def _view(self, owner: str, shown: Shown) -> ChatView | None:
        """What the tab shows as it stands now; None for an empty page."""
        return self._chats.view(owner, shown.conversation_id) if shown.conversation_id else None


def visible(text: str | None) -> bool:
    """False for nothing, white space and zero-width characters."""
    return bool((text or "").strip(" \t\r\n\v\f\u00a0\u200b\u200c\u200d\u2060\ufeff").strip())

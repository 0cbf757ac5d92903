"""The page: its parts (see `ui.layout`), and which handler answers to what.

Every event is private and unlimited in concurrency, because none of them waits for the model. After
an action the page follows the reply of the conversation it then shows, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gradio as gr

from chat.chats import Chats
from ui.drawing import Drawing
from ui.handlers import Handlers
from ui.kind_panel import KindVerbs
from ui.layout import lay_out
from ui.screen import Parts
from ui.verbs import Verbs

TITLE = "Keepwarm"

ADDRESS_JS = """(shown, kept, search) => [window.keepwarm.fromAddress(), kept, search]"""

ARRIVED_JS = "() => window.keepwarm.arrived()"


def build_page(chats: Chats, *, default_system_prompt: str = "") -> gr.Blocks:
    """The whole page over `chats`. `default_system_prompt` is what a new chat's drawer shows."""
    with gr.Blocks(title=TITLE, fill_width=True, analytics_enabled=False) as page:
        parts = lay_out(default_system_prompt)
        draw = Drawing(chats, parts, default_system_prompt)
        _wire(page, parts, Handlers(chats, parts, draw), Verbs(chats, parts, draw))
        _wire_kinds(parts, KindVerbs(chats, parts, draw))
    return page


def _custom(part: gr.HTML, event: str) -> Any:
    """An event that the part's own script triggers."""
    return getattr(part, event)


def quick(
    event: Any, handler: Callable[..., object], inputs: list[Any], outputs: list[Any], **options: Any
) -> Any:
    """Bind an event that is answered at once."""
    options = {"queue": False, "show_progress": "hidden", "trigger_mode": "multiple", **options}
    return event(handler, inputs, outputs, api_visibility="private", **options)


def _wire_kinds(parts: Parts, do: KindVerbs) -> None:
    """The section about the kind of cache."""
    kinds, shown = parts.kinds, parts.shown
    quick(_custom(kinds, "look"), do.look, [shown], [kinds], trigger_mode="always_last")
    quick(_custom(kinds, "choose"), do.choose, [shown, parts.search], [*parts.screen, kinds])
    quick(_custom(kinds, "measure"), do.measure, [shown], [kinds])
    quick(_custom(kinds, "shrink"), do.shrink, [shown], [kinds])


def _wire(page: gr.Blocks, parts: Parts, do: Handlers, verbs: Verbs) -> None:
    """Bind every event. `act` changes the screen and then follows; `quick` does not touch the chat."""
    screen, sampling, shown, search = parts.screen, list(parts.sampling), parts.shown, parts.search

    def follow(event: Any) -> None:
        quick(event, do.follow, [shown], parts.followed, queue=True, concurrency_limit=None)

    def act(
        event: Any, handler: Callable[..., object], inputs: list[Any], outputs: list[Any], **options: Any
    ) -> Any:
        acted = quick(event, handler, inputs, outputs, queue=True, concurrency_limit=None, **options)
        follow(acted.then)
        return acted

    arrival = [shown, parts.kept_sampling, search]
    arrived = act(page.load, do.load, arrival, [*screen, *sampling], js=ADDRESS_JS)
    arrived.then(None, js=ARRIVED_JS, api_visibility="private")
    act(parts.box.submit, do.send, [parts.box, shown, search, *sampling], screen)
    act(parts.chat.example_select, do.example, [shown, search, *sampling], screen)
    for verb in (verbs.regenerate, verbs.edit, verbs.go_on):
        act(_custom(parts.verbs, verb.__name__), verb, [shown, *sampling], screen)
    for verb in (verbs.edit_reply, verbs.version, verbs.undo, verbs.redo):
        act(_custom(parts.verbs, verb.__name__), verb, [shown], screen)
    for verb in (verbs.fork, verbs.delete_branch):
        act(_custom(parts.verbs, verb.__name__), verb, [shown, search], screen)
    act(_custom(parts.marks, "earlier"), do.earlier, [shown], screen)
    act(_custom(parts.listing, "open"), do.open, [], screen)
    act(parts.new_chat.click, do.new_chat, [], screen)
    removed = act(_custom(parts.listing, "remove"), do.delete, [shown, search], screen)
    act(parts.save_prompt.click, do.save_prompt, [parts.system_prompt, shown, search], screen)

    follow(_custom(parts.live, "silence"))
    quick(_custom(parts.caches, "look"), do.caches, [], [parts.caches], trigger_mode="always_last")
    quick(removed.then, do.caches, [], [parts.caches])
    quick(_custom(parts.verbs, "text"), verbs.text, [shown], [parts.verbs])
    quick(parts.box.stop, do.stop, [shown], [])
    quick(parts.search.change, do.find, [search], [parts.listing], trigger_mode="always_last")
    quick(_custom(parts.listing, "rename"), do.rename, [shown, search], [parts.listing, shown])
    quick(parts.pulse.tick, do.pulse, [], [parts.status, parts.pulse], trigger_mode="once")
    quick(parts.reset_sampling.click, do.reset_sampling, [], sampling)
    changed = partial(gr.on, [field.change for field in sampling])  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    quick(changed, do.keep_sampling, sampling, [parts.kept_sampling], trigger_mode="always_last")
    page.unload(do.unload)

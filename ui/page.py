"""The page: which parts there are, where they stand, and which handler answers to what.

Every event is private and unlimited in concurrency, because none of them waits for the model. After
an action the page follows the reply of the conversation it then shows, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gradio as gr

from chat.chats import Chats
from ui.handlers import Handlers
from ui.sampling_form import STORAGE_KEY, STORAGE_SECRET, sampling_fields
from ui.screen import Parts
from ui.theme import asset

TITLE = "Keepwarm"

EXAMPLES = (
    "Explain how a heat pump works, as if to a curious twelve-year-old.",
    "Write a Python function that finds the longest word in a text, with a short test.",
    "Give me a relaxed three-day plan for a first visit to Lisbon.",
)

LATEX = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
    {"left": "\\[", "right": "\\]", "display": True},
]

PULSE_EVERY_S = 2.0

LONGEST_MESSAGE = 1_000_000
"""Characters; far above any context, and below what would hurt the browser."""

ADDRESS_JS = """(shown, kept, search) => [window.keepwarm.fromAddress(), kept, search]"""

ARRIVED_JS = "() => window.keepwarm.arrived()"


def build_page(chats: Chats, *, default_system_prompt: str = "") -> gr.Blocks:
    """The whole page over `chats`. `default_system_prompt` is what a new chat's drawer shows."""
    with gr.Blocks(title=TITLE, fill_width=True, analytics_enabled=False) as page:
        parts = _lay_out(default_system_prompt)
        _wire(page, parts, Handlers(chats, parts, default_system_prompt))
    return page


def _lay_out(default_system_prompt: str) -> Parts:
    kept_sampling = gr.BrowserState({}, storage_key=STORAGE_KEY, secret=STORAGE_SECRET)
    pulse = gr.Timer(PULSE_EVERY_S, active=False)
    status = _painted("status", asset("topbar.html"), asset("status.js"))
    with gr.Column(elem_id="sidebar"):
        new_chat = gr.Button("New chat", elem_id="new-chat")
        search = gr.Textbox(
            "",
            label="Search chats",
            placeholder="Search",
            show_label=False,
            container=False,
            elem_id="search",
        )
        listing = _painted("conversations", "<nav aria-label='Chats'></nav>", asset("conversations.js"))
    with gr.Column(elem_id="main"):
        chat = _chatbot()
        marks = _painted("marks", "<span hidden></span>", asset("marks.js"))
        live = _painted("live", "<span hidden></span>", asset("live.js"))
        shown = _painted("shown", "<span hidden></span>", asset("shown.js"))
        _fixed("<div></div>", "notice")
        with gr.Column(elem_id="composer"):
            box = gr.Textbox(
                "",
                label="Message",
                placeholder="Message Keepwarm",
                show_label=False,
                container=False,
                lines=1,
                max_lines=8,
                max_length=LONGEST_MESSAGE,
                submit_btn=True,
                stop_btn=False,
                autofocus=True,
                elem_id="message",
            )
    with gr.Column(elem_id="drawer"):
        _fixed(asset("drawer_top.html"), "model-card")
        _fixed("<h2>System prompt</h2>")
        system_prompt = gr.Textbox(
            default_system_prompt,
            label="System prompt of this chat",
            show_label=False,
            container=False,
            info="Changing it means that this chat is read again from the beginning.",
            lines=4,
            max_lines=12,
            elem_id="system-prompt",
        )
        save_prompt = gr.Button("Save system prompt", elem_id="save-system-prompt", size="sm")
        _fixed("<h2>Sampling</h2>")
        with gr.Column(elem_id="sampling"):
            sampling = sampling_fields()
        reset_sampling = gr.Button("Reset to defaults", elem_id="reset-sampling", size="sm")
    return Parts(
        *(
            box,
            chat,
            marks,
            live,
            shown,
            listing,
            status,
            pulse,
            new_chat,
            search,
            system_prompt,
            save_prompt,
        ),
        *(sampling, reset_sampling, kept_sampling),
    )


def _painted(elem_id: str, template: str, script: str) -> gr.HTML:
    """A part whose value is data and whose looks are made by our script, with text nodes only."""
    return gr.HTML({}, html_template=template, js_on_load=script, elem_id=elem_id, apply_default_css=False)


def _fixed(markup: str, elem_id: str | None = None) -> gr.HTML:
    return gr.HTML(markup, js_on_load=None, elem_id=elem_id, apply_default_css=False)


def _chatbot() -> gr.Chatbot:
    return gr.Chatbot(
        elem_id="chat",
        label="Chat",
        show_label=False,
        container=False,
        height="100%",
        editable="user",
        buttons=["copy"],
        layout="bubble",
        autoscroll=False,  # shown.js follows the end, and only for a reader who is there
        feedback_options=None,
        group_consecutive_messages=False,
        sanitize_html=True,
        allow_tags=True,  # an unknown tag is shown as it was written, not dropped
        latex_delimiters=LATEX,
        placeholder="## What is on your mind?",
        examples=[{"text": text} for text in EXAMPLES],
    )


def _custom(part: gr.HTML, event: str) -> Any:
    """An event that the part's own script triggers."""
    return getattr(part, event)


def _wire(page: gr.Blocks, parts: Parts, do: Handlers) -> None:
    """Bind every event. `act` changes the screen and then follows; `quick` does not touch the chat."""
    screen, sampling, shown, search = parts.screen, list(parts.sampling), parts.shown, parts.search

    def quick(
        event: Any, handler: Callable[..., object], inputs: list[Any], outputs: list[Any], **options: Any
    ) -> Any:
        options = {"queue": False, "show_progress": "hidden", "trigger_mode": "multiple", **options}
        return event(handler, inputs, outputs, api_visibility="private", **options)

    def act(
        event: Any, handler: Callable[..., object], inputs: list[Any], outputs: list[Any], **options: Any
    ) -> Any:
        acted = quick(event, handler, inputs, outputs, queue=True, concurrency_limit=None, **options)
        quick(acted.then, do.follow, [shown], parts.followed, queue=True, concurrency_limit=None)
        return acted

    arrival = [shown, parts.kept_sampling, search]
    arrived = act(page.load, do.load, arrival, [*screen, *sampling], js=ADDRESS_JS)
    arrived.then(None, js=ARRIVED_JS, api_visibility="private")
    act(parts.box.submit, do.send, [parts.box, shown, search, *sampling], screen)
    act(parts.chat.example_select, do.example, [shown, search, *sampling], screen)
    act(parts.chat.retry, do.retry, [shown, *sampling], screen)
    act(parts.chat.edit, do.edit, [parts.box, shown, *sampling], screen)
    act(_custom(parts.marks, "again"), do.try_again, [shown, *sampling], screen)
    act(_custom(parts.marks, "version"), do.version, [shown], screen)
    act(_custom(parts.marks, "earlier"), do.earlier, [shown], screen)
    act(_custom(parts.listing, "open"), do.open, [], screen)
    act(parts.new_chat.click, do.new_chat, [], screen)
    act(_custom(parts.listing, "remove"), do.delete, [shown, search], screen)
    act(parts.save_prompt.click, do.save_prompt, [parts.system_prompt, shown, search], screen)

    quick(parts.box.stop, do.stop, [shown], [])
    quick(parts.search.change, do.find, [search], [parts.listing], trigger_mode="always_last")
    quick(_custom(parts.listing, "rename"), do.rename, [shown, search], [parts.listing, shown])
    quick(parts.pulse.tick, do.pulse, [], [parts.status, parts.pulse], trigger_mode="once")
    quick(parts.reset_sampling.click, do.reset_sampling, [], sampling)
    changed = partial(gr.on, [field.change for field in sampling])  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    quick(changed, do.keep_sampling, sampling, [parts.kept_sampling], trigger_mode="always_last")
    page.unload(do.unload)

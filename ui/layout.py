"""Which parts the page has and where they stand: the list on the left, the chat, the drawer on the right."""

from __future__ import annotations

import gradio as gr
from gradio.components import Component

from ui.painted import painted
from ui.sampling_form import STORAGE_KEY, STORAGE_SECRET, sampling_fields
from ui.screen import Parts
from ui.theme import asset

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


def lay_out(default_system_prompt: str) -> Parts:
    """Make every part, within the `gr.Blocks` that is being built."""
    kept_sampling = gr.BrowserState({}, storage_key=STORAGE_KEY, secret=STORAGE_SECRET)
    pulse = gr.Timer(PULSE_EVERY_S, active=False)
    status = painted("status", asset("topbar.html"), asset("status.js"))
    with gr.Column(elem_id="sidebar"):
        new_chat, search, listing = _sidebar()
    with gr.Column(elem_id="main"):
        chat, marks, verbs, live, shown, box = _main()
    with gr.Column(elem_id="drawer"):
        system_prompt, save_prompt, sampling, reset_sampling = _drawer(default_system_prompt)
        _fixed("<h2>Cache of this chat</h2>")
        kinds = painted("kinds", "<section aria-label='Cache of this chat'></section>", asset("kinds.js"))
        _fixed("<h2>All caches</h2>")
        caches = painted("caches", "<section aria-label='All caches'></section>", asset("caches.js"))
    return Parts(
        box=box,
        chat=chat,
        marks=marks,
        verbs=verbs,
        live=live,
        shown=shown,
        listing=listing,
        status=status,
        pulse=pulse,
        new_chat=new_chat,
        search=search,
        system_prompt=system_prompt,
        save_prompt=save_prompt,
        sampling=sampling,
        reset_sampling=reset_sampling,
        kept_sampling=kept_sampling,
        kinds=kinds,
        caches=caches,
    )


def _sidebar() -> tuple[gr.Button, gr.Textbox, gr.HTML]:
    new_chat = gr.Button("New chat", elem_id="new-chat")
    search = gr.Textbox(
        "",
        label="Search chats",
        placeholder="Search",
        show_label=False,
        container=False,
        elem_id="search",
    )
    listing = painted("conversations", "<nav aria-label='Chats'></nav>", asset("conversations.js"))
    return new_chat, search, listing


def _main() -> tuple[gr.Chatbot, gr.HTML, gr.HTML, gr.HTML, gr.HTML, gr.Textbox]:
    chat = _chatbot()
    marks = painted("marks", "<span hidden></span>", asset("marks.js"))
    verbs = painted("verbs", "<span hidden></span>", asset("verbs.js"))
    live = painted("live", "<span hidden></span>", asset("live.js"))
    shown = painted("shown", "<span hidden></span>", asset("shown.js"))
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
            stop_btn=True,  # the style shows one of the two
            autofocus=True,
            elem_id="message",
        )
    return chat, marks, verbs, live, shown, box


def _drawer(default_system_prompt: str) -> tuple[gr.Textbox, gr.Button, tuple[Component, ...], gr.Button]:
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
    return system_prompt, save_prompt, sampling, reset_sampling


def _fixed(markup: str, elem_id: str | None = None) -> gr.HTML:
    return gr.HTML(markup, js_on_load=None, elem_id=elem_id, apply_default_css=False)


def _chatbot() -> gr.Chatbot:
    return gr.Chatbot(
        elem_id="chat",
        label="Chat",
        show_label=False,
        container=False,
        height="100%",
        buttons=["copy"],  # hidden, and clicked by marks.js
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

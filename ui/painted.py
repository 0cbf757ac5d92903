"""Parts of the page whose value is data and whose looks are made by a script of ours, with text nodes only.

The data travels as JSON text. While an event runs, Gradio sends what changed since the event's last word, and
its browser side makes those changes within the very objects that it gave to the page, looked at or not: the
"nothing new" that ends an event empties a last picture that came in one breath with it. Within a text nothing
can be changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

import gradio as gr

READ_JS = "const told = () => JSON.parse(props.value || '{}');\n"
"""How a script gets at its part's data."""


def painted(elem_id: str, template: str, script: str) -> gr.HTML:
    """`script` runs once: it paints what `told()` returns, and again whenever `watch` tells of another."""
    return gr.HTML(
        "{}", html_template=template, js_on_load=READ_JS + script, elem_id=elem_id, apply_default_css=False
    )


def sealed(picture: object) -> object:
    """A handler's picture with the data of painted parts as text; anything else as it is."""
    if not isinstance(picture, dict):
        return picture
    parts = cast("dict[object, object]", picture)
    return {
        part: _text(cast("Mapping[str, object]", value))
        if isinstance(part, gr.HTML) and isinstance(value, Mapping)
        else value
        for part, value in parts.items()
    }


def _text(data: Mapping[str, object]) -> str:
    """Without `<`, for which Gradio looks in values of this kind."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")

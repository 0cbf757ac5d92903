"""The sampling fields of the drawer, and the one way from their values to `SamplingSettings`.

The values are kept per browser, as a plain dict under `STORAGE_KEY`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import gradio as gr
from gradio.components import Component

from chat.settings import SamplingSettings

STORAGE_KEY = "keepwarm.sampling"
STORAGE_SECRET = "keepwarm-sampling-1"  # not a secret: a fixed key so that a restart can read it again

NAMES: tuple[str, ...] = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "seed",
    "stop_strings",
)

LABELS = {
    "temperature": "Temperature",
    "top_p": "Top-p",
    "top_k": "Top-k",
    "min_p": "Min-p",
    "repetition_penalty": "Repetition penalty",
    "max_new_tokens": "Most new tokens",
    "seed": "Seed",
    "stop_strings": "Stop strings",
}

LIMITS = {
    "temperature": "between 0 and 5",
    "top_p": "above 0 and at most 1",
    "top_k": "0 or more",
    "min_p": "at least 0 and below 1",
    "repetition_penalty": "between 0.1 and 5",
    "max_new_tokens": "1 or more",
    "seed": "empty, or a whole number from 0 up",
    "stop_strings": "one per line",
}


class InvalidSampling(Exception):
    """A field of the drawer holds a value that no reply can be written with; the text is for people."""


def sampling_fields() -> tuple[Component, ...]:
    """Create the fields inside the current Blocks context, in the order of `NAMES`."""
    plain = SamplingSettings()
    return (
        gr.Slider(
            0, 2, plain.temperature, step=0.05, label="Temperature", info="0 always takes the likeliest token"
        ),
        gr.Slider(0.05, 1, plain.top_p, step=0.01, label="Top-p"),
        gr.Slider(0, 200, plain.top_k, step=1, label="Top-k", info="0 switches it off"),
        gr.Slider(0, 0.5, plain.min_p, step=0.01, label="Min-p"),
        gr.Slider(0.5, 2, plain.repetition_penalty, step=0.01, label="Repetition penalty"),
        gr.Number(plain.max_new_tokens, precision=0, label="Most new tokens", elem_id="max-new-tokens"),
        gr.Textbox("", label="Seed", placeholder="A new one for each reply", max_lines=1, elem_id="seed"),
        gr.Textbox(
            "", label="Stop strings", info="One per line", lines=2, max_lines=6, elem_id="stop-strings"
        ),
    )


def sampling_from(values: tuple[object, ...]) -> SamplingSettings:
    """Read the fields, in the order of `NAMES`. Raises InvalidSampling naming the first bad one."""
    given = dict(zip(NAMES, values, strict=True))
    try:
        return SamplingSettings(
            temperature=_number(given, "temperature"),
            top_p=_number(given, "top_p"),
            top_k=_count(given, "top_k"),
            min_p=_number(given, "min_p"),
            repetition_penalty=_number(given, "repetition_penalty"),
            max_new_tokens=_count(given, "max_new_tokens"),
            seed=_seed(given.get("seed")),
            stop_strings=tuple(
                line for line in str(given.get("stop_strings") or "").split("\n") if line.strip()
            ),
        )
    except ValueError as exc:
        name = next((name for name in NAMES if str(exc).startswith(f"{name} ")), None)
        raise _invalid(name) from exc


def form_values(kept: object) -> tuple[object, ...]:
    """What the fields show for the dict that a browser kept; plain defaults where it has nothing usable."""
    values = dict(zip(NAMES, plain_values(), strict=True))
    if isinstance(kept, Mapping):
        values.update({k: v for k, v in cast("Mapping[str, object]", kept).items() if k in values})
    try:
        sampling_from(tuple(values.values()))
    except InvalidSampling:
        return plain_values()
    return tuple(values.values())


def plain_values() -> tuple[object, ...]:
    """The defaults, as the fields show them."""
    plain = SamplingSettings()
    return (
        plain.temperature,
        plain.top_p,
        plain.top_k,
        plain.min_p,
        plain.repetition_penalty,
        plain.max_new_tokens,
        "",
        "",
    )


def kept_values(values: tuple[object, ...]) -> dict[str, object]:
    """The dict that a browser keeps; `form_values` reads it back."""
    return dict(zip(NAMES, values, strict=True))


def _number(given: Mapping[str, object], name: str) -> float:
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _invalid(name)
    return float(value)


def _count(given: Mapping[str, object], name: str) -> int:
    value = _number(given, name)
    if not value.is_integer():
        raise _invalid(name)
    return int(value)


def _seed(value: object) -> int | None:
    text = str(value if value is not None else "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise _invalid("seed")
    return int(text)


def _invalid(name: str | None) -> InvalidSampling:
    if name is None:
        return InvalidSampling(
            "A sampling setting is out of range; nothing was sent, please correct it in Settings."
        )
    return InvalidSampling(
        f"{LABELS[name]} must be {LIMITS[name]}; nothing was sent, please correct it in Settings."
    )

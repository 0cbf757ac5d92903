"""How the page looks: a Gradio theme, our style sheets, and the scripts that run before the page.

Nothing comes from another host: system fonts only, and every asset is a file next to this one.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from gradio.themes import Base
from gradio.themes.utils.colors import Color

ASSETS = Path(__file__).parent / "assets"

STYLES = ("base.css", "frame.css", "sidebar.css", "chat.css", "verbs.css", "composer.css", "drawer.css")
SCRIPTS = ("page.js", "menu.js", "opening.js")

EMBER = Color(
    *(
        "#fdf4ef",
        "#fae4d8",
        "#f4c8b1",
        "#eca583",
        "#e2805a",
        "#cf6137",
        "#b54a24",
        "#933b1f",
        "#76321d",
        "#612c1c",
    ),
    "#34140b",
    name="ember",
)
SAND = Color(
    *(
        "#faf9f7",
        "#f3f1ed",
        "#e7e3dd",
        "#d3cdc4",
        "#a59d92",
        "#7a7268",
        "#5b544c",
        "#443f39",
        "#2b2825",
        "#1d1b19",
    ),
    "#151412",
    name="sand",
)

SANS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif"]
MONO = ["ui-monospace", "SF Mono", "Cascadia Code", "Noto Sans Mono", "monospace"]


def launch_looks() -> dict[str, object]:
    """Keyword arguments for `Blocks.launch`: theme and head.

    The style sheets go into the head, because Gradio prefixes every selector of its `css` argument, which
    would keep them from looking at the document's own classes.
    """
    css = "\n".join(asset(name) for name in STYLES)
    scripts = "\n".join(asset(name) for name in SCRIPTS)
    return {"theme": _theme(), "head": f"<style>{css}</style>\n<script>{scripts}</script>"}


@cache
def asset(name: str) -> str:
    """The text of a file in `assets`."""
    return (ASSETS / name).read_text(encoding="utf-8")


def _theme() -> Base:
    plain = Base(
        primary_hue=EMBER, neutral_hue=SAND, radius_size="lg", text_size="md", font=SANS, font_mono=MONO
    )
    return plain.set(  # pyright: ignore[reportUnknownMemberType]
        body_background_fill="#fffefc",
        body_background_fill_dark="#1b1a18",
        body_text_color="#23201c",
        body_text_color_dark="#ebe7e1",
        body_text_color_subdued="#726a60",
        body_text_color_subdued_dark="#a39b90",
        background_fill_primary="#fffefc",
        background_fill_primary_dark="#1b1a18",
        background_fill_secondary="#f6f4f0",
        background_fill_secondary_dark="#262421",
        border_color_primary="#e7e3dd",
        border_color_primary_dark="#35322e",
        color_accent="#b54a24",
        link_text_color="#a5431f",
        link_text_color_dark="#eca583",
        slider_color="#b54a24",
        slider_color_dark="#e2805a",
        input_background_fill="#fffefc",
        input_background_fill_dark="#211f1d",
        block_label_text_color="#5b544c",
        block_label_text_color_dark="#c4bdb3",
    )

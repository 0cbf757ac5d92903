"""The page on a phone and in the dark."""

from __future__ import annotations

from playwright.sync_api import Locator, expect

from tests.browser.conftest import FEW_TOKENS
from tests.browser.profiles import Profiles


def test_a_phone_has_the_whole_width_for_the_chat(profiles: Profiles) -> None:
    kept = profiles.with_replies_of(FEW_TOKENS)
    phone = profiles.new(
        storage_state=kept.kept_for(kept.address),
        viewport={"width": 390, "height": 844},
        has_touch=True,
        is_mobile=True,
    )
    tab = phone.tab().open()
    sidebar = tab.page.locator("#sidebar")
    expect(sidebar).to_be_hidden()
    expect(tab.box).to_be_in_viewport()
    tab.box.fill("Name an animal.")
    tab.send_button.tap()
    tab.wait_for_reply()
    expect(tab.send_button).to_be_in_viewport()
    box = tab.send_button.bounding_box()
    assert box is not None
    assert min(box["width"], box["height"]) >= 44
    assert tab.page.evaluate("() => document.documentElement.scrollWidth") <= 390

    tab.page.get_by_role("button", name="Chats").tap()
    expect(sidebar).to_be_visible()
    tab.entry("The long one").locator(".kw-open").tap()
    expect(sidebar).to_be_hidden()
    expect(tab.rows).to_have_count(40)


def test_the_page_follows_a_dark_colour_scheme(profiles: Profiles) -> None:
    tab = profiles.new(color_scheme="dark").tab().open()
    tab.open_entry("The long one")
    assert brightness(tab.page.locator("body"), "backgroundColor") < 60
    assert brightness(tab.questions.last, "color") > 180
    light = profiles.new(color_scheme="light").tab().open()
    assert brightness(light.page.locator("body"), "backgroundColor") > 220


def brightness(where: Locator, colour: str) -> float:
    """0 is black, 255 is white."""
    return where.evaluate(
        "(node, name) => { const [r, g, b] = getComputedStyle(node)[name].match(/[\\d.]+/g).map(Number);"
        " return (r + g + b) / 3; }",
        colour,
    )

"""Whose turn it is in a tab: one follower counts, and the last word is its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from ui.tabs import MOST_WAITS, Tabs


def ticket_of(tabs: Tabs, tab: str = "tab", conversation_id: str | None = "c1") -> int:
    ticket = tabs.follow(tab, conversation_id)
    assert ticket is not None
    return ticket


def outlasted(tabs: Tabs, ticket: int, step: Callable[[], None] = lambda: None) -> tuple[bool, int]:
    """Whether there was an older follower, and how many pauses were made; each pause runs `step`."""
    num_pauses = 0

    async def pause(_: float) -> None:
        nonlocal num_pauses
        num_pauses += 1
        step()

    return asyncio.run(tabs.outlast("tab", ticket, pause)), num_pauses


def test_tabs_do_not_disturb_each_other() -> None:
    tabs = Tabs()
    one, two = ticket_of(tabs, "one"), ticket_of(tabs, "two")
    ticket_of(tabs, "two")
    assert tabs.is_newest("one", one)
    assert not tabs.is_newest("two", two)


def test_a_new_picture_voids_every_follower_of_the_tab() -> None:
    tabs = Tabs()
    ticket = ticket_of(tabs)
    tabs.draw("tab", "c1")
    assert not tabs.is_newest("tab", ticket)


def test_a_late_follower_of_what_is_not_shown_any_more_gets_no_ticket() -> None:
    """C40."""
    tabs = Tabs()
    tabs.draw("tab", "c2")
    ticket = ticket_of(tabs, conversation_id="c2")
    assert tabs.follow("tab", "c1") is None
    assert tabs.follow("tab", None) is None
    assert tabs.is_newest("tab", ticket)


def test_a_tab_from_before_a_restart_may_follow_what_it_shows() -> None:
    assert Tabs().follow("tab", "c1") is not None


def test_a_closed_tab_has_no_newest_follower() -> None:
    tabs = Tabs()
    tabs.draw("tab", "c1")
    ticket = ticket_of(tabs)
    tabs.close("tab")
    assert not tabs.is_newest("tab", ticket)
    assert tabs.follow("tab", "c2") is not None


def test_a_follower_from_before_its_tab_was_closed_stays_void_when_the_tab_is_back() -> None:
    """A laptop that slept: the same tab again, while its old follower has not noticed yet."""
    tabs = Tabs()
    old = ticket_of(tabs)
    tabs.close("tab")
    new = ticket_of(tabs)
    assert tabs.is_newest("tab", new)
    assert not tabs.is_newest("tab", old)


def test_a_follower_waits_for_the_last_words_of_an_older_one() -> None:
    """C40."""
    tabs, old = Tabs(), ExitStack()
    old.enter_context(tabs.following("tab", ticket_of(tabs)))
    ticket = ticket_of(tabs)
    with tabs.following("tab", ticket):
        assert outlasted(tabs, ticket, old.close) == (True, 1)
        assert outlasted(tabs, ticket) == (False, 0)


def test_nobody_waits_for_followers_of_other_tabs_or_for_newer_ones() -> None:
    tabs = Tabs()
    ticket = ticket_of(tabs)
    with tabs.following("elsewhere", ticket_of(tabs, "elsewhere")), tabs.following("tab", ticket_of(tabs)):
        assert outlasted(tabs, ticket) == (False, 0)


def test_a_follower_that_is_overtaken_while_it_waits_says_nothing() -> None:
    tabs = Tabs()
    with tabs.following("tab", ticket_of(tabs)):
        ticket = ticket_of(tabs)
        assert outlasted(tabs, ticket, lambda: tabs.draw("tab", "c2")) == (False, 1)


def test_a_follower_that_never_ends_is_not_waited_for_for_ever() -> None:
    tabs = Tabs()
    with tabs.following("tab", ticket_of(tabs)):
        ticket = ticket_of(tabs)
        assert outlasted(tabs, ticket) == (True, MOST_WAITS)

"""The list on the left: conversations in date groups, as plain data that our script draws.

Titles are somebody's text. They go to the browser as data and are set there as text nodes; they never
pass through a template.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, timedelta, tzinfo
from typing import TypedDict

from cache_store.records import Conversation

MOST_LISTED = 300
"""More than this is found by the search; a list of thousands would only cost time."""


class Item(TypedDict):
    """One conversation of the list."""

    id: str
    title: str


class Group(TypedDict):
    """Conversations last used in one stretch of time."""

    label: str
    items: list[Item]


class Listing(TypedDict):
    """The whole list. `note` is a sentence for an empty or a shortened list."""

    groups: list[Group]
    note: str | None


def listing(
    conversations: Sequence[Conversation], *, search: str, now: float, timezone: tzinfo | None = None
) -> Listing:
    """Group conversations, which come last used first, by the day of `now` in `timezone` (None: local)."""
    today = datetime.fromtimestamp(now, timezone).date()
    groups: list[Group] = []
    for conversation in conversations[:MOST_LISTED]:
        used = datetime.fromtimestamp(conversation.updated_at, timezone).date()
        label = date_label(used, today)
        if not groups or groups[-1]["label"] != label:
            groups.append({"label": label, "items": []})
        groups[-1]["items"].append({"id": conversation.id, "title": conversation.title})
    return {"groups": groups, "note": _note(len(conversations), search)}


def date_label(day: date, today: date) -> str:
    """`Today`, `Yesterday`, `Previous 7 days`, then `March`, then `March 2025`."""
    age = today - day
    if age < timedelta(days=1):
        return "Today"
    if age < timedelta(days=2):
        return "Yesterday"
    if age <= timedelta(days=7):
        return "Previous 7 days"
    month = MONTHS[day.month - 1]
    return month if day.year == today.year else f"{month} {day.year}"


MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
"""Spelled out here, because `strftime` would follow the locale of the host, not of the page."""


def _note(num_found: int, search: str) -> str | None:
    if num_found == 0:
        return "Nothing matches this search." if search.strip() else "Your chats will appear here."
    if num_found > MOST_LISTED:
        return f"{num_found - MOST_LISTED:,} older chats: use the search to find them."
    return None

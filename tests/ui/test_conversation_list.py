"""Date groups of the list on the left."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from cache_store.records import Conversation
from ui.conversation_list import MOST_LISTED, date_label, listing

NOW = datetime(2026, 3, 10, 0, 30, tzinfo=timezone.utc)


def used(before: timedelta, title: str = "A chat") -> Conversation:
    at = (NOW - before).timestamp()
    return Conversation(f"c{before.total_seconds():.0f}", "me", title, "", at, at)


def labels(*conversations: Conversation) -> list[str]:
    shown = listing(conversations, search="", now=NOW.timestamp(), timezone=timezone.utc)
    return [group["label"] for group in shown["groups"]]


def test_groups_go_from_today_to_months_of_other_years() -> None:
    ages = [
        timedelta(minutes=5),
        timedelta(hours=3),
        timedelta(days=4),
        timedelta(days=30),
        timedelta(days=400),
    ]
    assert labels(*map(used, ages)) == ["Today", "Yesterday", "Previous 7 days", "February", "February 2025"]


def test_yesterday_begins_at_midnight_and_not_after_24_hours() -> None:
    assert labels(used(timedelta(minutes=29))) == ["Today"]
    assert labels(used(timedelta(minutes=31))) == ["Yesterday"]


def test_seven_days_ago_still_belongs_to_the_week() -> None:
    today = NOW.date()
    assert date_label(today - timedelta(days=7), today) == "Previous 7 days"
    assert date_label(today - timedelta(days=8), today) == "March"


def test_a_clock_that_went_back_does_not_invent_a_group() -> None:
    assert labels(used(timedelta(days=-2))) == ["Today"]


def test_conversations_of_one_day_share_a_group_and_keep_their_order() -> None:
    chats = [used(timedelta(minutes=i), f"chat {i}") for i in range(3)]
    groups = listing(chats, search="", now=NOW.timestamp(), timezone=timezone.utc)["groups"]
    assert [item["title"] for item in groups[0]["items"]] == ["chat 0", "chat 1", "chat 2"]


def test_titles_travel_as_data_and_are_not_touched() -> None:
    """C43: what must not run is not escaped here, because it never passes a template."""
    title = "<img src=x onerror=alert(1)> ${alert(2)} {{value}} `x`"
    groups = listing([used(timedelta(0), title)], search="", now=NOW.timestamp())["groups"]
    assert groups[0]["items"][0]["title"] == title


def test_an_empty_list_says_what_will_be_there_or_that_nothing_matched() -> None:
    assert listing([], search="", now=0.0)["note"] == "Your chats will appear here."
    assert listing([], search="lisbon", now=0.0)["note"] == "Nothing matches this search."


def test_a_very_long_list_is_cut_and_says_so() -> None:
    shown = listing([used(timedelta(0))] * (MOST_LISTED + 1_200), search="", now=NOW.timestamp())
    assert sum(len(group["items"]) for group in shown["groups"]) == MOST_LISTED
    assert shown["note"] == "1,200 older chats: use the search to find them."


@given(st.lists(st.integers(0, 1_000), max_size=30))
def test_no_conversation_is_lost_or_listed_twice(days: list[int]) -> None:
    chats = [used(timedelta(days=day)) for day in sorted(days)]
    groups = listing(chats, search="", now=NOW.timestamp(), timezone=timezone.utc)["groups"]
    assert sum(len(group["items"]) for group in groups) == len(chats)
    names = [group["label"] for group in groups]
    assert len(names) == len(set(names))

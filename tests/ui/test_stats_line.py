"""The wording of the line under a reply."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat.stats import READ_AGAIN, REASONS, Divergence, Reason, TurnStats
from ui.stats_line import WHAT_WAS_READ, WHY_AGAIN, read_again, seconds, stats_details, stats_line


def stats(live: int = 0, disk: int = 0, reasons: dict[Reason, int] | None = None, **rest: Any) -> TurnStats:
    reasons = reasons or {}
    num_prefilled = sum(reasons.values())
    return TurnStats(live + disk + num_prefilled, live, disk, num_prefilled, 8, reasons, **rest)


def test_a_usual_turn_reads_as_one_sentence() -> None:
    turn = stats(392, 812, {"new": 31}, ttft_s=0.12, decode_tokens_per_s=24.3)
    assert (
        stats_line(turn)
        == "1,204 tokens remembered (812 from disk), 31 read, first word in 0.12 s · 24 tok/s"
    )


def test_a_first_turn_remembers_nothing_and_says_what_was_read() -> None:
    assert stats_line(stats(reasons={"new": 31}, ttft_s=1.5)) == "31 tokens read, first word in 1.5 s"


def test_the_disk_is_named_only_when_something_came_from_it() -> None:
    assert "disk" not in stats_line(stats(10, 0, {"new": 3}))


def test_one_token_is_singular() -> None:
    assert stats_line(stats(1, 0)) == "1 token remembered"
    assert stats_line(stats(reasons={"new": 1})) == "1 token read"


def test_a_turn_that_read_nothing_does_not_mention_reading() -> None:
    assert stats_line(stats(40)) == "40 tokens remembered"


def test_a_reply_without_a_second_token_has_no_speed() -> None:
    assert "tok/s" not in stats_line(stats(40, ttft_s=0.2, decode_tokens_per_s=0))


def test_nothing_at_all_is_an_empty_line() -> None:
    assert stats_line(stats()) == ""


def test_reading_again_says_why() -> None:
    turn = stats(5, 0, {"new": 19, "restart": 812})
    assert read_again(turn) == "812 read again: the app was restarted before it was saved"
    assert stats_line(turn).endswith(" · 812 read again: the app was restarted before it was saved")


def test_new_and_edited_text_is_not_called_read_again() -> None:
    assert read_again(stats(5, 0, {"new": 19, "edited": 4, "boundary": 1})) == ""


def test_several_reasons_are_all_named() -> None:
    assert read_again(stats(0, 0, {"template": 3, "evicted": 1_200})) == (
        "3 read again: the chat template rewrote what came before; "
        "1,200 read again: it had been removed to save space"
    )


def test_a_changed_kind_of_cache_is_named_as_such() -> None:
    turn = stats(5, 0, {"fingerprint": 3}, changed_setting="cache kind was native4, is native8")
    assert read_again(turn) == "3 read again: the kind of cache was changed"
    assert "Read again: the kind of cache was changed" in dict(stats_details(turn))
    turn = stats(5, 0, {"fingerprint": 3}, changed_setting="dtype was float32, is bfloat16")
    assert read_again(turn) == "3 read again: what is saved was made by another model or setting"


def test_every_reason_has_words_and_only_reading_again_has_a_why() -> None:
    assert set(WHY_AGAIN) == READ_AGAIN
    assert set(WHY_AGAIN) | set(WHAT_WAS_READ) == set(REASONS)


@pytest.mark.parametrize(
    ("value", "text"), [(0.123, "0.12 s"), (3.44, "3.4 s"), (75.2, "75 s"), (0.0, "0.00 s")]
)
def test_seconds_are_short(value: float, text: str) -> None:
    assert seconds(value) == text


@given(
    live=st.integers(0, 10**6),
    disk=st.integers(0, 10**6),
    reasons=st.dictionaries(st.sampled_from(REASONS), st.integers(0, 10**6)),
)
def test_the_details_account_for_every_prompt_token(live: int, disk: int, reasons: dict[Reason, int]) -> None:
    rows = dict(stats_details(stats(live, disk, reasons)))
    numbers = [int(rows[label].split()[0].replace(",", "")) for label in list(rows)[:4]]
    assert numbers[0] == numbers[1] + numbers[2] + numbers[3]


def test_damaged_files_are_told_with_what_they_cost() -> None:
    one = stats(100, 0, {"damaged": 812, "new": 9}, num_damaged_files=1)
    assert read_again(one) == "1 cache file was damaged; 812 tokens read again"
    two = stats(100, 0, {"damaged": 812}, num_damaged_files=2)
    assert read_again(two) == "2 cache files were damaged; 812 tokens read again"


def test_the_place_where_the_texts_part_can_be_opened() -> None:
    place = Divergence(1204, "dog is called ", "Pixel", "Rover")
    details = dict(stats_details(stats(1204, 0, {"edited": 4}, divergence=place)))
    assert details["Differs after"] == "1,204 tokens"
    assert details["Before"] == "dog is called ▸Pixel…"
    assert details["Now"] == "dog is called ▸Rover…"


def test_the_setting_that_differs_is_told_with_both_values() -> None:
    details = dict(stats_details(stats(0, 0, {"fingerprint": 9}, changed_setting="dtype was a, is b")))
    assert details["What differs"] == "dtype was a, is b"

"""Sizes in words."""

from __future__ import annotations

import pytest

from ui.sizes import size_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1 KB"),
        (1536, "1.5 KB"),
        (10 * 1024, "10 KB"),
        (1023 * 1024, "1 MB"),
        (312 * 2**20, "312 MB"),
        (20 * 2**30, "20 GB"),
        (5 * 2**50, "5,120 TB"),
    ],
)
def test_a_size_is_told_in_two_or_three_figures(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text

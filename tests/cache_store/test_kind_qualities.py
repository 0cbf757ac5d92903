"""Figures about kinds of cache come back as they were put, and only for the very same fields."""

from __future__ import annotations

from pathlib import Path

from cache_store.database import Database
from cache_store.kind_qualities import KindQualities
from cache_store.records import KindQuality

FIELDS = {"model": "x", "cache": "native4, groups of 64"}


def test_figures_outlive_the_process_and_belong_to_their_fields(tmp_path: Path) -> None:
    database = Database(tmp_path / "a.sqlite3")
    qualities = KindQualities(database)
    assert qualities.get(FIELDS) is None
    qualities.put(FIELDS, KindQuality(0.5, 0.5))
    qualities.put(FIELDS, KindQuality(0.014, 0.96875))
    database.close()
    database = Database(tmp_path / "a.sqlite3")
    again = KindQualities(database)
    assert again.get(dict(reversed(FIELDS.items()))) == KindQuality(0.014, 0.96875)
    assert again.get({**FIELDS, "dtype": "float32"}) is None
    database.close()

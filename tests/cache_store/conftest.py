"""A real database in a temporary folder, and a store on it whose clock ticks one second per call."""

from __future__ import annotations

from collections.abc import Generator
from itertools import count
from pathlib import Path

import pytest

from cache_store.conversations import Conversations
from cache_store.database import Database


@pytest.fixture
def database(tmp_path: Path) -> Generator[Database]:
    database = Database(tmp_path / "keepwarm.sqlite")
    yield database
    database.close()


@pytest.fixture
def store(database: Database) -> Conversations:
    return Conversations(database, clock=map(float, count(1)).__next__)

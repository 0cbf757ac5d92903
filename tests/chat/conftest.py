"""A house with a tiny model for each test that asks for one, and a hand on that model's passes."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.chat.passes import Passes, llama
from tests.house import House


@pytest.fixture
def house(tmp_path: Path) -> Generator[House]:
    with House(tmp_path, llama()) as house:
        yield house


@pytest.fixture
def passes(house: House) -> Generator[Passes]:
    with Passes(house.loaded.model) as passes:
        yield passes

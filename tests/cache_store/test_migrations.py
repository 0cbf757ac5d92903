"""The schema grows step by step, and a file that is not ours stays as it is."""

from __future__ import annotations

import hashlib
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
import sqlite_utils

from cache_store import migrations
from cache_store.conversations import Conversations
from cache_store.database import Database
from cache_store.errors import DatabaseDamaged, StoreError
from cache_store.rows import row_from_message
from tests.cache_store.talk import begin

RELEASED = {
    "m001_transcripts": "b2ed815b7b1b4e01",
    "m002_segments": "59864124ecbbbb34",
    "m003_undone": "f05fd6131e833b5c",
    "m004_damage": "b2985ed72b3cb331",
    "m005_kinds": "79ac72eb65523c7d",
}


def schema(path: Path) -> str:
    connection = sqlite3.connect(path)
    rows = connection.execute(
        "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE '%migrations%' ORDER BY name"
    ).fetchall()
    connection.close()
    return "\n".join(" ".join(sql.split()) for (sql,) in rows)


def test_a_new_file_gets_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "keepwarm.sqlite"
    for _ in range(2):
        Database(path).close()
    connection = sqlite3.connect(path)
    names = connection.execute("SELECT name FROM _sqlite_migrations ORDER BY id").fetchall()
    connection.close()
    assert [name for (name,) in names] == [step.__name__ for step in migrations.STEPS]


def test_the_steps_are_numbered_in_order() -> None:
    numbers = [int(step.__name__[1:4]) for step in migrations.STEPS]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_released_step_is_never_changed(tmp_path: Path) -> None:
    """Add a new step instead, and its hash here: people's files already have what the old one made."""
    assert list(RELEASED) == [step.__name__ for step in migrations.STEPS]
    for number, name in enumerate(RELEASED, start=1):
        path = tmp_path / name
        db = sqlite_utils.Database(path)
        for step in migrations.STEPS[:number]:
            step(db)
        db.close()
        assert hashlib.sha256(schema(path).encode()).hexdigest()[:16] == RELEASED[name]


def test_a_file_of_a_newer_version_is_refused_and_left_untouched(tmp_path: Path) -> None:
    path = tmp_path / "keepwarm.sqlite"
    Database(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute(
        "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) "
        "VALUES ('keepwarm', 'm999_later', '')"
    )
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(DatabaseDamaged, match="newer Keepwarm"):
        Database(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["keepwarm.sqlite"]


def test_a_database_of_another_program_is_refused_and_left_untouched(tmp_path: Path) -> None:
    path = tmp_path / "keepwarm.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE recipes (title TEXT)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(DatabaseDamaged, match="another program"):
        Database(path)
    assert path.read_bytes() == before


def test_a_step_that_fails_leaves_neither_tables_nor_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def m002_fails(db: sqlite_utils.Database) -> None:
        db.executescript("CREATE TABLE half (id TEXT); INSERT INTO half VALUES ('x');")
        raise RuntimeError("power cut")

    steps = (*migrations.STEPS, m002_fails)
    broken = sqlite_utils.Migrations("keepwarm")
    for step in steps:
        broken()(step)
    path = tmp_path / "keepwarm.sqlite"
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "STEPS", steps)
        patch.setattr(migrations, "MIGRATIONS", broken)
        with pytest.raises(RuntimeError):
            Database(path)
    assert "half" not in schema(path)
    Database(path).close()


def test_a_message_cannot_hang_below_a_message_of_another_chat(
    database: Database, store: Conversations
) -> None:
    here, there = begin(store).question, begin(store).question
    with pytest.raises(StoreError) as refused:
        database.insert("messages", row_from_message(replace(here, id="new", parent_id=there.id)))
    assert isinstance(refused.value.__cause__, sqlite3.IntegrityError)
    database.insert("messages", row_from_message(replace(here, id="new", parent_id=here.id)))

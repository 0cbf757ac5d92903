"""Real faults of a real SQLite: each ends in one of our errors, and none in half a write."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from cache_store import database as database_module
from cache_store.database import CAUSES, Database, translate
from cache_store.errors import DatabaseDamaged, DataFolderBusy, DiskRefused, StoreError

ROOT = Path(__file__).parents[2]


def titles(database: Database) -> list[str]:
    return [row["title"] for row in database.rows("SELECT title FROM conversations ORDER BY number")]


def add(database: Database, title: str) -> None:
    database.insert(
        "conversations",
        {
            "id": title[:40],
            "owner": "ann",
            "title": title,
            "system_prompt": "",
            "created_at": 0.0,
            "updated_at": 0.0,
        },
    )


def pragma(database: Database, setting: str) -> None:
    """Change a setting of the one connection, to provoke a real error of SQLite."""
    database._db.conn.execute(f"PRAGMA {setting}")  # pyright: ignore[reportPrivateUsage]


# What the connection promises


@pytest.mark.parametrize(
    ("pragma_name", "value"),
    [
        ("journal_mode", "wal"),
        ("synchronous", 2),
        ("foreign_keys", 1),
        ("secure_delete", 1),
        ("fullfsync", 1),
        ("trusted_schema", 0),
        ("busy_timeout", 5000),
    ],
)
def test_the_connection_is_set_up_for_safety(database: Database, pragma_name: str, value: object) -> None:
    row = database.row(f"PRAGMA {pragma_name}")
    assert row is not None
    assert list(row.values()) == [value]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_the_file_and_its_log_are_for_their_owner_only(database: Database, tmp_path: Path) -> None:
    add(database, "one")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(["keepwarm.sqlite", "keepwarm.sqlite-wal", "keepwarm.sqlite-shm"], 0o600)


def test_parameters_are_bound_and_never_part_of_the_statement(database: Database) -> None:
    title = "'); DROP TABLE conversations; --"
    add(database, title)
    assert database.rows("SELECT title FROM conversations WHERE title = ?", [title]) == [{"title": title}]
    assert database.rows("SELECT title FROM conversations WHERE title = :t", {"t": title}) == [
        {"title": title}
    ]


def test_half_a_surrogate_pair_finds_nothing_and_upsets_nothing(database: Database) -> None:
    assert database.row("SELECT * FROM conversations WHERE id = ?", ["\ud83d"]) is None
    assert database.row("SELECT * FROM conversations WHERE id = :id", {"id": "\ud83d"}) is None


# Transactions


def test_a_transaction_is_stored_whole(database: Database, tmp_path: Path) -> None:
    with database.transaction():
        add(database, "one")
        add(database, "two")
    with sqlite3.connect(tmp_path / "keepwarm.sqlite") as other:
        assert other.execute("SELECT count(*) FROM conversations").fetchone() == (2,)
    other.close()


def test_an_exception_undoes_the_whole_transaction(database: Database) -> None:
    """C27: a helper of the library must not have committed the first row by itself."""

    @database.transaction()
    def fail_half_way() -> None:
        add(database, "one")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert titles(database) == []


def test_nothing_is_visible_to_others_before_the_end(database: Database, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "keepwarm.sqlite")
    with database.transaction():
        add(database, "one")
        assert other.execute("SELECT count(*) FROM conversations").fetchone() == (0,)
    assert other.execute("SELECT count(*) FROM conversations").fetchone() == (1,)
    other.close()


def test_a_nested_transaction_joins_the_outer_one(database: Database) -> None:

    @database.transaction()
    def fail_after_the_inner_one() -> None:
        with database.transaction():
            add(database, "inner")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_after_the_inner_one()
    assert titles(database) == []


def test_a_write_after_sqlite_gave_up_the_transaction_is_refused(database: Database) -> None:
    """Otherwise it would be committed by itself: the second half of a turn without the first."""
    database.execute(
        "CREATE TEMP TRIGGER refuse BEFORE INSERT ON conversations WHEN NEW.title = 'bad' "
        "BEGIN SELECT RAISE(ROLLBACK, 'refused'); END"
    )

    @database.transaction()
    def go_on_after_an_error() -> None:
        add(database, "one")
        with pytest.raises(StoreError):
            add(database, "bad")
        add(database, "two")

    with pytest.raises(StoreError):
        go_on_after_an_error()
    assert titles(database) == []
    add(database, "three")
    assert titles(database) == ["three"]


def test_a_failed_single_write_leaves_no_open_transaction(database: Database, tmp_path: Path) -> None:
    add(database, "one")
    with pytest.raises(StoreError):
        add(database, "one")
    add(database, "two")
    other = sqlite3.connect(tmp_path / "keepwarm.sqlite")
    assert other.execute("SELECT count(*) FROM conversations").fetchone() == (2,)
    other.close()


def test_another_thread_waits_for_the_end_of_a_transaction(database: Database) -> None:
    seen: list[list[str]] = []
    reader = threading.Thread(target=lambda: seen.append(titles(database)))
    with database.transaction():
        add(database, "one")
        reader.start()
        add(database, "two")
    reader.join(30)
    assert seen == [["one", "two"]]


# Errors, at the one boundary


@pytest.mark.parametrize("beginning", CAUSES)
def test_every_known_error_is_translated(beginning: str, tmp_path: Path) -> None:
    kind, _ = CAUSES[beginning]
    error = translate(sqlite3.OperationalError(f"{beginning}: private text"), tmp_path)
    assert type(error) is kind
    assert "private text" not in str(error)
    assert "{" not in str(error)
    assert str(error).endswith(".")


def test_any_other_error_of_sqlite_is_a_store_error_too(database: Database) -> None:
    with pytest.raises(StoreError) as caught:
        database.rows("SELECT nonsense")
    assert isinstance(caught.value.__cause__, sqlite3.OperationalError)


def test_a_full_disk_is_told_and_keeps_what_was_stored(database: Database) -> None:
    add(database, "one")
    pragma(database, "max_page_count = 1")  # SQLite never goes below the present size
    with pytest.raises(DiskRefused, match="disk is full") as caught:
        add(database, "x" * 100_000)
    assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
    assert titles(database) == ["one"]
    pragma(database, "max_page_count = 1000000")
    add(database, "two")
    assert titles(database) == ["one", "two"]


def test_a_read_only_database_is_told_and_can_still_be_read(database: Database) -> None:
    add(database, "one")
    pragma(database, "query_only = ON")
    with pytest.raises(DiskRefused, match="may not be written"):
        add(database, "two")
    assert titles(database) == ["one"]


def test_a_lock_of_another_program_is_told(database: Database, tmp_path: Path) -> None:
    pragma(database, "busy_timeout = 0")
    other = sqlite3.connect(tmp_path / "keepwarm.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DataFolderBusy, match="Another program"):
        add(database, "one")
    other.close()
    add(database, "two")
    assert titles(database) == ["two"]


def test_use_after_close_is_told(database: Database) -> None:
    database.close()
    database.close()
    for use in (lambda: titles(database), lambda: add(database, "one"), database.truncate_log):
        with pytest.raises(StoreError, match="closed"):
            use()


FULL_DISK = """
import resource, sys
from pathlib import Path
from cache_store.database import Database
from cache_store.errors import DiskRefused

database = Database(Path(sys.argv[1]))

def add(title):
    database.execute(
        "INSERT INTO conversations (id, owner, created_at, updated_at, title, system_prompt) "
        "VALUES (?, 'ann', 0, 0, ?, '')",
        [title[:10], title],
    )

add("kept")
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
try:
    add("x" * 1_000_000)
except DiskRefused as refused:
    print(refused.__cause__)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
add("after")
print([row["title"] for row in database.rows("SELECT title FROM conversations")])
database.close()
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no file size limit per process")
def test_a_write_that_the_operating_system_refuses_half_way_is_undone(tmp_path: Path) -> None:
    """C24: the file system itself says no in the middle of a write, then has room again."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "keepwarm.sqlite")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    cause, kept = done.stdout.splitlines()
    assert cause in {"database or disk is full", "disk I/O error"}
    assert kept == "['kept', 'after']"


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DiskRefused):
        Database(tmp_path)


def test_a_missing_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(database_module.os, "open", refuse)
    with pytest.raises(DiskRefused, match="may not be written"):
        Database(tmp_path / "keepwarm.sqlite")


# Damaged files


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A closed database of many pages."""
    path = tmp_path / "stored.sqlite"
    database = Database(path)
    for number in range(40):
        add(database, f"{number:40}" + "text " * 1000)
    database.close()
    return path


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)


HARM: dict[str, Callable[[Path], object]] = {
    "cut to 7 bytes": lambda path: os.truncate(path, 7),
    "cut to 100 bytes": lambda path: os.truncate(path, 100),
    "its first byte changed": lambda path: flip(path, 0),
    "its page size changed": lambda path: flip(path, 16),
    "the root of its schema changed": lambda path: flip(path, 100),
    "something else entirely": lambda path: path.write_bytes(b"\x80\x04\x95 a pickle, say" * 100),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_file_is_refused_and_left_untouched(stored: Path, harm: str) -> None:
    HARM[harm](stored)
    before = stored.read_bytes()
    with pytest.raises(DatabaseDamaged, match="left untouched") as caught:
        Database(stored)
    assert str(stored) in str(caught.value)
    assert stored.read_bytes() == before


def test_damage_further_inside_is_told_when_it_is_met(stored: Path) -> None:
    os.truncate(stored, stored.stat().st_size // 2)

    def read_all() -> None:
        with closing(Database(stored)) as database:
            titles(database)

    with pytest.raises(DatabaseDamaged):
        read_all()


def test_text_that_is_not_utf8_is_damage_and_is_not_quoted(database: Database) -> None:
    add(database, "one")
    database.execute("UPDATE conversations SET title = CAST(? AS TEXT)", [b"secret \xff"])
    with pytest.raises(DatabaseDamaged) as caught:
        titles(database)
    assert "secret" not in str(caught.value)


def test_the_log_is_emptied_on_request(database: Database, tmp_path: Path) -> None:
    add(database, "one")
    log = tmp_path / "keepwarm.sqlite-wal"
    assert log.stat().st_size > 0
    assert database.truncate_log()
    assert log.stat().st_size == 0


def test_a_log_that_another_program_reads_stays_and_says_so(database: Database, tmp_path: Path) -> None:
    pragma(database, "busy_timeout = 0")
    add(database, "one")
    other = sqlite3.connect(tmp_path / "keepwarm.sqlite", isolation_level=None)
    other.execute("BEGIN")
    other.execute("SELECT count(*) FROM conversations").fetchone()
    assert not database.truncate_log()
    other.close()
    assert database.truncate_log()

"""The SQLite file: one connection, one lock, explicit transactions.

Handlers run in a thread pool and the inference thread writes too, so every call holds one re-entrant
lock and many threads share one connection. A group of writes belongs in `transaction()`: it is stored
whole when the block ends, or not at all. A single write opens a transaction by itself. The driver and
sqlite-utils never commit on their own account here (`isolation_level=None`, and every write runs inside
our BEGIN). A commit is flushed to the disk before it returns (`synchronous=FULL`), and deleted content
is overwritten (`secure_delete`).

This is the only place that sees an error of SQLite; above it there are `StoreError`s only.
`tests/cache_store/test_database.py` proves each of these.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import sqlite_utils

from cache_store import migrations
from cache_store.errors import DatabaseDamaged, DataFolderBusy, DiskRefused, StoreError
from cache_store.rows import storable

Value = None | int | float | str | bytes
"""What a column can hold. Text is made storable (see `rows.storable`) when it is bound, also in a search
for an id, so that no text from a browser can upset a query."""

Parameters = Sequence[Value] | Mapping[str, Value]

BUSY_TIMEOUT_S = 5.0
"""How long to wait for another program that has the file locked."""

_PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = FULL",
    "fullfsync = ON",  # macOS: a plain fsync leaves data in the drive's own cache
    "foreign_keys = ON",
    "secure_delete = ON",
    "trusted_schema = OFF",  # a file from elsewhere must not call functions from its schema
)

_DAMAGED = (
    "The chat database {path} cannot be read; it was left untouched; "
    "move it away or put a backup in its place, then start Keepwarm again."
)
_FULL = "The disk is full; what was stored before is kept; free some space, then try again."
_READ_ONLY = (
    "The chat database {path} may not be written; what was stored before is kept; "
    "allow writing there, then try again."
)
_IO = "The disk reported an error while {path} was used; what was stored before is kept; check the disk."
_LOCKED = "Another program has {path} locked; nothing was written; close that program, then try again."
_CLOSED = "The chat store is closed; what was stored before is kept; start Keepwarm again."
_OTHER = "The chat database refused a request; what was stored before is kept; the log has the details."

CAUSES: Mapping[str, tuple[type[StoreError], str]] = {
    "database or disk is full": (DiskRefused, _FULL),
    "attempt to write a readonly database": (DiskRefused, _READ_ONLY),
    "access permission denied": (DiskRefused, _READ_ONLY),
    "unable to open database file": (DiskRefused, _READ_ONLY),
    "disk I/O error": (DiskRefused, _IO),
    "large file support is disabled": (DiskRefused, _IO),
    "file is not a database": (DatabaseDamaged, _DAMAGED),
    "database disk image is malformed": (DatabaseDamaged, _DAMAGED),
    "malformed database schema": (DatabaseDamaged, _DAMAGED),
    "unsupported file format": (DatabaseDamaged, _DAMAGED),
    "Could not decode to UTF-8": (DatabaseDamaged, _DAMAGED),
    "database is locked": (DataFolderBusy, _LOCKED),
    "database table is locked": (DataFolderBusy, _LOCKED),
    "locking protocol": (DataFolderBusy, _LOCKED),
    "Cannot operate on a closed database": (StoreError, _CLOSED),
}
"""Beginning of SQLite's message → what it means here. By message, because Python 3.10 has no codes."""


def translate(error: sqlite3.Error, path: Path) -> StoreError:
    """The `StoreError` that stands for `error`; its text never quotes content of the database."""
    for beginning, (kind, sentence) in CAUSES.items():
        if str(error).startswith(beginning):
            return kind(sentence.format(path=path))
    return StoreError(_OTHER)


class Database:
    """One open database file, safe to use from any thread. See the module."""

    def __init__(self, path: Path) -> None:
        """Open or create `path` and bring its schema up to date.

        Raises DatabaseDamaged (not ours, unreadable, or written by a newer version; not a byte of it is
        changed), DiskRefused, or DataFolderBusy.
        """
        self.path = path
        self._lock = threading.RLock()
        self._in_transaction = False
        with self._translated():
            self._db = self._connect()
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    def rows(self, sql: str, parameters: Parameters = ()) -> list[dict[str, Any]]:
        """All rows of a SELECT, as dicts by column name."""
        with self._lock, self._translated():
            return list(self._db.query(sql, _bindable(parameters)))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]

    def row(self, sql: str, parameters: Parameters = ()) -> dict[str, Any] | None:
        """The first row of a SELECT, or None."""
        return next(iter(self.rows(sql, parameters)), None)

    def execute(self, sql: str, parameters: Parameters = ()) -> int:
        """Run one writing statement; how many rows it changed."""
        with self.transaction():
            return self._db.conn.execute(sql, _bindable(parameters)).rowcount

    def insert(self, table: str, values: Mapping[str, Value]) -> None:
        """Add one row to an existing table."""
        with self.transaction():
            self._db.table(table).insert({name: _bindable_value(value) for name, value in values.items()})

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Everything inside is stored together, or not at all; holds the lock until the end.

        A nested block joins the outer one. An exception that leaves the outermost block undoes everything.
        """
        with self._lock, self._translated():
            if self._in_transaction:
                self._require_open_transaction()
                yield
                return
            self._in_transaction = True
            try:
                self._db.conn.execute("BEGIN IMMEDIATE")
                yield
                self._db.conn.execute("COMMIT")
            except BaseException:
                self._db.rollback()
                raise
            finally:
                self._in_transaction = False

    def truncate_log(self) -> bool:
        """Move the write-ahead log into the database file and empty it, so that no deleted text stays there.

        False when another program was reading, so that the log could not be emptied yet.
        """
        with self._lock, self._translated():
            answer = self.row("PRAGMA wal_checkpoint(TRUNCATE)")
            return answer is not None and not answer["busy"]

    def wait_for_writers(self) -> None:
        """Return when whatever another process was writing is committed. Here nobody else writes."""

    def close(self) -> None:
        """Close the file; every later call raises StoreError. Idempotent."""
        with self._lock, self._translated():
            self._db.close()

    def _connect(self) -> sqlite_utils.Database:
        """Open the file. It is created readable by its owner only, which the log beside it inherits."""
        try:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as exc:
            raise DiskRefused(_READ_ONLY.format(path=self.path)) from exc
        return _connection(str(self.path))

    def _prepare(self) -> None:
        migrations.refuse_unknown(self._db, self.path)
        for pragma in _PRAGMAS:
            self._db.conn.execute(f"PRAGMA {pragma}")
        self._db.conn.create_function("holds", 2, _holds, deterministic=True)
        migrations.MIGRATIONS.apply(self._db)

    def _require_open_transaction(self) -> None:
        """SQLite ends a transaction by itself after some errors; going on would commit half of it."""
        if not self._db.conn.in_transaction:
            raise StoreError(_OTHER)

    @contextmanager
    def _translated(self) -> Generator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            raise translate(exc, self.path) from exc


class DatabaseView(Database):
    """A database file that is there already, for somebody who only looks: every write is refused with
    DiskRefused. Another process may be writing; each query sees what is committed by then."""

    def __init__(self, path: Path) -> None:
        """Raises DatabaseDamaged (also when the file was written by an older version: only `Database`
        brings a schema up to date), DiskRefused, or DataFolderBusy."""
        super().__init__(path.absolute())

    def wait_for_writers(self) -> None:
        """Take the write lock for a moment. Gives up after `BUSY_TIMEOUT_S`, and where that is forbidden."""
        with suppress(sqlite3.OperationalError), closing(self._open("rw").conn) as connection:
            connection.execute("BEGIN IMMEDIATE")

    def _connect(self) -> sqlite_utils.Database:
        return self._open("ro")

    def _open(self, mode: Literal["ro", "rw"]) -> sqlite_utils.Database:
        """`rw`, unlike a path, creates no file."""
        return _connection(f"{self.path.as_uri()}?mode={mode}")

    def _prepare(self) -> None:
        migrations.refuse_unknown(self._db, self.path)
        migrations.refuse_older(self._db, self.path)
        self._db.conn.execute("PRAGMA trusted_schema = OFF")
        self._db.conn.create_function("holds", 2, _holds, deterministic=True)


def _connection(address: str) -> sqlite_utils.Database:
    """`address` is a path or a `file:` URI."""
    connection = sqlite3.connect(
        address,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
        uri=address.startswith("file:"),
    )
    return sqlite_utils.Database(connection, execute_plugins=False)


def _bindable(parameters: Parameters) -> list[Value] | dict[str, Value]:
    if isinstance(parameters, Mapping):
        return {name: _bindable_value(value) for name, value in parameters.items()}
    return [_bindable_value(value) for value in parameters]


def _bindable_value(value: Value) -> Value:
    return storable(value) if isinstance(value, str) else value


def _holds(text: str, needle: str) -> bool:
    """SQL function: is the case-folded `needle` in `text`? LIKE folds ASCII only and stops at a NUL."""
    return needle in text.casefold()

"""The schema, as a list of steps that only ever grows.

A step that was released is never changed: a mistake in it is mended by the next one. Each step and the
record that it was taken are stored in one transaction, so a crash leaves the schema before or after a
step, never between. A file whose record does not begin like our list was written by a newer Keepwarm or
by something else; it is refused before anything is written to it.
"""

from __future__ import annotations

from pathlib import Path

import sqlite_utils

from cache_store.errors import DatabaseDamaged


def m001_transcripts(db: sqlite_utils.Database) -> None:
    """Conversations, their trees of messages, which child is shown, and replies in progress.

    `number` is the order of creation. The shown children live in their own slim table, keyed by the
    parent (for a first message: the conversation), because a pointer inside a message row would rewrite
    that row, with all its text and ids, at every turn. Long columns stand last, so that reading the
    short ones never walks through them. The parent's key includes the conversation, so that a message
    cannot hang below one of another chat; it does not cascade, because SQLite limits how deep a cascade
    may go and a chat is thousands of messages deep; all messages of a chat go in one step instead.
    """
    db.executescript(
        """
        CREATE TABLE conversations (
            number INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            owner TEXT NOT NULL,
            created_at REAL NOT NULL,
            updated_at REAL NOT NULL,
            title TEXT NOT NULL,
            system_prompt TEXT NOT NULL
        );
        CREATE INDEX conversations_by_use ON conversations (owner, updated_at);

        CREATE TABLE messages (
            number INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            conversation_id TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
            parent_id TEXT,
            role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
            status TEXT NOT NULL CHECK (status IN ('running', 'done', 'stopped', 'failed')),
            created_at REAL NOT NULL,
            finish_reason TEXT,
            error TEXT,
            seed INTEGER,
            sampling TEXT NOT NULL,
            stats TEXT NOT NULL,
            text TEXT NOT NULL,
            token_ids BLOB NOT NULL,
            UNIQUE (conversation_id, id),
            FOREIGN KEY (conversation_id, parent_id) REFERENCES messages (conversation_id, id)
        );
        CREATE INDEX messages_by_parent ON messages (conversation_id, parent_id);
        CREATE INDEX messages_running ON messages (number) WHERE status = 'running';

        CREATE TABLE selections (
            parent_id TEXT PRIMARY KEY,
            child_id TEXT NOT NULL UNIQUE REFERENCES messages (id) ON DELETE CASCADE
        ) WITHOUT ROWID;

        CREATE TABLE reply_pieces (
            number INTEGER PRIMARY KEY,
            message_id TEXT NOT NULL REFERENCES messages (id) ON DELETE CASCADE,
            start INTEGER NOT NULL,
            text TEXT NOT NULL,
            token_ids BLOB NOT NULL
        );
        CREATE INDEX reply_pieces_by_message ON reply_pieces (message_id);
        """
    )


def m002_segments(db: sqlite_utils.Database) -> None:
    """The tree of KV segments, which chats use them, and what they were computed with.

    A segment hangs from its parent at `start`, which may be in the middle of the parent. At one place of
    one parent no two children begin with the same token (for first segments: of one owner and fingerprint),
    so a look-up is one point query per step. `first_token` is the first four bytes of `token_ids`; it is
    kept apart so that the index answers without reading them. The parent's key includes owner and
    fingerprint, so that a segment cannot hang below one of somebody else or of another model. It does not
    cascade and is checked at the end of a transaction, because rows are rearranged in more than one step.
    A segment whose file was evicted keeps its row until no chat needs it.
    """
    db.executescript(
        """
        CREATE TABLE fingerprints (
            id INTEGER PRIMARY KEY,
            fields TEXT NOT NULL UNIQUE
        );

        CREATE TABLE segments (
            number INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            owner TEXT NOT NULL,
            fingerprint_id INTEGER NOT NULL REFERENCES fingerprints (id),
            parent_id TEXT,
            start INTEGER NOT NULL CHECK (start >= 0 AND (parent_id IS NOT NULL OR start = 0)),
            num_tokens INTEGER NOT NULL CHECK (num_tokens > 0),
            state TEXT NOT NULL CHECK (state IN ('stored', 'evicted')),
            file TEXT,
            nbytes INTEGER NOT NULL,
            checksum TEXT,
            seconds REAL NOT NULL,
            created_at REAL NOT NULL,
            last_used_at REAL NOT NULL,
            first_token BLOB NOT NULL CHECK (first_token = substr(token_ids, 1, 4)),
            token_ids BLOB NOT NULL CHECK (length(token_ids) = 4 * num_tokens),
            CHECK ((state = 'stored') = (file IS NOT NULL) AND (state = 'stored') = (checksum IS NOT NULL)),
            UNIQUE (id, owner, fingerprint_id),
            FOREIGN KEY (parent_id, owner, fingerprint_id) REFERENCES segments (id, owner, fingerprint_id)
                DEFERRABLE INITIALLY DEFERRED
        );
        CREATE UNIQUE INDEX segments_first ON segments (owner, fingerprint_id, first_token)
            WHERE parent_id IS NULL;
        CREATE UNIQUE INDEX segments_by_parent ON segments (parent_id, start, first_token);

        CREATE TABLE segment_uses (
            conversation_id TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
            segment_id TEXT NOT NULL REFERENCES segments (id) ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED,
            num_rows INTEGER NOT NULL CHECK (num_rows > 0),
            used_at REAL NOT NULL,
            PRIMARY KEY (conversation_id, segment_id)
        ) WITHOUT ROWID;
        CREATE INDEX segment_uses_by_segment ON segment_uses (segment_id);
        """
    )


def m003_undone(db: sqlite_utils.Database) -> None:
    """A question can be undone: the path ends above it, and which one it was is remembered for a redo."""
    db.executescript(
        """
        ALTER TABLE selections ADD COLUMN undone INTEGER NOT NULL DEFAULT 0 CHECK (undone IN (0, 1));
        """
    )


def m004_damage(db: sqlite_utils.Database) -> None:
    """An evicted segment remembers whether its file was given up or was found damaged or gone."""
    db.executescript(
        """
        ALTER TABLE segments ADD COLUMN is_damaged INTEGER NOT NULL DEFAULT 0 CHECK (is_damaged IN (0, 1));
        """
    )


def m005_kinds(db: sqlite_utils.Database) -> None:
    """A chat may have a kind of cache of its own (NULL: the host's default); what measuring a kind gave is
    kept by everything that the figures depend on; and what a person allows for all of their chats."""
    db.executescript(
        """
        ALTER TABLE conversations ADD COLUMN cache_kind TEXT;

        CREATE TABLE kind_qualities (
            fields TEXT PRIMARY KEY,
            mean_kl REAL NOT NULL,
            top1_agreement REAL NOT NULL
        ) WITHOUT ROWID;

        CREATE TABLE owner_settings (
            owner TEXT PRIMARY KEY,
            may_shrink_caches INTEGER NOT NULL CHECK (may_shrink_caches IN (0, 1))
        ) WITHOUT ROWID;
        """
    )


STEPS = (m001_transcripts, m002_segments, m003_undone, m004_damage, m005_kinds)

MIGRATIONS = sqlite_utils.Migrations("keepwarm")
for _step in STEPS:
    MIGRATIONS()(_step)


def refuse_unknown(db: sqlite_utils.Database, path: Path) -> None:
    """Raise DatabaseDamaged unless the file is empty or written by a version up to this one. Only reads."""
    taken = [step.name for step in MIGRATIONS.applied(db)]
    known = [step.__name__ for step in STEPS]
    if taken != known[: len(taken)]:
        raise DatabaseDamaged(
            f"The chat database {path} was written by a newer Keepwarm; it was left untouched; "
            "update Keepwarm, or start it with another --data-dir."
        )
    if not taken and set(db.table_names()) - {MIGRATIONS.migrations_table}:
        raise DatabaseDamaged(
            f"The file {path} is a database of another program; it was left untouched; "
            "start Keepwarm with another --data-dir."
        )


def refuse_older(db: sqlite_utils.Database, path: Path) -> None:
    """Raise DatabaseDamaged unless every step was taken. Only reads, for those who may not take steps."""
    if len(MIGRATIONS.applied(db)) < len(STEPS):
        raise DatabaseDamaged(
            f"The chat database {path} was written by an older Keepwarm; it was left untouched; "
            "start Keepwarm once with this --data-dir, which brings it up to date."
        )

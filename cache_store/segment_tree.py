"""The shape of the segment tree in SQLite: who hangs where, the longest stored beginning, who uses what.

Invariants, checked by `tests/cache_store/test_segments.py` after every step of a random run:
- `parent.start < start <= parent.end`, and owner and fingerprint are the parent's;
- a child's first token differs from the parent's own token at that place and from its siblings' there, so
  that at any place of a path at most one segment goes on;
- the parent of a stored segment is stored, so that whatever is stored can be reached.

Nothing in this module touches files, checks owners or opens transactions: `Segments` does all three.
Token ids come and go packed, four bytes each (see `rows.pack_ids`).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cache_store.database import Database, Value
from cache_store.errors import DatabaseDamaged
from cache_store.file_header import FileFacts
from cache_store.records import Chain, Link, Segment

GONE = "A cached beginning was evicted or deleted meanwhile; the chat is safe; its text is read again."
"""The sentence of SegmentGone."""

COLUMNS = (
    "id, owner, fingerprint_id, parent_id, start, num_tokens, state, file, nbytes, checksum, seconds, "
    "created_at, last_used_at, is_damaged"
)
"""All but the token ids."""

_SEGMENT = f"SELECT {COLUMNS} FROM segments WHERE id = ?"  # noqa: S608

_FIRST = f"""
    SELECT {COLUMNS} FROM segments
    WHERE parent_id IS NULL AND owner = ? AND fingerprint_id = ? AND first_token = ?
"""  # noqa: S608

_CHILD = f"SELECT {COLUMNS} FROM segments WHERE parent_id = ? AND start = ? AND first_token = ?"  # noqa: S608

_LONGEST = f"""
    WITH RECURSIVE path (id, until, fits) AS (
        SELECT id, start + num_tokens, substr(:ids, 4 * start + 1, 4 * num_tokens) = token_ids
        FROM segments WHERE id = :first
        UNION ALL
        SELECT s.id, s.start + s.num_tokens, substr(:ids, 4 * s.start + 1, 4 * s.num_tokens) = s.token_ids
        FROM path JOIN segments AS s ON s.parent_id = path.id AND s.start = path.until
            AND s.first_token = substr(:ids, 4 * path.until + 1, 4)
        WHERE path.fits AND s.state = 'stored'
    )
    SELECT {COLUMNS}, fits FROM path JOIN segments USING (id) ORDER BY start
"""  # noqa: S608
"""From one stored segment on, as long as each segment fits as a whole; the last one need not fit."""

_BELOW = """
    WITH RECURSIVE below (id) AS (
        SELECT ?
        UNION ALL
        SELECT s.id FROM below JOIN segments AS s ON s.parent_id = below.id
    )
"""

_STORED_BELOW = f"{_BELOW} SELECT file FROM below JOIN segments USING (id) WHERE state = 'stored'"  # noqa: S608

_BURY = f"""
    {_BELOW}
    UPDATE segments SET state = 'evicted', file = NULL, checksum = NULL, nbytes = 0
    WHERE id IN (SELECT id FROM below) AND state = 'stored'
"""  # noqa: S608

_PATH_TO = """
    WITH RECURSIVE above (id, parent_id, start, until) AS (
        SELECT s.id, s.parent_id, s.start, s.start + u.num_rows
        FROM segment_uses AS u JOIN segments AS s ON s.id = u.segment_id
        WHERE u.segment_id = ? AND u.conversation_id = ?
        UNION ALL
        SELECT s.id, s.parent_id, s.start, above.start
        FROM above JOIN segments AS s ON s.id = above.parent_id
    )
    SELECT substr(s.token_ids, 1, 4 * (above.until - above.start)) AS token_ids
    FROM above JOIN segments AS s USING (id) ORDER BY above.start
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a segment hangs, or could."""

    owner: str
    fingerprint_id: int
    parent_id: str | None
    start: int


def segment_from_row(row: Mapping[str, Any]) -> Segment:
    """The record of a row of `segments`."""
    return Segment(
        id=row["id"],
        owner=row["owner"],
        fingerprint_id=row["fingerprint_id"],
        parent_id=row["parent_id"],
        start=row["start"],
        num_tokens=row["num_tokens"],
        state=row["state"],
        file=row["file"],
        nbytes=row["nbytes"],
        checksum=row["checksum"],
        seconds=row["seconds"],
        created_at=row["created_at"],
        last_used_at=row["last_used_at"],
        is_damaged=bool(row["is_damaged"]),
    )


def segment(database: Database, segment_id: str) -> Segment | None:
    """The segment as it is now."""
    row = database.row(_SEGMENT, [segment_id])
    return None if row is None else segment_from_row(row)


def token_ids(database: Database, segment_id: str) -> bytes:
    """The packed ids of a segment that is there."""
    row = database.row("SELECT token_ids FROM segments WHERE id = ?", [segment_id])
    if row is None:
        raise DatabaseDamaged(
            "A row of the cache tree has vanished; nothing was changed; start Keepwarm again."
        )
    return row["token_ids"]


def child(database: Database, place: Place, first_token: bytes) -> Segment | None:
    """The one segment at this place that begins with this token, whatever its state."""
    if place.parent_id is None:
        row = database.row(_FIRST, [place.owner, place.fingerprint_id, first_token])
    else:
        row = database.row(_CHILD, [place.parent_id, place.start, first_token])
    return None if row is None else segment_from_row(row)


def longest(database: Database, owner: str, fingerprint_id: int, ids: bytes) -> Chain:
    """The longest stored beginning of the packed `ids`. One query for each run of segments that fit as a
    whole, one more for each that fits in part and for each place where something else could go on."""
    links: list[Link] = []
    place = Place(owner, fingerprint_id, None, 0)
    evicted = damaged = False
    while 4 * place.start < len(ids):
        start = 4 * place.start
        first = child(database, place, ids[start : start + 4])
        if first is None or first.state == "evicted":
            evicted = first is not None
            damaged = first is not None and first.is_damaged
            break
        links += _whole_links(database, first, ids)
        place = Place(owner, fingerprint_id, links[-1].segment.id, links[-1].end)
    return Chain(tuple(links), evicted, damaged)


def num_common(ids: bytes, others: bytes) -> int:
    """How many tokens two packed runs have in common at their beginning."""
    if ids[: len(others)] == others:
        return len(others) // 4
    mine, theirs = memoryview(ids)[: len(ids) // 4 * 4].cast("I"), memoryview(others).cast("I")
    pairs = zip(mine, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(theirs)))


def insert(database: Database, place: Place, ids: bytes, now: float, *, segment_id: str | None = None) -> str:
    """Add a segment that has no file yet; its id."""
    segment_id = segment_id or uuid.uuid4().hex
    values: dict[str, Value] = {
        "id": segment_id,
        "owner": place.owner,
        "fingerprint_id": place.fingerprint_id,
        "parent_id": place.parent_id,
        "start": place.start,
        "num_tokens": len(ids) // 4,
        "state": "evicted",
        "nbytes": 0,
        "seconds": 0.0,
        "created_at": now,
        "last_used_at": now,
        "first_token": ids[:4],
        "token_ids": ids,
    }
    database.insert("segments", values)
    return segment_id


def revive(
    database: Database, segment_id: str, file: str, facts: FileFacts, seconds: float, now: float
) -> Segment:
    """A segment has a file now, or again, or another one; the segment as it is then."""
    database.execute(
        "UPDATE segments SET state = 'stored', file = ?, nbytes = ?, checksum = ?, seconds = ?, "
        "last_used_at = ?, is_damaged = 0 WHERE id = ?",
        [file, facts.nbytes, facts.checksum, seconds, now, segment_id],
    )
    row = database.row(_SEGMENT, [segment_id])
    assert row is not None
    return segment_from_row(row)


def cut(database: Database, segment_id: str, num_tokens: int) -> None:
    """Forget the tokens of a segment behind the first few."""
    database.execute(
        "UPDATE segments SET num_tokens = :n, token_ids = substr(token_ids, 1, 4 * :n), "
        "seconds = seconds * :n / num_tokens WHERE id = :id",
        {"n": num_tokens, "id": segment_id},
    )


def split(database: Database, segment: Segment, num_tokens: int, now: float) -> str:
    """Make two of an evicted segment: a new one of its first tokens, and below it the old one with the
    rest. What hung from the first part, and the chats that end there, go with it. The id of the new one.

    A stored segment is never split, because its file would have to be.
    """
    assert segment.state == "evicted"
    place = Place(segment.owner, segment.fingerprint_id, segment.parent_id, segment.start)
    ids = token_ids(database, segment.id)
    first = uuid.uuid4().hex
    rest = ids[4 * num_tokens :]
    database.execute(  # first of all, because two segments cannot be in one place
        "UPDATE segments SET parent_id = ?, start = start + ?, num_tokens = num_tokens - ?, "
        "first_token = ?, token_ids = ? WHERE id = ?",
        [first, num_tokens, num_tokens, rest[:4], rest, segment.id],
    )
    insert(database, place, ids[: 4 * num_tokens], now, segment_id=first)
    parts: dict[str, Value] = {"first": first, "rest": segment.id, "n": num_tokens}
    database.execute(
        "UPDATE segments SET parent_id = :first WHERE parent_id = :rest AND start <= :cut",
        {**parts, "cut": segment.start + num_tokens},
    )
    database.execute(
        "UPDATE segment_uses SET segment_id = :first WHERE segment_id = :rest AND num_rows <= :n", parts
    )
    database.execute("UPDATE segment_uses SET num_rows = num_rows - :n WHERE segment_id = :rest", parts)
    return first


def bury(database: Database, segment_id: str) -> list[str]:
    """Mark a segment and everything below it as evicted; the names of the files that are of no use now."""
    stored = database.rows(_STORED_BELOW, [segment_id])
    database.execute(_BURY, [segment_id])
    return [str(row["file"]) for row in stored]


def bury_damaged(database: Database, segment_id: str) -> list[str]:
    """As `bury`, for a segment whose file is damaged or gone; look-ups that end at it will say so."""
    files = bury(database, segment_id)
    database.execute("UPDATE segments SET is_damaged = 1 WHERE id = ?", [segment_id])
    return files


def record_use(database: Database, conversation_id: str, link: Link, now: float) -> int:
    """This chat needs these rows, and with them all rows above. 0 when the rows are not there any more."""
    return database.execute(
        """
        INSERT INTO segment_uses (conversation_id, segment_id, num_rows, used_at)
        SELECT :chat, id, :num_rows, :now FROM segments WHERE id = :segment AND num_tokens >= :num_rows
        ON CONFLICT DO UPDATE SET num_rows = max(num_rows, excluded.num_rows), used_at = excluded.used_at
        """,
        {"chat": conversation_id, "segment": link.segment.id, "num_rows": link.num_rows, "now": now},
    ) and database.execute("UPDATE segments SET last_used_at = ? WHERE id = ?", [now, link.segment.id])


def last_path(database: Database, conversation_id: str, fingerprint_id: int) -> bytes:
    """The packed ids of the path that this chat used last; empty when there is none."""
    last = database.row(
        "SELECT segment_id FROM segment_uses JOIN segments ON id = segment_id "
        "WHERE conversation_id = ? AND fingerprint_id = ? ORDER BY used_at DESC, start DESC LIMIT 1",
        [conversation_id, fingerprint_id],
    )
    if last is None:
        return b""
    return b"".join(
        row["token_ids"] for row in database.rows(_PATH_TO, [last["segment_id"], conversation_id])
    )


def _whole_links(database: Database, first: Segment, ids: bytes) -> list[Link]:
    rows = database.rows(_LONGEST, {"first": first.id, "ids": ids})
    links = [Link(segment, segment.num_tokens) for segment in map(segment_from_row, rows)]
    if not rows[-1]["fits"]:
        last = links[-1].segment
        links[-1] = Link(last, num_common(ids[4 * last.start :], token_ids(database, last.id)))
    return links

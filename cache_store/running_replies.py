"""A reply that is being written: what the inference thread may do with the store.

A running reply is a row of status `running`, which holds what the reply begins with (often nothing), plus
pieces that are only ever added, so that saving progress costs bytes in proportion to what is new.
`finish_reply` puts the whole reply into the row and removes the pieces, in one transaction. After a crash the
row is still `running`; `recover` ends it with what it and its pieces hold. Pieces carry text besides ids, so
that recovery needs no tokenizer.

Invariant: the pieces of a reply are contiguous from the end of what its row holds, and only a running reply
has any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cache_store.database import Database, Value
from cache_store.errors import NotFound
from cache_store.records import Beginning, Json, Message, Status
from cache_store.rows import message_from_row, pack_ids, pack_json, unpack_ids
from cache_store.tree import NOT_FOUND


class RunningReplies:
    """Progress and end of replies. Takes no owner: nothing here is called on behalf of a page."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save_progress(self, reply_id: str, start: int, token_ids: Sequence[int], text: str) -> None:
        """Add what is new of a running reply: the ids [start, start + len(token_ids)) and their text.

        Raises NotFound when the reply was deleted or has ended; ValueError when ids are missing before
        `start` or are there already.
        """
        with self._database.transaction():
            self._require_running(reply_id)
            num_saved = self._num_saved(reply_id)
            if start != num_saved:
                raise ValueError(f"{num_saved} tokens of the reply are saved, but the next start at {start}")
            self._database.insert(
                "reply_pieces",
                {
                    "message_id": reply_id,
                    "start": start,
                    "text": text,
                    "token_ids": pack_ids(token_ids),
                },
            )

    def progress(self, reply_id: str) -> Beginning:
        """What is stored of a running reply so far. Raises NotFound when it was deleted or has ended."""
        with self._database.transaction():
            self._require_running(reply_id)
            return self._progress(reply_id)

    def finish_reply(
        self,
        reply_id: str,
        *,
        token_ids: Sequence[int],
        text: str,
        status: Status,
        finish_reason: str | None,
        error: str | None,
        stats: Mapping[str, Json],
    ) -> Message:
        """Put the whole reply into its row and end it; its pieces go.

        Raises NotFound when the reply was deleted or has ended; ValueError when `status` is `running`.
        """
        if status == "running":
            raise ValueError("a reply cannot end as running")
        values: list[Value] = [
            pack_ids(token_ids),
            text,
            status,
            finish_reason,
            error,
            pack_json(stats),
        ]
        with self._database.transaction():
            self._require_running(reply_id)
            self._database.execute(
                "UPDATE messages SET token_ids = ?, text = ?, status = ?, finish_reason = ?, error = ?, "
                "stats = ? WHERE id = ?",
                [*values, reply_id],
            )
            self._database.execute("DELETE FROM reply_pieces WHERE message_id = ?", [reply_id])
            (row,) = self._database.rows("SELECT * FROM messages WHERE id = ?", [reply_id])
            return message_from_row(row)

    def recover(self) -> int:
        """End every reply that an earlier process left running, as `stopped`, with the ids and the text of
        its pieces and `finish_reason` "interrupted". Call it once, before any reply starts.

        Returns how many there were.
        """
        with self._database.transaction():
            running = self._database.rows("SELECT id FROM messages WHERE status = 'running'")
            for row in running:
                self._finish_interrupted(row["id"])
            return len(running)

    def _require_running(self, reply_id: str) -> None:
        row = self._database.row("SELECT 1 FROM messages WHERE id = ? AND status = 'running'", [reply_id])
        if row is None:
            raise NotFound(NOT_FOUND)

    def _num_saved(self, reply_id: str) -> int:
        """How many ids of the reply are stored; looks at the last piece only."""
        (row,) = self._database.rows(
            "SELECT coalesce("
            "(SELECT start + length(token_ids) / 4 FROM reply_pieces WHERE message_id = :id "
            "ORDER BY number DESC LIMIT 1), "
            "(SELECT length(token_ids) / 4 FROM messages WHERE id = :id)) AS num_saved",
            {"id": reply_id},
        )
        return int(row["num_saved"])

    def _progress(self, reply_id: str) -> Beginning:
        begun = self._database.rows("SELECT token_ids, text FROM messages WHERE id = ?", [reply_id])
        pieces = begun + self._database.rows(
            "SELECT token_ids, text FROM reply_pieces WHERE message_id = ? ORDER BY number", [reply_id]
        )
        return Beginning(
            "".join(piece["text"] for piece in pieces),
            unpack_ids(b"".join(piece["token_ids"] for piece in pieces)),
        )

    def _finish_interrupted(self, reply_id: str) -> None:
        begun = self._progress(reply_id)
        self.finish_reply(
            reply_id,
            token_ids=begun.token_ids,
            text=begun.text,
            status="stopped",
            finish_reason="interrupted",
            error=None,
            stats={},
        )

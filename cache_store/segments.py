"""The KV cache on disk: a tree of segments over token ids, so that nothing is computed twice.

A segment holds the KV rows of the tokens [start, end) of a path. The next piece of the path hangs from it,
and so does every branch, wherever it leaves: at the end or in the middle. Two chats of one owner that begin
alike share what they have in common. A segment is never changed and never split; it is only shortened, when
the chat that needed the rest is deleted. See `segment_tree` for the shape, `files` for what a file is,
`eviction` and `segment_needs` for what goes.

Order of writing: room is made, the file is written and flushed, then one transaction adds the row and the
chat's use of it. So a crash leaves at most a file without a row, which `sweep` removes; never a row without
its file. Text never depends on anything in here.

Checked by `tests/cache_store`: against plain lists of tokens, with kills at every step, with damaged files,
full disks, strangers, and for what stays behind after a chat was deleted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from cache_store import segment_tree as tree
from cache_store.errors import NotFound, SegmentGone
from cache_store.file_header import STATE_PREFIX, info_of
from cache_store.files import content_of
from cache_store.records import Chain, Link, Segment
from cache_store.rows import pack_ids, pack_json, unpack_ids
from cache_store.segment_tree import Place
from cache_store.segment_upkeep import SegmentUpkeep
from cache_store.tree import NOT_FOUND


class Segments(SegmentUpkeep):
    """The store of KV rows. Safe to use from any thread; raises `StoreError`s. See the module."""

    # What rows were computed with

    def fingerprint_id(self, fields: Mapping[str, str]) -> int:
        """The number under which rows computed with exactly these fields are kept."""
        text = pack_json(dict(sorted(fields.items())))
        with self._database.transaction():
            self._database.execute("INSERT OR IGNORE INTO fingerprints (fields) VALUES (?)", [text])
            row = self._database.row("SELECT id FROM fingerprints WHERE fields = ?", [text])
        assert row is not None
        return row["id"]

    def fields_of(self, fingerprint_id: int) -> dict[str, str]:
        """The inverse of `fingerprint_id`. Raises NotFound."""
        row = self._database.row("SELECT fields FROM fingerprints WHERE id = ?", [fingerprint_id])
        if row is None:
            raise NotFound(NOT_FOUND)
        return json.loads(row["fields"])

    def fingerprints_of(self, conversation_id: str) -> list[int]:
        """With what this chat's rows were computed, last used first."""
        rows = self._database.rows(
            "SELECT fingerprint_id FROM segment_uses JOIN segments ON id = segment_id "
            "WHERE conversation_id = ? GROUP BY fingerprint_id ORDER BY max(used_at) DESC",
            [conversation_id],
        )
        return [row["fingerprint_id"] for row in rows]

    # Looking up

    def find(
        self, owner: str, fingerprint_id: int, token_ids: Sequence[int], limit: int | None = None
    ) -> Chain:
        """The longest stored beginning of `token_ids[:limit]`; no other owner's, no other fingerprint's."""
        ids = pack_ids(token_ids[:limit])
        with self._database.transaction():  # as of one moment
            return tree.longest(self._database, owner, fingerprint_id, ids)

    def last_path(self, conversation_id: str, fingerprint_id: int) -> tuple[int, ...]:
        """The token ids of the path that this chat used last, evicted or not; empty when there is none."""
        return unpack_ids(tree.last_path(self._database, conversation_id, fingerprint_id))

    def use(self, conversation_id: str, link: Link) -> None:
        """This chat needs the path up to the end of `link`; from now on it is not forgotten.

        For a chain, its last link says it all. Raises SegmentGone when the rows, or the chat, are gone.
        """
        with self._database.transaction():
            self._require_chat(conversation_id, link.segment.owner)
            if not tree.record_use(self._database, conversation_id, link, self._clock()):
                raise SegmentGone(tree.GONE)

    # Adding

    def append(
        self,
        owner: str,
        fingerprint_id: int,
        conversation_id: str,
        *,
        parent_id: str | None,
        start: int,
        token_ids: Sequence[int],
        tensors: Mapping[str, torch.Tensor],
        seconds: float,
        pinned: Collection[str] = frozenset(),
    ) -> Link:
        """Store the rows of `token_ids`, the tokens [start, …) of the path whose beginning ends in
        `parent_id` (None: there is none, and `start` is 0). Where they end: the parent of what comes next.

        `tensors` are `[kv_heads, len(token_ids), width]` each, or `state.…` of any shape, which belong to
        the end. `seconds` is what it took to compute them. Rows that are stored already are not written
        again, and an evicted segment gets its file back, so that appending twice changes nothing. A state
        is not kept where the path ends within a segment that was there before.

        Room is made first, from segments that are neither `pinned` nor the parent. Raises NoRoom or
        DiskRefused (what was stored before is kept), SegmentGone when the parent was evicted or deleted
        (look the path up again), NotFound when the chat was, ValueError when the arguments do not fit.
        """
        rest = _Run(conversation_id, pack_ids(token_ids), tensors, seconds, frozenset(pinned))
        place = Place(owner, fingerprint_id, parent_id, start)
        with self._writing:
            self._require_chat(conversation_id, owner)
            link = self._within_parent(place, rest)
            while link is None or link.end < start + len(token_ids):
                if link is not None:
                    place = replace(place, parent_id=link.segment.id, start=link.end)
                link = self._next_link(place, rest.after(place.start - start))
            return link

    # Below: inside `append`

    def _require_chat(self, conversation_id: str, owner: str) -> None:
        row = self._database.row(
            "SELECT 1 FROM conversations WHERE id = ? AND owner = ?", [conversation_id, owner]
        )
        if row is None:
            raise NotFound(NOT_FOUND)

    def _within_parent(self, place: Place, run: _Run) -> Link | None:
        """Where the run leaves the parent's own tokens; None when it does so at once."""
        if place.parent_id is None:
            if place.start:
                raise ValueError("a path without a parent starts at 0")
            return None
        parent = tree.segment(self._database, place.parent_id)
        if parent is None or parent.state == "evicted" or place.start > parent.end:
            raise SegmentGone(tree.GONE)
        if (parent.owner, parent.fingerprint_id) != (place.owner, place.fingerprint_id):
            raise SegmentGone(tree.GONE)
        num_rows = place.start - parent.start
        if num_rows <= 0:
            raise ValueError("a segment starts behind the start of its parent")
        num_common = tree.num_common(run.ids, tree.token_ids(self._database, parent.id)[4 * num_rows :])
        return self._reuse(run, Link(parent, num_rows + num_common)) if num_common else None

    def _next_link(self, place: Place, run: _Run) -> Link:
        """The segment that goes on with the run at this place, written unless it is stored."""
        child = tree.child(self._database, place, run.ids[:4])
        if child is None:
            return self._write(place, None, run)
        num_common = tree.num_common(run.ids, tree.token_ids(self._database, child.id))
        if child.state == "stored":
            return self._reuse(run, Link(child, num_common))
        return self._write(place, child, run.first(num_common))

    def _reuse(self, run: _Run, link: Link) -> Link:
        self.use(run.conversation_id, link)
        return link

    def _write(self, place: Place, evicted: Segment | None, run: _Run) -> Link:
        """Write the whole run as one segment; `evicted` is the one that begins with it and has no file."""
        content = content_of(run.tensors)
        self._make_room(content.nbytes, run.pinned | {place.parent_id or ""})
        file, facts = self._folder.write(content)
        try:
            with self._database.transaction():
                self._require_chat(run.conversation_id, place.owner)
                now = self._clock()
                if evicted is None:
                    segment_id = tree.insert(self._database, place, run.ids, now)
                elif evicted.num_tokens > run.num_tokens:
                    segment_id = tree.split(self._database, evicted, run.num_tokens, now)
                else:
                    segment_id = evicted.id
                segment = tree.revive(self._database, segment_id, file, facts, run.seconds, now)
                link = Link(segment, segment.num_tokens)
                tree.record_use(self._database, run.conversation_id, link, now)
        except BaseException:
            self._remove([file])
            raise
        return link


@dataclass(frozen=True, slots=True)
class _Run:
    """What one `append` was asked to store, or what of it is still to be stored."""

    conversation_id: str
    ids: bytes
    tensors: Mapping[str, torch.Tensor]
    seconds: float
    pinned: frozenset[str]

    def __post_init__(self) -> None:
        if not self.ids:
            raise ValueError("a segment has at least one token")
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise ValueError(f"seconds must be a number from 0 on, not {self.seconds}")
        for name, tensor in self.tensors.items():
            if not info_of(name, tensor).is_state and tensor.shape[1] != self.num_tokens:
                raise ValueError(f"{name} has {tensor.shape[1]} rows for {self.num_tokens} tokens")

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // 4

    def first(self, num_tokens: int) -> _Run:
        """Its beginning, without the states: they belong to the end."""
        if num_tokens == self.num_tokens:
            return self
        rows = {name: rows for name, rows in self.tensors.items() if not name.startswith(STATE_PREFIX)}
        return self._part(slice(0, num_tokens), rows)

    def after(self, num_tokens: int) -> _Run:
        """What follows its beginning."""
        return self._part(slice(num_tokens, self.num_tokens), self.tensors) if num_tokens else self

    def _part(self, kept: slice, tensors: Mapping[str, torch.Tensor]) -> _Run:
        return replace(
            self,
            ids=self.ids[4 * kept.start : 4 * kept.stop],
            tensors={
                name: tensor if name.startswith(STATE_PREFIX) else tensor[:, kept]
                for name, tensor in tensors.items()
            },
            seconds=self.seconds * (kept.stop - kept.start) / self.num_tokens,
        )

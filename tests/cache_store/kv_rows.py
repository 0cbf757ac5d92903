"""A small store of segments to test with. Each row's values tell the whole path of tokens up to its token,
so that a row in a wrong place, or of another path, is seen at once."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import torch

from cache_store.conversations import Conversations
from cache_store.database import Database
from cache_store.records import Chain, Conversation, Link
from cache_store.rows import pack_ids, unpack_ids
from cache_store.segments import Segments

FIELDS = {"model": "tiny", "dtype": "float32"}
PLENTY = 10**9


def rows(path: Sequence[int], start: int = 0) -> dict[str, torch.Tensor]:
    """The rows of the tokens [start, len(path)): two heads, of two types and widths."""
    ids = pack_ids(path)
    sums = [zlib.crc32(ids[: 4 * end]) for end in range(start + 1, len(path) + 1)]
    low = torch.tensor([[value & 0xFFFFFF, 1] for value in sums], dtype=torch.float32)
    high = torch.tensor([[value >> 24] for value in sums], dtype=torch.bfloat16)
    return {
        "layers.0.keys": torch.stack([low, -low]),
        "layers.0.values": torch.stack([high, -high]),
    }


class Shelf:
    """A database with chats, and segments in a folder beside it."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int = PLENTY,
        *,
        clock: Callable[[], float] | None = None,
        disk_free: Callable[[Path], int] = lambda _: PLENTY,
        reserve_bytes: int = 0,
        quick: bool = False,
    ) -> None:
        self.folder = folder
        self.kv = folder / "kv"
        self.kv.mkdir(exist_ok=True)
        self.database = Database(folder / "keepwarm.sqlite")
        if quick:  # nothing is cut from its power in here
            self.database._db.conn.execute("PRAGMA synchronous = OFF")
        self.chats = Conversations(self.database)
        self.segments = Segments(
            self.database,
            self.kv,
            max_bytes,
            clock=clock or map(float, count(1)).__next__,
            disk_free=disk_free,
            reserve_bytes=reserve_bytes,
        )
        self.fingerprint = self.segments.fingerprint_id(FIELDS)

    def close(self) -> None:
        self.database.close()

    def chat(self, owner: str = "ann") -> Conversation:
        return self.chats.create(owner, title="Talk")

    def find(self, path: Sequence[int], owner: str = "ann", fingerprint: int | None = None) -> Chain:
        return self.segments.find(owner, fingerprint or self.fingerprint, path)

    def say(
        self,
        chat: Conversation,
        path: Sequence[int],
        *,
        fingerprint: int | None = None,
        seconds: float = 1.0,
        pinned: frozenset[str] = frozenset(),
    ) -> Link:
        """What a turn does: look up the path, use what is there, store the rest."""
        fingerprint = fingerprint or self.fingerprint
        chain = self.find(path, chat.owner, fingerprint)
        start = chain.num_tokens
        if chain.links:
            self.segments.use(chat.id, chain.links[-1])
        if start == len(path):
            return chain.links[-1]
        return self.segments.append(
            chat.owner,
            fingerprint,
            chat.id,
            parent_id=chain.links[-1].segment.id if chain.links else None,
            start=start,
            token_ids=path[start:],
            tensors=rows(path, start),
            seconds=seconds,
            pinned=pinned,
        )

    def read(self, chain: Chain) -> dict[str, torch.Tensor]:
        """All rows of a chain, read in place into buffers with room for more."""
        num_tokens, spare = chain.num_tokens, 3
        buffers = {
            "layers.0.keys": torch.zeros(2, num_tokens + spare, 2),
            "layers.0.values": torch.zeros(2, num_tokens + spare, 1, dtype=torch.bfloat16),
        }
        for link in chain.links:
            with self.segments.open(link.segment) as file:
                for info in file.tensors:
                    file.read_into(info, buffers[info.name][:, link.segment.start : link.end])
                file.verify()
        assert not any(buffer[:, num_tokens:].any() for buffer in buffers.values())
        return {name: buffer[:, :num_tokens] for name, buffer in buffers.items()}

    def check_read(self, path: Sequence[int], owner: str = "ann", fingerprint: int | None = None) -> int:
        """Whatever is found of the path holds exactly its rows; how many tokens that are."""
        chain = self.find(path, owner, fingerprint)
        assert chain.num_tokens <= len(path)
        found, expected = self.read(chain), rows(path[: chain.num_tokens])
        if chain.links:
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        return chain.num_tokens

    def file_of(self, link: Link) -> Path:
        assert link.segment.file is not None
        return self.kv / link.segment.file

    def files(self) -> set[str]:
        return {path.name for path in self.kv.iterdir() if path.is_file()}

    def nbytes(self) -> int:
        """What really lies in the folder."""
        return sum(path.lstat().st_size for path in self.kv.rglob("*") if not path.is_dir())

    def paths(self) -> dict[str, tuple[int, ...]]:
        """The path of tokens from the first one to the end of each segment."""
        paths: dict[str, tuple[int, ...]] = {}
        for row in self.database.rows(
            "SELECT id, parent_id, start, token_ids FROM segments ORDER BY start, number"
        ):
            above = paths[row["parent_id"]][: row["start"]] if row["parent_id"] else ()
            paths[row["id"]] = above + unpack_ids(row["token_ids"])
        return paths

    def check(self) -> None:
        """The invariants of tree and folder; see `segment_tree`."""
        nodes = {node.segment.id: node.segment for node in self.segments.list()}
        ids = {
            row["id"]: unpack_ids(row["token_ids"]) for row in self.database.rows("SELECT * FROM segments")
        }
        places: set[tuple[object, ...]] = set()
        for segment in nodes.values():
            assert len(ids[segment.id]) == segment.num_tokens > 0
            place = (
                segment.owner,
                segment.fingerprint_id,
                segment.parent_id,
                segment.start,
                ids[segment.id][0],
            )
            assert place not in places, "two segments could go on here"
            places.add(place)
            if segment.parent_id is None:
                assert segment.start == 0
                continue
            parent = nodes[segment.parent_id]
            assert (parent.owner, parent.fingerprint_id) == (segment.owner, segment.fingerprint_id)
            assert parent.start < segment.start <= parent.end
            own = ids[parent.id][segment.start - parent.start :]
            assert own[:1] != ids[segment.id][:1], "the parent itself goes on here"
            assert parent.state == "stored" or segment.state == "evicted", "stored, but out of reach"
        assert self.files() == {segment.file for segment in nodes.values() if segment.file}
        assert self.segments.size().kv_bytes == self.nbytes()
        assert [check.damage for check in self.segments.verify() if check.damage] == []
        assert self.database.rows("PRAGMA foreign_key_check") == []
        assert self.database.rows("PRAGMA integrity_check") == [{"integrity_check": "ok"}]

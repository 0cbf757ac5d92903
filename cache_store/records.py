"""The values that the store hands out: frozen, with no behaviour beyond their own validity.

A conversation is a tree of messages. `parent_id` is None for a first message; among siblings one is
selected, and the selected path from a root to a leaf is the chat that a person sees. Nothing here
knows SQL, transformers or Gradio.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

Role = Literal["user", "assistant"]

Status = Literal["running", "done", "stopped", "failed"]
"""`running`: a reply is being written. `done`: the model or a stop string ended it. `stopped`: a person,
a length limit or the end of the process cut it. `failed`: an error ended it; `Message.error` says which."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One chat. Times are seconds since the epoch. `cache_kind`: the kind of cache chosen for it, by name;
    None is the host's default. The store does not know which kinds there are."""

    id: str
    owner: str
    title: str
    system_prompt: str
    created_at: float
    updated_at: float
    cache_kind: str | None = None


@dataclass(frozen=True, slots=True)
class KindQuality:
    """How near answers with some kind of cache come to those with a dense one, over a fixed text: the mean
    KL divergence of the next token's distribution in nats, and how often the likeliest token is the same."""

    mean_kl: float
    top1_agreement: float


@dataclass(frozen=True, slots=True)
class Message:
    """One node of the tree.

    `token_ids` are the exact ids that were sampled, end-of-turn included; they are empty for user
    messages, whose ids are whatever the template makes of the text. A running reply holds what it begins
    with. `finish_reason` is `EDITED` for a reply that a person wrote. `sampling`, `seed` and `stats` are
    set for replies only; the store keeps them as JSON and does not look inside, but for `DIVERGENCE`.
    """

    id: str
    conversation_id: str
    parent_id: str | None
    role: Role
    text: str
    status: Status
    created_at: float
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    sampling: Mapping[str, Json] = field(default_factory=dict[str, Json])
    seed: int | None = None
    stats: Mapping[str, Json] = field(default_factory=dict[str, Json])


EDITED = "edited"
"""The `finish_reason` of a reply whose text is a person's."""

DIVERGENCE = "divergence"
"""The key of `Message.stats` under which short texts of other messages may stand."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a reply begins with before anything is sampled. The ids may be empty when they are not known yet;
    else they say exactly the text."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


NOTHING_YET = Beginning()


@dataclass(frozen=True, slots=True)
class Siblings:
    """Where a message stands among the children of its parent: `ids[position]` is the message itself."""

    ids: tuple[str, ...]
    position: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and the reply that is about to be written for it."""

    question: Message
    reply: Message


SegmentState = Literal["stored", "evicted"]
"""`evicted`: the file is gone, so that the rows must be computed again; the row still says that they were."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The KV rows of the tokens [start, end) of a path; hangs from its parent at `start`.

    `parent.start < start <= parent.end`: a child may hang in the middle of its parent. Then the parent's
    rows from `start` on belong to another path. `seconds` is what it took to compute the rows. `nbytes` is
    the size of the file, 0 when it was evicted. `is_damaged`: it was evicted because its file was damaged or
    gone. Times are seconds since the epoch.
    """

    id: str
    owner: str
    fingerprint_id: int
    parent_id: str | None
    start: int
    num_tokens: int
    state: SegmentState
    file: str | None
    nbytes: int
    checksum: str | None
    seconds: float
    created_at: float
    last_used_at: float
    is_damaged: bool = False

    @property
    def end(self) -> int:
        """How many tokens of the path lie before its own end."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Link:
    """The first `num_rows` rows of a segment, as a part of a path."""

    segment: Segment
    num_rows: int

    @property
    def end(self) -> int:
        """How many tokens of the path lie before the end of this part."""
        return self.segment.start + self.num_rows


@dataclass(frozen=True, slots=True)
class Chain:
    """The longest stored beginning of a path, from its first token; may be empty.

    `evicted`: the path went on, but the file of its next segment is gone; `damaged`: against our will.
    """

    links: tuple[Link, ...]
    evicted: bool
    damaged: bool = False

    @property
    def num_tokens(self) -> int:
        """How many tokens of the path are stored."""
        return self.links[-1].end if self.links else 0


@dataclass(frozen=True, slots=True)
class SegmentNode:
    """A segment and the chats that end in it or branch off within it."""

    segment: Segment
    conversation_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SegmentCheck:
    """What became of one segment's file; `damage` says what is wrong with it, None when it is as written."""

    segment: Segment
    damage: str | None


@dataclass(frozen=True, slots=True)
class StoreSize:
    """What lies on the disk, in bytes. `kv_bytes` is all that counts against `max_bytes`: the segments'
    files, half-written ones and what was set aside."""

    kv_bytes: int
    max_bytes: int
    stored_bytes: int
    quarantined_bytes: int
    database_bytes: int
    num_stored: int
    num_evicted: int
    num_quarantined: int


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What was put in order at the start. `num_damaged` files were set aside; the rest was removed."""

    num_temporary: int
    num_orphans: int
    num_missing: int
    num_damaged: int
    num_evicted: int

"""What is kept of one owner's chats, in memory and on disk, as a page shows it: chats → branches → nodes.

A node is a segment of the store, or what a live cache holds beyond all segments. A node is live as far as
a live cache of the owner holds the very tokens of the path up to there. What is shown is bounded, and token
ids are read of that part only, in one query.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cache_store.branches import branches_of
from cache_store.conversations import Conversations
from cache_store.records import Conversation, Segment, SegmentNode
from cache_store.segments import Segments
from chat.disk import kind_of, without_kind
from chat.live_caches import Holding, LiveCaches
from chat.live_match import LiveMatch, match_path
from chat.session import ChatSession

MOST_NODES = 200
MOST_NODES_PER_CHAT = 60
"""The first nodes of each chat, last used chats first; what is left out is counted."""

TEXT_LENGTH = 60
_TEXT_TOKENS = 96
"""As many as fill a line, whatever the language; only these are decoded."""

_ALL = 10**9
_UNSAVED = -1
"""The fingerprint of a node that is in memory only."""

SegmentsByChat = Mapping[str, Sequence[Segment]]
Words = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class CacheNode:
    """The rows of the tokens [start, start + num_tokens) of a path, the first `num_live_tokens` of them in
    memory. `nbytes`: on disk, 0 when they are not there. `was_evicted`: they were there once. `text`: how
    it begins; empty while no tokenizer can tell. `num_chats`: how many chats share it. `other_setting`: it
    was made with another model or setting than is in use. `kind`: the kind of cache, by its option's name."""

    text: str
    start: int
    num_tokens: int
    num_live_tokens: int
    nbytes: int
    was_evicted: bool
    num_chats: int
    other_setting: bool
    kind: str = "dynamic"


@dataclass(frozen=True, slots=True)
class CacheBranch:
    """Nodes each of which goes on where the one before ends. `depth`: how many forks lie above it."""

    depth: int
    nodes: tuple[CacheNode, ...]


@dataclass(frozen=True, slots=True)
class ChatCaches:
    """One conversation; tokens and bytes are of all its nodes, also of the `num_hidden` that are left out."""

    conversation_id: str
    title: str
    num_disk_tokens: int
    disk_bytes: int
    num_live_tokens: int
    live_bytes: int
    branches: tuple[CacheBranch, ...]
    num_hidden: int


@dataclass(frozen=True, slots=True)
class CacheTree:
    """All of one owner; `num_hidden` chats are left out. The limits are for all owners together;
    `max_disk_bytes` is None when nothing is saved."""

    chats: tuple[ChatCaches, ...]
    num_hidden: int
    disk_bytes: int
    max_disk_bytes: int | None
    live_bytes: int
    max_live_bytes: int


def read_cache_tree(
    owner: str,
    store: Conversations,
    live: LiveCaches,
    segments: Segments | None,
    session: ChatSession | None,
) -> CacheTree:
    """What there is now. `segments` None: nothing is saved. `session` None: the model is being loaded, so
    nothing can be said about texts and settings. Raises StoreError."""
    held = live.held_by(owner)
    nodes = segments.list(owner) if segments is not None else []
    usage = _usage(segments, nodes, session)
    members = _members(nodes, usage.other)
    chats = [chat for chat in store.list(owner, limit=_ALL) if chat.id in members or chat.id in held]
    shown = _first_nodes([(chat.id, members.get(chat.id, ())) for chat in chats])
    if segments is not None:
        usage.ids = segments.token_ids(owner, {each.id for part in shown.values() for each in part})
    usage.note_chats(members)
    usage.note_live(held, (node.segment for node in nodes))
    parts = [
        usage.chat(chat, members.get(chat.id, ()), shown[chat.id], held.get(chat.id))
        for chat in chats
        if chat.id in shown
    ]
    return CacheTree(
        chats=tuple(parts),
        num_hidden=len(chats) - len(parts),
        disk_bytes=sum(node.segment.nbytes for node in nodes),
        max_disk_bytes=segments.max_bytes if segments is not None else None,
        live_bytes=sum(holding.nbytes for holding in held.values()),
        max_live_bytes=live.max_bytes,
    )


def first_words(text: str) -> str:
    """One line of at most `TEXT_LENGTH` characters; half a character at either end is dropped."""
    line = " ".join(text.strip("\ufffd").split())
    return line if len(line) <= TEXT_LENGTH else f"{line[: TEXT_LENGTH - 1].rstrip()}…"


@dataclass(slots=True)
class _Usage:
    """How nodes are used now. `other`, `unreadable`: fingerprints that the model does not use as it is, and
    those whose tokens its tokenizer cannot read. `kinds`: of which kind of cache a fingerprint is."""

    words: Words
    other: frozenset[int]
    unreadable: frozenset[int]
    kinds: Mapping[int, str]
    ids: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    num_chats: dict[str, int] = field(default_factory=dict[str, int])
    live_ends: dict[str, int] = field(default_factory=dict[str, int])
    matches: dict[str, LiveMatch] = field(default_factory=dict[str, LiveMatch])

    def note_chats(self, members: SegmentsByChat) -> None:
        """How many chats share each segment."""
        for part in members.values():
            for segment in part:
                self.num_chats[segment.id] = self.num_chats.get(segment.id, 0) + 1

    def note_live(self, held: Mapping[str, Holding], segments: Iterable[Segment]) -> None:
        """How far each segment is in memory, in whichever chat's cache."""
        known = [each for each in segments if each.id in self.ids and each.fingerprint_id not in self.other]
        for name, holding in held.items():
            alike = [each for each in known if self.kinds.get(each.fingerprint_id) == holding.kind]
            match = self.matches[name] = match_path(holding.token_ids, alike, self.ids)
            for segment_id, end in match.ends.items():
                self.live_ends[segment_id] = max(end, self.live_ends.get(segment_id, 0))

    def chat(
        self,
        chat: Conversation,
        members: Sequence[Segment],
        shown: Sequence[Segment],
        holding: Holding | None,
    ) -> ChatCaches:
        """The part of one chat. What is in memory only is a node too, unless nodes are left out before it."""
        if holding is not None and len(shown) == len(members):
            shown = [*shown, *self._unsaved(chat, holding)]
        kind = holding.kind if holding is not None else "dynamic"
        branches = [
            CacheBranch(branch.depth, tuple(self._node(each, kind) for each in branch.segments))
            for branch in branches_of(shown)
        ]
        return ChatCaches(
            conversation_id=chat.id,
            title=chat.title,
            num_disk_tokens=sum(each.num_tokens for each in members if each.state == "stored"),
            disk_bytes=sum(each.nbytes for each in members),
            num_live_tokens=len(holding.token_ids) if holding else 0,
            live_bytes=holding.nbytes if holding else 0,
            branches=tuple(branches),
            num_hidden=max(0, len(members) - len(shown)),
        )

    def _unsaved(self, chat: Conversation, holding: Holding) -> Iterable[Segment]:
        """What a live cache holds beyond all segments, as if it were one."""
        match = self.matches[chat.id]
        ids = holding.token_ids[match.end :]
        if not ids:
            return
        name = f"unsaved {chat.id}"
        self.ids[name], self.live_ends[name] = ids, len(holding.token_ids)
        yield Segment(
            *(name, chat.owner, _UNSAVED, match.last_id, match.end, len(ids)),
            *("evicted", None, 0, None, 0.0, 0.0, 0.0),
        )

    def _node(self, segment: Segment, live_kind: str) -> CacheNode:
        is_readable = segment.fingerprint_id not in self.unreadable
        ids = self.ids.get(segment.id, ())
        return CacheNode(
            text=first_words(self.words(ids[:_TEXT_TOKENS])) if is_readable else "",
            start=segment.start,
            num_tokens=segment.num_tokens,
            num_live_tokens=max(0, self.live_ends.get(segment.id, 0) - segment.start),
            nbytes=segment.nbytes,
            was_evicted=segment.state == "evicted" and segment.fingerprint_id != _UNSAVED,
            num_chats=self.num_chats.get(segment.id, 1),
            other_setting=segment.fingerprint_id in self.other,
            kind=self.kinds.get(segment.fingerprint_id, live_kind),
        )


def _usage(segments: Segments | None, nodes: Iterable[SegmentNode], session: ChatSession | None) -> _Usage:
    made_with = (
        {}
        if segments is None
        else {
            number: segments.fields_of(number) for number in {node.segment.fingerprint_id for node in nodes}
        }
    )
    kinds = {number: kind_of(fields) for number, fields in made_with.items()}
    if session is None:
        return _Usage(lambda _: "", frozenset(), frozenset(made_with), kinds)
    ours = session.fingerprint
    other = frozenset(
        number for number, fields in made_with.items() if without_kind(fields) != without_kind(ours)
    )
    unreadable = (number for number in other if made_with[number].get("tokenizer") != ours.get("tokenizer"))
    return _Usage(session.wording.words, other, frozenset(unreadable), kinds)


def _members(nodes: Sequence[SegmentNode], other: Collection[int]) -> dict[str, list[Segment]]:
    """The segments that each chat needs, parents first; those of other settings come last."""
    users = {node.segment.id: set(node.conversation_ids) for node in nodes}
    for node in reversed(nodes):
        if node.segment.parent_id is not None:
            users[node.segment.parent_id] |= users[node.segment.id]
    members: dict[str, list[Segment]] = {}
    for node in sorted(nodes, key=lambda node: node.segment.fingerprint_id in other):
        for chat_id in users[node.segment.id]:
            members.setdefault(chat_id, []).append(node.segment)
    return members


def _first_nodes(chats: Iterable[tuple[str, Sequence[Segment]]]) -> dict[str, Sequence[Segment]]:
    """Of each chat its first segments, until `MOST_NODES` in all; a chat without one counts as one."""
    shown: dict[str, Sequence[Segment]] = {}
    num_left = MOST_NODES
    for chat_id, segments in chats:
        if num_left <= 0:
            break
        shown[chat_id] = segments[: min(num_left, MOST_NODES_PER_CHAT)]
        num_left -= max(1, len(shown[chat_id]))
    return shown

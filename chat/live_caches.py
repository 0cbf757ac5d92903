"""The caches in RAM, one per conversation, within a budget in bytes.

A cache is either kept here or lent to the one reply that is being written; never both. The budget is
checked before anything is allocated: `make_room` evicts the least recently used caches first and refuses
what would not fit even alone. What was forgotten is remembered by cause, so that a later turn can say
why it reads again. Prefixes are shared between conversations of one owner whose kinds of cache have the same
rows, never across owners or other kinds.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cache_store.records import Message
from chat.boundary_states import Boundary, BoundaryStates
from chat.errors import MemoryLimit
from chat.kv_cache import KVCache
from chat.layers.kinds import have_same_rows, is_offloaded, rows_of
from chat.settings import CacheSettings
from chat.stats import Reason


@dataclass(frozen=True, slots=True)
class LiveCache:
    """A cache and what it was read for. `system_prompt`, `reply_id` (the last reply it holds) and that
    reply's `question_id` tell an edited beginning and another branch from a template that renders the same
    past differently. `num_saved`: how many of its tokens are on disk or on their way there. `is_warmed`: it
    came from disk when the chat was opened (see `chat.warming`) and no turn has used it yet; so many files
    were found damaged on the way. `num_allowed`: only so many of its tokens may still be used, because the
    rest was deleted (None: all). `lost`: why tokens that followed on its path are not held any more, when the
    cache had to go back behind them. `num_from_disk`: so many of its first tokens were loaded from disk and
    no turn has used them yet."""

    owner: str
    cache: KVCache
    system_prompt: str
    reply_id: str = ""
    question_id: str = ""
    num_saved: int = 0
    is_warmed: bool = False
    num_damaged_files: int = 0
    num_allowed: int | None = None
    lost: Reason | None = None
    num_from_disk: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids that may be used."""
        return self.cache.token_ids[: self.num_allowed]

    def num_common(self, token_ids: Sequence[int]) -> int:
        """Length of the longest common beginning of what may be used and `token_ids`."""
        return self.cache.num_common(token_ids[: self.num_allowed])

    def was_read_for(self, path: Sequence[Message]) -> bool:
        """Whether its last turn was on this path: answered on it, or another answer to its last question."""
        return path[-1].id == self.question_id or any(message.id == self.reply_id for message in path)


@dataclass(frozen=True, slots=True)
class Holding:
    """What a kept cache holds: its tokens, and the bytes allocated for them, spare room included; and of what
    kind its rows are (see `rows_of`)."""

    token_ids: tuple[int, ...]
    nbytes: int
    kind: str


class LiveCaches:
    """See the module. Safe from any thread; the tensors themselves belong to the inference thread."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.RLock()
        self._kept: OrderedDict[str, LiveCache] = OrderedDict()
        self._forgotten: dict[str, Reason] = {}
        self._states = BoundaryStates()

    def __len__(self) -> int:
        with self._lock:
            return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of all kept caches and boundary states; a lent cache counts with its borrower."""
        with self._lock:
            return self._states.nbytes + sum(live.cache.nbytes for live in self._kept.values())

    @property
    def host_bytes(self) -> int:
        """Of `nbytes`, those in the computer's memory wherever the model runs."""
        with self._lock:
            kept = [live.cache for live in self._kept.values() if is_offloaded(live.cache.settings.kind)]
            return self._states.nbytes + sum(cache.nbytes for cache in kept)

    def take(self, conversation_id: str) -> LiveCache | None:
        """Lend out the conversation's cache; whoever took it calls `keep` or `forget`."""
        with self._lock:
            return self._kept.pop(conversation_id, None)

    def holds(self, conversation_id: str) -> bool:
        """Whether the conversation's cache is kept here right now."""
        with self._lock:
            return conversation_id in self._kept

    def kept(self) -> dict[str, LiveCache]:
        """Every kept cache by its conversation; they stay kept."""
        with self._lock:
            return dict(self._kept)

    def keep(self, conversation_id: str, live: LiveCache) -> None:
        """Keep a cache as the most recently used one, evicting others where the budget asks for it."""
        with self._lock:
            self._kept.pop(conversation_id, None)
            self._forgotten.pop(conversation_id, None)
            try:
                self.make_room(live.cache.nbytes)
            except MemoryLimit:
                self._forgotten[conversation_id] = "evicted"
                return
            self._kept[conversation_id] = live

    def forget(self, conversation_id: str, reason: Reason | None = None) -> None:
        """Drop a conversation's cache. `reason` is what its next turn will give; None for a deleted chat."""
        with self._lock:
            self._kept.pop(conversation_id, None)
            self._forgotten.pop(conversation_id, None)
            if reason is not None:
                self._forgotten[conversation_id] = reason
            else:
                self._states.forget(conversation_id)

    def note_boundary(self, conversation_id: str, owner: str, cache: KVCache) -> None:
        """Keep the states that a lent cache has now, if it has any, to go back to this place. Where the
        budget has no room for them beside it, older ones go, and at last these."""
        if cache.has_rows() or not cache.can_be_saved():
            return
        with self._lock:
            self._states.note(conversation_id, owner, cache)
            while self.nbytes + cache.nbytes > self.max_bytes and self._states.drop_oldest():
                pass

    def boundary(
        self,
        owner: str,
        settings: CacheSettings,
        token_ids: Sequence[int],
        lent: LiveCache | None = None,
    ) -> tuple[Boundary, KVCache | None] | None:
        """The longest beginning of `token_ids` that a cache with states can go back to: one of the owner's
        kept caches with the same rows, or the lent one; and that cache, if its rows are needed for it."""
        with self._lock:
            caches = [
                live
                for live in (lent, *self._kept.values())
                if live is not None and live.owner == owner and have_same_rows(live.cache.settings, settings)
            ]
            sources = [
                (live.num_common(token_ids), live.cache) for live in caches if not live.cache.has_rows()
            ]
            best: tuple[Boundary, KVCache | None] | None = None
            for num_rows, cache in [*sources, (0, None)]:
                found = self._states.best(owner, settings, token_ids, num_rows)
                if found is not None and (best is None or len(found) > len(best[0])):
                    best = (found, cache if found.needs_rows else None)
            return best

    def keep_paths(self, conversation_id: str, paths: Sequence[Sequence[int]]) -> None:
        """Let nobody use more of a conversation's cache than a beginning of one of these paths."""
        with self._lock:
            self._states.keep_paths(conversation_id, paths)
            live = self._kept.get(conversation_id)
            if live is not None:
                num_allowed = max(map(live.num_common, paths), default=0)
                self._kept[conversation_id] = replace(live, num_allowed=num_allowed)

    def num_usable(
        self, owner: str, settings: CacheSettings, conversation_id: str, token_ids: Sequence[int]
    ) -> int:
        """How many of these tokens the conversation's kept cache, of this kind or to be converted to it, has
        at its beginning and can be cut to, or can be had at a boundary, or can be copied out of another cache
        of the owner."""
        with self._lock:
            live = self._kept.get(conversation_id)
            common = live.num_common(token_ids) if live is not None else 0
            is_ours = live is not None and live.cache.can_convert_to(settings)
            own = common if live is not None and is_ours and live.cache.can_crop_to(common) else 0
            boundary = self.boundary(owner, settings, token_ids)
            _, shared = self.longest_prefix(owner, settings, token_ids)
            return max(own, len(boundary[0]) if boundary else 0, shared)

    def why_missing(self, conversation_id: str) -> Reason | None:
        """Why a conversation has no cache although it had one in this process; None when it had none."""
        with self._lock:
            return self._forgotten.get(conversation_id)

    def held_by(self, owner: str) -> dict[str, Holding]:
        """What is kept of this owner's conversations, by their ids; a lent cache is not kept."""
        with self._lock:
            mine = {name: live for name, live in self._kept.items() if live.owner == owner}
            return {
                name: Holding(live.token_ids, live.cache.nbytes, rows_of(live.cache.settings.kind))
                for name, live in mine.items()
            }

    def longest_prefix(
        self, owner: str, settings: CacheSettings, token_ids: Sequence[int]
    ) -> tuple[KVCache | None, int]:
        """The kept cache of this owner, with rows of this kind, that shares the longest beginning with
        `token_ids`, and its length. Only caches whose prefix can be copied out count."""
        with self._lock:
            best: tuple[KVCache | None, int] = (None, 0)
            for live in self._kept.values():
                if live.owner != owner or not have_same_rows(live.cache.settings, settings):
                    continue
                if not live.cache.has_rows():
                    continue
                length = live.num_common(token_ids)
                if length and length >= best[1]:  # of equals the most recently used one
                    best = (live.cache, length)
            return best

    def make_room(self, num_bytes: int, beside: KVCache | None = None) -> None:
        """Evict until `num_bytes` more fit next to what is kept; the cache `beside` stays. A conversation's
        boundary states go with its cache; states of a lent one go last.

        Raises MemoryLimit when they would not fit even alone with it; then nothing was evicted.
        """
        with self._lock:
            if num_bytes + (beside.nbytes if beside else 0) > self.max_bytes:
                raise MemoryLimit(
                    f"This chat needs {_megabytes(num_bytes)} of cache, but --max-live-memory allows"
                    f" {_megabytes(self.max_bytes)}; your text is kept, allow more or use a new chat."
                )
            for name, live in list(self._kept.items()):
                if self.nbytes + num_bytes <= self.max_bytes:
                    return
                if live.cache is not beside:
                    del self._kept[name]
                    self._states.forget(name)
                    self._forgotten[name] = "evicted"
            while self.nbytes + num_bytes > self.max_bytes and self._states.drop_oldest():
                pass


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"

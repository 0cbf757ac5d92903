"""A conversation's rows on disk, as the inference thread uses them: look up, load, save.

One `DiskCaches` stands for one model and kind of cache: its fingerprint is part of every look-up, so rows
that anything else computed are never seen, let alone read. Rows are loaded into room behind what a cache
holds and count only once their file's checksum was right. A file that is damaged is set aside and the
look-up repeated; its tokens are read from text.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from cache_store.errors import DiskRefused, SegmentDamaged, SegmentGone, StoreError
from cache_store.records import Chain, Link
from cache_store.segments import Segments
from chat.errors import CacheMismatch
from chat.kv_cache import KVCache
from chat.layers.kinds import CACHE_FIELD
from chat.live_caches import LiveCache
from chat.row_reader import States
from chat.saver import NewRows, Saver
from chat.stats import CACHE_KIND

log = logging.getLogger(__name__)

Obstacle = Literal["damaged", "unreadable", "no state"]

NOTHING = Chain((), False)
NUM_READERS = min(4, os.cpu_count() or 1)
"""Files that are read at once: what costs is less the disk than memory that the system hands out anew."""

PATIENCE_S = 5.0
"""How long a look-up waits for rows of the same conversation that are on their way to the disk."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What came of loading: the cache to go on with, how many tokens of the given one it still has from
    before, and how many damaged files stood in the way."""

    cache: KVCache
    num_kept: int
    num_damaged_files: int


class DiskCaches:
    """See the module. For the inference thread, but for `forget`."""

    def __init__(self, segments: Segments, saver: Saver, fingerprint: Mapping[str, str]) -> None:
        self._segments = segments
        self._saver = saver
        self._fields = dict(fingerprint)
        self._fingerprint_id = segments.fingerprint_id(fingerprint)

    def of_kind(self, parameters: str) -> DiskCaches:
        """The same model's rows of another kind of cache, which is told by its parameters."""
        return DiskCaches(self._segments, self._saver, {**self._fields, CACHE_FIELD: parameters})

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """With what the rows were computed that are looked up and saved here."""
        return self._fields

    def find(self, owner: str, conversation_id: str, token_ids: Sequence[int], *, wait: bool) -> Chain:
        """The longest beginning of `token_ids` that is on disk; `wait` for rows still being written.
        A store that cannot be read counts as empty."""
        if wait:
            self._saver.wait_for(conversation_id, PATIENCE_S)
        try:
            return self._segments.find(owner, self._fingerprint_id, token_ids)
        except StoreError as error:
            log.warning("saved caches could not be looked up: %s", error)
            return NOTHING

    def load(
        self,
        cache: KVCache,
        chain: Chain,
        token_ids: Sequence[int],
        conversation_id: str,
        new_cache: Callable[[], KVCache],
        *,
        rows_only: bool = False,
    ) -> Loaded:
        """Bring `cache`, which holds some beginning of `token_ids`, as far along `chain` as files allow.

        A cache with states is put back, fresh, at the newest end of a segment whose state is there; the given
        one is returned as it was when no such end lies behind its own. With `rows_only` its states come from
        elsewhere. A file that the system does not let us read counts as damaged, but is left where it is.
        """
        given, wanted, num_kept = cache, token_ids[: chain.num_tokens], len(cache)
        num_damaged, is_refused = 0, False
        while chain.links:
            owner = chain.links[0].segment.owner
            if not rows_only and not given.has_rows():
                chain = states_at_ends(chain)
                if chain.num_tokens <= len(given):
                    break
                cache = new_cache()
            missing = [link for link in chain.links if link.end > len(cache)]
            if cache is given:
                num_kept = min(num_kept, *(link.segment.start for link in missing), len(cache))
            outcome = self._load_links(cache, missing, token_ids, rows_only=rows_only)
            if outcome is None:
                self._use(conversation_id, chain)
                return Loaded(cache, num_kept, num_damaged + is_refused)
            if not len(given):
                given = cache = new_cache()  # it may have taken its shape from a header that lies
            if outcome == "damaged":
                num_damaged += 1
                chain = self.find(owner, conversation_id, wanted, wait=False)
            else:
                is_refused = is_refused or outcome == "unreadable"
                chain = replace(chain, links=chain.links[:-1])
        return Loaded(given, num_kept, num_damaged + is_refused)

    def save(self, rows: NewRows, patience_s: float = 0.0) -> bool:
        """Queue new rows; False when they were not taken and should be offered again."""
        return self._saver.offer(rows, patience_s)

    def save_rest(
        self, conversation_id: str, live: LiveCache, seconds_per_token: float, patience_s: float
    ) -> None:
        """Queue what of a kept cache is not on its way to the disk, or was lost there; it is cut to what may
        still be used of it."""
        num_kept = len(live.token_ids)
        if not (live.cache.can_be_saved() and live.cache.can_crop_to(num_kept)):
            return
        live.cache.crop_to(num_kept)
        num_saved = live.num_saved
        if self.take_lost(conversation_id):
            num_saved = self.num_stored(live.owner, conversation_id, live.cache)
        if num_saved < num_kept:
            rows = self.new_rows(live.owner, conversation_id, live.cache, num_saved, seconds_per_token)
            self.save(rows, patience_s)

    def num_stored(self, owner: str, conversation_id: str, cache: KVCache) -> int:
        """How many of a cache's tokens are on disk."""
        return self.find(owner, conversation_id, cache.token_ids, wait=False).num_tokens

    def new_rows(
        self, owner: str, conversation_id: str, cache: KVCache, start: int, seconds_per_token: float
    ) -> NewRows:
        """Copies of what `cache` holds from token `start` on, for `save`."""
        return NewRows(
            owner,
            conversation_id,
            self._fingerprint_id,
            cache.token_ids,
            start,
            cache.rows_out(start),
            (len(cache) - start) * seconds_per_token,
        )

    def keep_paths(self, conversation_id: str, paths: Sequence[Sequence[int]]) -> None:
        """This conversation needs no rows but those of beginnings of these paths any more, from any thread.
        Raises DiskRefused when files could not be removed."""
        known = self._segments.fingerprints_of(conversation_id)
        ours = [number for number in known if self._is_same_model(self._segments.fields_of(number))]
        self._saver.keep_paths(conversation_id, ours, paths)

    def take_lost(self, conversation_id: str) -> bool:
        """Whether rows of this conversation that were queued could not be written."""
        return self._saver.take_lost(conversation_id)

    def last_path(self, conversation_id: str) -> tuple[int, ...]:
        """The ids of the path that this conversation's rows were last saved or used for; empty when none."""
        try:
            return self._segments.last_path(conversation_id, self._fingerprint_id)
        except StoreError as error:
            log.warning("saved caches could not be looked up: %s", error)
            return ()

    def changed_field(self, conversation_id: str) -> str:
        """What differs between the fingerprint of this conversation's saved rows and ours, in words; empty
        when some were saved under ours or none at all."""
        try:
            known = self._segments.fingerprints_of(conversation_id)
            if not known or self._fingerprint_id in known:
                return ""
            theirs = self._segments.fields_of(known[0])
        except StoreError as error:
            log.warning("saved caches could not be looked up: %s", error)
            return ""
        names = sorted(self._fields.keys() | theirs.keys())
        differs = next((name for name in names if self._fields.get(name) != theirs.get(name)), "")
        return changed(
            CACHE_KIND if differs == CACHE_FIELD else differs,
            theirs.get(differs, "—"),
            self._fields.get(differs, "—"),
        )

    def _is_same_model(self, fields: Mapping[str, str]) -> bool:
        """Whether rows computed with these fields differ from ours in their kind of cache at most."""
        return without_kind(fields) == without_kind(self._fields)

    def _load_links(
        self, cache: KVCache, links: Sequence[Link], token_ids: Sequence[int], *, rows_only: bool
    ) -> Obstacle | None:
        """Read links, several at a time, and adopt those before the first that is no good; None when all of
        it is there, else what stood in the way."""
        if not links:
            return None
        if links[0].segment.start < len(cache):
            cache.crop_to(links[0].segment.start)  # the file is read from its beginning
        obstacle = self._obstacle(links[0], lambda: self._make_room(cache, links))
        if obstacle is not None:
            return obstacle
        with ThreadPoolExecutor(NUM_READERS, "reader") as readers:
            reads = [
                readers.submit(self._read, cache, link, with_state=not rows_only and link is links[-1])
                for link in links
            ]
            good: list[tuple[Link, States | None]] = []
            for link, read in zip(links, reads, strict=True):
                obstacle = self._obstacle(link, read.result)
                if obstacle is not None:
                    break
                good.append((link, read.result()))
            readers.shutdown(cancel_futures=True)
        if good:
            last, states = good[-1]
            adopt = partial(cache.adopt_rows, token_ids[len(cache) : last.end], states)
            obstacle = self._obstacle(last, adopt) or obstacle
        return obstacle

    def _make_room(self, cache: KVCache, links: Sequence[Link]) -> None:
        with self._segments.open(links[0].segment) as file:
            cache.expect_rows(file.tensors, links[-1].end)

    def _read(self, cache: KVCache, link: Link, *, with_state: bool) -> States | None:
        """One file; the state at its end is only wanted of the last one."""
        with self._segments.open(link.segment) as file:
            states = cache.read_rows(file, link.segment.start, link.end, with_state=with_state)
        return states if with_state else None

    def _obstacle(self, link: Link, step: Callable[[], object]) -> Obstacle | None:
        """Do a step of loading a link; what stood in its way, if anything did."""
        try:
            step()
        except SegmentDamaged as damage:
            self._segments.set_aside(link.segment, damage.why)
            return "damaged"
        except SegmentGone:
            return "damaged"
        except DiskRefused as refusal:
            log.warning("%s", refusal)
            return "unreadable"
        except CacheMismatch as mismatch:
            log.info("no state at the end of a saved segment: %s", mismatch)
            return "no state"
        except Exception:  # what a header says is used before the whole file was seen
            damage = self._segments.damage_of(link.segment)
            if damage is None:
                raise
            self._segments.set_aside(link.segment, damage)
            return "damaged"
        return None

    def _use(self, conversation_id: str, chain: Chain) -> None:
        """Rows that a chat goes on from must not be forgotten with the chat that saved them."""
        if not chain.links:
            return
        try:
            self._segments.use(conversation_id, chain.links[-1])
        except StoreError as error:
            log.info("a use of saved rows was not recorded: %s", error)


def changed(name: str, old: str, new: str) -> str:
    """How a setting changed, in words."""
    return f"{name} was {old}, is {new}"


def without_kind(fields: Mapping[str, str]) -> dict[str, str]:
    """A fingerprint as far as it is about the model and its texts."""
    return {name: value for name, value in fields.items() if name != CACHE_FIELD}


def kind_of(fields: Mapping[str, str]) -> str:
    """The kind of cache that a fingerprint is of, by its option's name."""
    return fields.get(CACHE_FIELD, "").partition(",")[0]


def states_at_ends(chain: Chain) -> Chain:
    """The part of a chain that ends at the end of a segment, for caches that need the state kept there."""
    links = chain.links
    if links and links[-1].num_rows < links[-1].segment.num_tokens:
        links = links[:-1]
    return replace(chain, links=links)

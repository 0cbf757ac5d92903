"""Which kind of cache a conversation uses, and where caches of each kind come from.

A conversation has a kind of its own, or none: then the host's. A chat may come from another machine, so a
kind that cannot be had here is answered with the host's, and a sentence; nothing of the chat changes, and on
the machine that has the kind its rows are found again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import get_args

from cache_store.records import Conversation
from chat.disk import DiskCaches
from chat.divergence import Decode
from chat.errors import KindUnavailable
from chat.kind_ladder import OFFLOADED, next_smaller
from chat.kv_cache import KVCache
from chat.layers.kinds import Availability, availability, codec_for, is_exact, parameters
from chat.layers.sizes import CacheCost, cache_cost
from chat.live_caches import LiveCaches
from chat.model import LoadedModel
from chat.model_facts import text_config
from chat.places import Places
from chat.settings import CacheKind, CacheSettings

KINDS: tuple[CacheKind, ...] = get_args(CacheKind)


@dataclass(frozen=True, slots=True)
class KindInUse:
    """The kind that a conversation's next turn uses. `notice` says why it is not the one that was chosen."""

    kind: CacheKind
    notice: str = ""


class KindPlaces:
    """See the module. `settings` are the host's; from any thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        live: LiveCaches,
        settings: CacheSettings,
        disk: DiskCaches | None,
        decode: Decode,
    ) -> None:
        self._loaded = loaded
        self._live = live
        self._settings = settings
        self._disk = disk
        self._decode = decode
        self._made: dict[CacheKind, Places] = {}
        self._known: dict[CacheKind, Availability] = {}
        self._lock = threading.RLock()

    @property
    def default_kind(self) -> CacheKind:
        """The host's."""
        return self._settings.kind

    def settings_of(self, kind: CacheKind) -> CacheSettings:
        """The host's settings with this kind."""
        return replace(self._settings, kind=kind)

    def in_use(self, conversation: Conversation | None) -> KindInUse:
        """See the module; None is a conversation that is still to be made."""
        chosen, default = conversation.cache_kind if conversation else None, self.default_kind
        if chosen is None:
            return KindInUse(default)
        if chosen not in KINDS:
            why = f"this Keepwarm knows no cache kind {chosen!r}"
        else:
            found = self.availability(chosen)
            if found.is_available:
                return KindInUse(chosen)
            why = f"its cache kind {chosen} cannot be had here, because {found.because}"
        return KindInUse(default, f"This chat uses {default}: {why}; nothing of it was lost.")

    def of(self, conversation: Conversation) -> Places:
        """Where the next turn's cache comes from."""
        return self.of_kind(self.in_use(conversation).kind)

    def of_kind(self, kind: CacheKind) -> Places:
        """Where caches of a kind come from."""
        with self._lock:
            if kind not in self._made:
                self._made[kind] = self._make(self.settings_of(kind))
            return self._made[kind]

    def availability(self, kind: CacheKind) -> Availability:
        """Whether a kind can be had. A library that is there is tried once: it may not load all the same."""
        with self._lock:
            if kind not in self._known:
                self._known[kind] = self._tried(kind)
            return self._known[kind]

    def smaller_than(self, kind: CacheKind, *, for_budget: bool) -> CacheKind | None:
        """One step down the ladder; None at its foot. `for_budget`: it was a budget that was used up."""
        may_offload = not for_budget and self.availability(OFFLOADED).is_available
        costs: dict[CacheKind, int] = {each: self.cost_of(each).per_token for each in KINDS}
        return next_smaller(kind, costs, may_offload=may_offload)

    def cost_of(self, kind: CacheKind) -> CacheCost:
        """What a cache of this kind takes, also one that cannot be had here."""
        return cache_cost(text_config(self._loaded.model), self.settings_of(kind), self._loaded.dtype)

    def _tried(self, kind: CacheKind) -> Availability:
        found = availability(kind, self._loaded.device.type)
        if found.is_available:
            try:
                codec_for(self.settings_of(kind))
            except KindUnavailable as error:
                return Availability(str(error))
        return found

    def _make(self, settings: CacheSettings) -> Places:
        disk = self._disk
        if disk is not None and settings != self._settings:
            disk = disk.of_kind(parameters(settings))
        return Places(
            self._live,
            disk,
            lambda: KVCache(self._loaded.model, settings),
            self._decode,
            settings,
            None if is_exact(settings.kind) else self.of_kind("dynamic"),
        )

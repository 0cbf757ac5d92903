"""Choosing a kind of cache for a chat, and what a person should know before: memory, quality, cost.

Nothing here is computed when it is not asked for, and no tensor is touched but by measuring, which waits
until the model has nothing else to do and is done once for each model and kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from cache_store.conversations import Conversations
from cache_store.kind_qualities import KindQualities
from cache_store.records import Conversation, KindQuality
from chat.branches import Branches
from chat.chat_view import Cost
from chat.errors import KindUnavailable
from chat.kind_names import name_of
from chat.kind_places import KINDS
from chat.layers.kinds import Availability, cache_fingerprint, is_exact
from chat.live_caches import LiveCaches
from chat.memory_forecast import KindForecast, Room, forecast, free_bytes, with_recommended
from chat.model_facts import text_config
from chat.quality_probe import NUM_TOKENS, Verdict, measure, probe_fields, probe_text, verdict
from chat.questions import NEW_CHAT
from chat.saver import Saver
from chat.session import ChatSession
from chat.settings import CacheKind
from chat.worker import IdleWork, Worker

_MEASURING = "measure "


@dataclass(frozen=True, slots=True)
class KindView:
    """One kind as a page shows it. `quality` is None until it was measured. `cost`: what changing to it would
    make the model read again with the next message; None for the kind in use and without a chat."""

    kind: CacheKind
    availability: Availability
    forecast: KindForecast
    quality: KindQuality | None
    is_being_measured: bool
    cost: Cost | None

    @property
    def is_exact(self) -> bool:
        """Whether there is nothing to measure, because answers are those of the dense cache."""
        return is_exact(self.kind)

    @property
    def verdict(self) -> Verdict | None:
        """What its quality means to a person."""
        return verdict(self.quality) if self.quality else None


@dataclass(frozen=True, slots=True)
class KindMenu:
    """All kinds, the dense one first. `in_use` is what the next turn uses; `notice` says why, when it is not
    what was chosen. `may_shrink`: a smaller kind may be taken where memory runs out."""

    in_use: CacheKind
    notice: str
    may_shrink: bool
    kinds: tuple[KindView, ...]


class KindChoices(Branches):
    """See the module. Raises `ChatError` or `StoreError` subclasses; their text is for people."""

    def __init__(
        self,
        store: Conversations,
        worker: Worker,
        live: LiveCaches,
        qualities: KindQualities,
        *,
        default_system_prompt: str = "",
        saver: Saver | None = None,
    ) -> None:
        super().__init__(store, worker, live, default_system_prompt=default_system_prompt, saver=saver)
        self._qualities = qualities

    def set_cache_kind(self, owner: str, conversation_id: str, kind: str) -> Conversation:
        """Use this kind from the next turn on. Rows of other kinds stay on disk. Raises KindUnavailable,
        NotFound."""
        self._check_kind(kind)
        return self._store.set_cache_kind(owner, conversation_id, kind)

    def create_with_kind(self, owner: str, kind: str) -> Conversation:
        """An empty conversation of this kind. Raises KindUnavailable."""
        self._check_kind(kind)
        return self._store.create(
            owner, title=NEW_CHAT, system_prompt=self._default_system_prompt, cache_kind=kind
        )

    def _check_kind(self, kind: str) -> None:
        session = self._worker.session
        if kind not in KINDS:
            raise KindUnavailable(
                f"There is no cache kind {kind!r}; nothing was changed, choose another one."
            )
        found = session.kinds.availability(kind) if session is not None else Availability()
        if not found.is_available:
            raise KindUnavailable(
                f"{name_of(kind).capitalize()} cannot be used here, because {found.because}; nothing was"
                " changed, choose another kind."
            )

    def kind_menu(self, owner: str, conversation_id: str | None) -> KindMenu | None:
        """What there is to choose from for a conversation, or for a new one (None). None while no model is
        loaded. Raises NotFound, PromptFailed."""
        session = self._worker.session
        if session is None:
            return None
        conversation = self._store.get(owner, conversation_id) if conversation_id else None
        in_use = session.kinds.in_use(conversation)
        costs = self._costs(session, conversation, in_use.kind)
        qualities: dict[CacheKind, KindQuality | None] = {
            kind: self._qualities.get(_fields(session, kind)) for kind in KINDS
        }
        forecasts = self._forecasts(session, qualities)
        waiting = self._worker.idle_work
        views = [
            KindView(
                kind,
                session.kinds.availability(kind),
                forecasts[kind],
                qualities[kind],
                _MEASURING + kind in waiting,
                costs.get(kind),
            )
            for kind in KINDS
        ]
        return KindMenu(in_use.kind, in_use.notice, self._store.may_shrink_caches(owner), tuple(views))

    def measure_kinds(self) -> None:
        """Measure all kinds that can be had and were not measured yet, as soon as nobody needs the model."""
        session = self._worker.session
        if session is None:
            return
        for kind in KINDS:
            is_lossy = not is_exact(kind) and session.kinds.availability(kind).is_available
            if is_lossy and self._qualities.get(_fields(session, kind)) is None:
                self._worker.when_idle(IdleWork(_MEASURING + kind, self._measuring(kind)))

    def is_measuring(self) -> bool:
        """Whether figures are still to come."""
        return any(name.startswith(_MEASURING) for name in self._worker.idle_work)

    def allow_smaller_caches(self, owner: str, *, allowed: bool) -> None:
        """Whether a reply of this owner may go on with a smaller kind where memory runs out."""
        self._store.allow_shrinking_caches(owner, allowed)

    def _costs(
        self, session: ChatSession, conversation: Conversation | None, in_use: CacheKind
    ) -> Mapping[CacheKind, Cost]:
        if conversation is None:
            return {}
        path = self._store.path(conversation.owner, conversation.id)
        others: list[CacheKind] = [
            kind for kind in KINDS if kind != in_use and session.kinds.availability(kind).is_available
        ]
        return session.costs_of_kinds(conversation, path, others)

    def _forecasts(
        self, session: ChatSession, qualities: Mapping[CacheKind, KindQuality | None]
    ) -> dict[CacheKind, KindForecast]:
        loaded = session.loaded
        room = self._room(loaded.device)
        config = text_config(loaded.model)
        settings = map(session.kinds.settings_of, KINDS)
        known = [forecast(config, each, loaded.dtype, room, loaded.num_context_tokens) for each in settings]
        usable = [each for each in known if session.kinds.availability(each.kind).is_available]
        flagged: list[CacheKind] = [
            kind for kind, found in qualities.items() if found and verdict(found) == "not recommended"
        ]
        advised = {each.kind: each for each in with_recommended(usable, flagged)}
        return {each.kind: advised.get(each.kind, each) for each in known}

    def _room(self, device: torch.device) -> Room:
        live, max_bytes = self._live.nbytes, self._live.max_bytes
        if device.type != "cuda":
            return Room(free_bytes(device) + live, max_bytes)
        in_host = self._live.host_bytes
        free_host = free_bytes(torch.device("cpu")) + in_host
        return Room(free_bytes(device) + live - in_host, max_bytes, free_host)

    def _measuring(self, kind: CacheKind) -> Callable[[ChatSession, Callable[[], bool]], bool]:
        def do(session: ChatSession, goes_on: Callable[[], bool]) -> bool:
            token_ids = session.wording.ids_of_text(probe_text())[:NUM_TOKENS]
            dense, other = (session.kinds.of_kind(each).new_cache() for each in ("dynamic", kind))
            self._live.make_room(dense.nbytes_for(len(token_ids)) + other.nbytes_for(len(token_ids)))
            quality = measure(dense, other, token_ids, goes_on)
            if quality is not None:
                self._qualities.put(_fields(session, kind), quality)
            return quality is not None

        return do


def _fields(session: ChatSession, kind: CacheKind) -> dict[str, str]:
    return probe_fields(cache_fingerprint(session.loaded.fingerprint, session.kinds.settings_of(kind)))

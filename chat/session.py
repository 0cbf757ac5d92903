"""A loaded model at work on stored conversations: everything that needs both.

Replies are written by `ReplyWriter`; here is what goes on around them. What the methods for any thread tell
is what holds at that moment: a reply that is being written meanwhile has lent its cache.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cache_store.conversations import Conversations
from cache_store.errors import NotFound, StoreError
from cache_store.records import NOTHING_YET, Beginning, Conversation, Message
from chat.chat_view import Cost
from chat.disk import DiskCaches
from chat.errors import ChatError
from chat.kind_places import KindPlaces
from chat.live_caches import LiveCaches
from chat.model import LoadedModel
from chat.reply_writer import ReplyWriter
from chat.reuse import num_remembered
from chat.settings import CacheKind, CacheSettings
from chat.warming import warm
from chat.wording import Wording

log = logging.getLogger(__name__)

REST_PATIENCE_S = 5.0
"""How long the end of the app waits for room in the saver's queue, for each chat."""


class ChatSession:
    """See the module. A method says where it does not run on the inference thread only."""

    def __init__(
        self,
        loaded: LoadedModel,
        store: Conversations,
        live: LiveCaches,
        settings: CacheSettings,
        disk: DiskCaches | None = None,
    ) -> None:
        self.loaded = loaded
        self.wording = Wording(loaded)
        self.kinds = KindPlaces(loaded, live, settings, disk, self.wording.decode)
        self._store = store
        self._live = live
        self._disk = disk
        self._writer = ReplyWriter(loaded, store, live, settings, self.kinds, self.wording)
        self.advance = self._writer.advance

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """What saved rows must have been computed with to be of use here."""
        return self.loaded.fingerprint if self._disk is None else self._disk.fingerprint

    def check_fits(
        self, path: Sequence[Message], system_prompt: str, beginning: Beginning = NOTHING_YET
    ) -> None:
        """Raises ContextFull or PromptFailed when no reply to `path` that begins so could be written. From
        any thread."""
        self.wording.check_context(self.wording.prompt(path, system_prompt, beginning))

    def paths_without(self, conversation: Conversation, message_id: str) -> list[tuple[int, ...]]:
        """The ids of every path of a conversation down to its last message, as if this message and all below
        it were gone. From any thread."""
        leaves = self._store.leaves(conversation.owner, conversation.id, message_id)
        return [self.wording.ids_read(path, conversation.system_prompt) for path in leaves]

    def keep_paths(self, conversation: Conversation, paths: Sequence[tuple[int, ...]]) -> None:
        """Forget of this conversation's caches, live and saved, what is no beginning of one of these paths.
        From any thread, while no reply is written. Raises DiskRefused when files could not be removed."""
        self._live.keep_paths(conversation.id, paths)
        if self._disk is not None:
            self._disk.keep_paths(conversation.id, paths)

    def cost_of(
        self, conversation: Conversation, path: Sequence[Message], beginning: Beginning = NOTHING_YET
    ) -> Cost:
        """What would be read for a reply to `path` that begins so. From any thread. Raises PromptFailed."""
        prompt = self.wording.prompt(path, conversation.system_prompt, beginning)
        usable_ids = prompt.token_ids[:-1]
        cost = self._cost(len(prompt) - num_remembered(self.kinds.of(conversation), conversation, usable_ids))
        return replace(cost, num_too_many=max(0, len(prompt) + 1 - self.loaded.num_context_tokens))

    def costs_of_kinds(
        self, conversation: Conversation, path: Sequence[Message], kinds: Sequence[CacheKind]
    ) -> Mapping[CacheKind, Cost]:
        """What of a conversation's past would be read again, if its cache were of each of these kinds from
        now on. From any thread. Raises PromptFailed."""
        read_ids = self.wording.ids_read(path, conversation.system_prompt)[:-1] if path else ()
        return {
            kind: self._cost(len(read_ids) - num_remembered(self.kinds.of_kind(kind), conversation, read_ids))
            for kind in kinds
        }

    def _cost(self, num_tokens: int) -> Cost:
        pace = self._writer.read_s_per_token
        return Cost(num_tokens, num_tokens * pace if pace else None)

    def warm(self, conversation: Conversation) -> None:
        """Bring the rows that a conversation has on disk back into memory. Nothing happens where they are
        there already, or cannot be had: its next turn then does what it would have done. On the inference
        thread only."""
        if self._live.holds(conversation.id):
            return
        try:
            path = self._store.path(conversation.owner, conversation.id)
            warmed = warm(self.kinds.of(conversation), self.wording.renderer, conversation, path)
            if warmed is not None:
                self._live.keep(conversation.id, warmed)
                self._store.message(conversation.owner, warmed.reply_id)  # it may have been deleted meanwhile
        except NotFound:
            self._live.forget(conversation.id)
        except (ChatError, StoreError) as error:
            log.info("a chat was opened without warming it: %s", error)

    def save_rest(self) -> None:
        """Before the end: queue what of the kept caches was refused by a full queue or could not be written.
        On the inference thread only."""
        for conversation_id, live in self._live.kept().items():
            disk = self.kinds.of_kind(live.cache.settings.kind).disk
            if disk is not None:
                disk.save_rest(conversation_id, live, self._writer.read_s_per_token, REST_PATIENCE_S)

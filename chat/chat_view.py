"""What `Chats` hands to a page: frozen looks at a conversation, at the model, at what a verb would cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cache_store.records import Conversation, Message, Siblings
from chat.job import Job


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The model as a page shows it. `detail`: a sentence while loading or after a failure.
    `num_context_tokens` and `kv_bytes_per_token` are 0 until it is ready."""

    state: Literal["loading", "ready", "failed"]
    name: str
    detail: str = ""
    device: str = ""
    dtype: str = ""
    num_context_tokens: int = 0
    kv_bytes_per_token: int = 0


@dataclass(frozen=True, slots=True)
class ChatView:
    """One conversation as it stands: the selected path, root first, and the reply on its way if any.

    `siblings` has an entry for every message of the path. `job` is None when nothing is being written.
    """

    conversation: Conversation
    messages: tuple[Message, ...]
    siblings: Mapping[str, Siblings]
    job: Job | None

    @property
    def leaf_id(self) -> str | None:
        """The id of the last message shown; what `Chats.send` compares against."""
        return self.messages[-1].id if self.messages else None


@dataclass(frozen=True, slots=True)
class Undone:
    """The chat after an undo, and the text of the question that is not shown any more."""

    view: ChatView
    text: str


@dataclass(frozen=True, slots=True)
class Cost:
    """What the model would have to read before its first word: tokens that no cache holds, and about how
    many seconds that takes; None before anything was read by which to tell. `num_too_many`: by so many tokens
    the chat would be too long for the model to write even one; where it is not 0, no reply comes."""

    num_tokens: int
    seconds: float | None
    num_too_many: int = 0

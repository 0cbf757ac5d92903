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
    """One chat. Times are seconds since the epoch."""

    id: str
    owner: str
    title: str
    system_prompt: str
    created_at: float
    updated_at: float


@dataclass(frozen=True, slots=True)
class Message:
    """One node of the tree.

    `token_ids` are the exact ids that were sampled, end-of-turn included; they are empty for user
    messages, whose ids are whatever the template makes of the text. `sampling`, `seed` and `stats` are
    set for replies only; the store keeps them as JSON and does not look inside.
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

"""Short ways to have a reply written, held, stopped or cut, for tests that are about what follows."""

from __future__ import annotations

from typing import Any

from cache_store.records import Message
from chat.chats import ChatView
from chat.job import Job
from chat.settings import SamplingSettings
from tests.chat.passes import Hold, llama
from tests.house import OWNER, House

TOKENIZER: Any = llama().tokenizer
END = int(TOKENIZER.eos_token_id)
CHUNK = 16
"""Tokens per pass while a house reads."""

LONG = "Tell me about the dog and the cat, one after the other, and then about the rest of them. " * 2
"""Several chunks of prefill."""


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def sampling(**changes: Any) -> SamplingSettings:
    return SamplingSettings(**{"temperature": 0, "max_new_tokens": 8, **changes})


def held_reply(house: House, hold: Hold, text: str, chat_id: str | None = None, **changes: Any) -> Job:
    """A reply that waits in the held pass."""
    job = house.start(text, chat_id, sampling(**changes))
    hold.wait_until_reached()
    return job


def stop_in(house: House, hold: Hold, job: Job) -> ChatView:
    """Stop a reply while its pass is held, then let the pass go on."""
    house.chats.stop(job.owner, job.conversation_id)
    hold.release()
    return house.finish(job)


def num_chunks(house: House, text: str, chat_id: str | None = None) -> int:
    """How many passes read this message before the first one that writes."""
    view = house.chats.view(OWNER, chat_id) if chat_id else None
    if view is None:
        tokens = len(house.renderer.render([question(text)]))
    else:
        tokens = len(house.prompt(view, extra=text)) - len(house.kept()[view.conversation.id].cache)
    return -(-(tokens - 1) // CHUNK)


def question(text: str) -> Message:
    """A message that is in no chat."""
    return Message("", "", None, "user", text, "done", 0.0)


def chat_of(house: House, num_turns: int, owner: str = OWNER) -> ChatView:
    view = house.say("Turn 0", owner=owner)
    for number in range(1, num_turns):
        view = house.say(f"Turn {number}", view.conversation.id, owner=owner)
    return view


def texts(view: ChatView) -> list[str]:
    return [message.text for message in view.messages]

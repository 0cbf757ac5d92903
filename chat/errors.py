"""What can go wrong between a message and its reply.

ChatError
├── ModelError
│   ├── DownloadFailed     the default model could not be fetched, or is not the file we pinned
│   ├── ModelNotFound      no such folder, file or hub id, or the hub cannot be reached
│   └── ModelUnusable      found, but it cannot be loaded or cannot chat
├── EmptyMessage           nothing to send
├── PromptFailed           the chat template raised
├── KindUnavailable        a kind of cache that this machine or its packages do not offer
├── ContextFull            the chat is longer than the model can read
├── MemoryLimit            the cache of this chat alone would not fit the budget
├── OutOfMemory            the device had no memory left
├── GenerationFailed       anything else that ended a reply
├── QueueFull              too many people are waiting
└── NothingToDo            a verb that has nothing to act on

CacheMismatch is not for people: it marks a cache whose layers disagree with its token ids. Whoever
meets it drops the cache and reads the text again.

Every message is one sentence that a person can read: what happened, what was kept, what to do.
"""

from __future__ import annotations


class ChatError(Exception):
    """Root of everything that `chat` raises on purpose."""


class ModelError(ChatError):
    """The model cannot be had or cannot be used."""


class DownloadFailed(ModelError):
    """The default model was not fetched whole; nothing half-done was kept."""


class ModelNotFound(ModelError):
    """There is no model under that name."""


class ModelUnusable(ModelError):
    """The files are there, but no chat is possible with them."""


class EmptyMessage(ChatError):
    """The text is empty or only white space."""


class PromptFailed(ChatError):
    """The model's chat template refused these messages."""


class KindUnavailable(ChatError):
    """The chosen kind of cache cannot be had here; nothing was changed."""


class ContextFull(ChatError):
    """The rendered chat leaves no room for a reply within the model's context."""


class MemoryLimit(ChatError):
    """This chat's cache alone would exceed the budget for live caches."""


class OutOfMemory(ChatError):
    """The device had no memory left; the chat's live cache was dropped to free some."""


class GenerationFailed(ChatError):
    """An unexpected error ended the reply; what was written so far is kept."""


class QueueFull(ChatError):
    """The queue of waiting replies is at its limit."""


class NothingToDo(ChatError):
    """The verb has nothing to act on in this chat."""


class CacheMismatch(Exception):
    """A cache's layers do not all hold exactly the tokens that its id list names (law 4)."""

"""The boundary where anything that breaks a reply becomes one sentence.

An exception keeps every frame between the fault and its handler alive, and with them the tensors of a
forward pass; after running out of memory that is what makes the next message fail too. So the frames are
cleared here, once the traceback is in the log.
"""

from __future__ import annotations

import gc
import logging
import textwrap
import traceback

import torch

from cache_store.errors import StoreError
from chat.errors import ChatError, GenerationFailed, OutOfMemory

log = logging.getLogger(__name__)

_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


def sentence_for(error: BaseException) -> str:
    """What to show a person. Errors of ours already say it; others are named, and logged in full."""
    if isinstance(error, (ChatError, StoreError)):
        return str(error)
    return str(translated(error))


def translated(error: BaseException) -> ChatError:
    """The ChatError that stands for a foreign exception."""
    if is_out_of_memory(error):
        return OutOfMemory(
            "There was not enough memory for this reply; the text so far is kept. Shorten the chat, lower"
            " --max-live-memory, or close other programs, then regenerate."
        )
    return GenerationFailed(
        f"The reply broke off ({named(error)}); the text so far is kept, regenerate to try again."
    )


def named(error: BaseException) -> str:
    """An exception's type, and what it says if it says anything, on one line."""
    words = textwrap.shorten(str(error), 200, placeholder="…")
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the machine had no memory left; torch reports the CPU's as RuntimeError."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _MEMORY_WORDS)


def log_and_release(error: BaseException, what: str = "a reply") -> None:
    """Log what failed with the traceback, then let go of everything its frames hold, on the device too."""
    # As text: a record with the exception itself would keep the frames for as long as a handler keeps it.
    log.error("%s failed\n%s", what, "".join(traceback.format_exception(error)))
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

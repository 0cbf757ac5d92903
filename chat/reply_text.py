"""Sampled ids → the text of a reply, while it streams and when it ends.

While streaming, nothing is shown that might have to be taken back: bytes of an unfinished character wait
for the rest, and text that could be the beginning of a stop string waits until it is not. At the end the
text is decoded from all ids at once; ids and text always agree, which `ending` sees to when a stop
string cuts through a token. A reply may begin with ids that were not sampled now: they are never cut, and
stop strings are looked for behind them only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, StopStringCriteria

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Ending:
    """What is kept of a reply. The first `num_sampled` of `token_ids` are as they were fed or sampled; any
    others re-encode the part of a token before a stop string."""

    text: str
    token_ids: tuple[int, ...]
    num_sampled: int


class ReplyText:
    """One reply's text, which may begin with `begun_ids`: no end-of-turn among them, and no half of a
    character at their end. `backend` must not be shared with other threads (the Rust tokenizer refuses to be
    read while another thread sets an option on it)."""

    def __init__(
        self,
        backend: Tokenizer,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: frozenset[int],
        stop_strings: tuple[str, ...],
        begun_ids: Sequence[int] = (),
    ) -> None:
        self.token_ids: list[int] = []
        self.hit_stop_string = False
        self._backend = backend
        self._eos_token_ids = eos_token_ids
        self._stop_strings = stop_strings
        self._criteria = StopStringCriteria(tokenizer, list(stop_strings)) if stop_strings else None
        self._window_start = 0
        self._window_shown = 0
        self._streamed = ""
        self._num_shown = 0
        self._num_certain = 0
        for token_id in begun_ids:  # one by one: the next piece's text depends on where the last one began
            self.token_ids.append(token_id)
            self._streamed += self._next_text()
        self._num_shown = self._num_begun = len(self._streamed)

    @property
    def ended(self) -> bool:
        """True after an end-of-turn or a stop string."""
        return self.hit_stop_string or bool(self.token_ids and self.token_ids[-1] in self._eos_token_ids)

    @property
    def is_whole(self) -> bool:
        """True when no part of what was sampled so far is being held back."""
        return self._num_certain > 0 and self._num_shown == len(self._streamed)

    @property
    def certain_ids(self) -> list[int]:
        """The sampled ids whose text has been returned by `push` in full."""
        return self.token_ids[: self._num_certain]

    def push(self, token_id: int) -> str:
        """Take the next sampled id; return the text that is now certain, possibly empty."""
        self.token_ids.append(token_id)
        if token_id not in self._eos_token_ids:
            self._streamed += self._next_text()
        self.hit_stop_string = self._criteria is not None and self._ends_with_stop_string()
        certain = len(self._streamed) - self._num_uncertain()
        shown = self._streamed[self._num_shown : max(certain, self._num_shown)]
        if self.hit_stop_string:
            return ""
        self._num_shown += len(shown)
        if shown and self._num_shown == len(self._streamed):
            self._num_certain = len(self.token_ids)
        return shown

    def ending(self, encode: Callable[[str], list[int]]) -> Ending:
        """The reply as it is to be stored. `encode` tokenizes ordinary text that follows other text."""
        if self.hit_stop_string:
            return self._cut_before_stop_string(encode)
        ids = self.token_ids
        if ids and ids[-1] in self._eos_token_ids:
            return Ending(self._decode(ids), tuple(ids), len(ids))
        return self._cut_after_whole_character()

    def _next_text(self) -> str:
        """What the newest ids add, once they end with a whole character. Only a window of ids is decoded:
        the piece shown last, whose text the next one may depend on, and what came after it. (The library's
        own stream decoder stops for good at bytes that never become a character.)"""
        window = self._decode(self.token_ids[self._window_start :])
        known = self._decode(self.token_ids[self._window_start : self._window_shown])
        if window.endswith(_REPLACEMENT) or len(window) <= len(known):
            return ""
        self._window_start, self._window_shown = self._window_shown, len(self.token_ids)
        return window[len(known) :]

    def _cut_after_whole_character(self) -> Ending:
        """An interrupted reply may end inside a character: those ids go, at most the bytes of one."""
        ids = list(self.token_ids)
        text = self._decode(ids)
        if len(text) > len(self._streamed) and text.endswith(_REPLACEMENT):
            for num_open in range(1, 4):  # a character has at most four bytes, the last one is missing
                shorter = self._decode(ids[:-num_open])
                if not shorter.endswith(_REPLACEMENT):
                    return Ending(shorter, tuple(ids[:-num_open]), len(ids) - num_open)
        return Ending(text, tuple(ids), len(ids))

    def _cut_before_stop_string(self, encode: Callable[[str], list[int]]) -> Ending:
        whole = self._decode(self.token_ids)
        places = (whole.find(stop, self._num_begun) for stop in self._stop_strings)
        text = whole[: min(at for at in places if at >= 0)]
        kept = len(self.token_ids)
        while kept and not text.startswith(self._decode(self.token_ids[:kept])):
            kept -= 1
        rest = text[len(self._decode(self.token_ids[:kept])) :]
        ids = [*self.token_ids[:kept], *(encode(rest) if rest else [])]
        if self._decode(ids) == text:
            return Ending(text, tuple(ids), kept)
        return Ending(text, (), 0)  # no ids say exactly this text: it will be tokenized with the template

    def _ends_with_stop_string(self) -> bool:
        assert self._criteria is not None
        recent = self.token_ids[-self._criteria.maximum_token_len :]
        found = bool(self._criteria(cast(torch.LongTensor, torch.tensor([recent])), None))
        return found and any(
            self._decode(self.token_ids).find(stop, self._num_begun) >= 0 for stop in self._stop_strings
        )

    def _num_uncertain(self) -> int:
        longest = max(map(len, self._stop_strings), default=0)
        for length in range(min(longest, len(self._streamed) - self._num_begun), 0, -1):
            tail = self._streamed[-length:]
            if any(stop.startswith(tail) for stop in self._stop_strings):
                return length
        return 0

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=True)

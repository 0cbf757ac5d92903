"""Plain text of a wanted length, the same in every run."""

from __future__ import annotations

import random

from transformers import PreTrainedTokenizerBase

_WORDS = [
    "the",
    "river",
    "garden",
    "morning",
    "letter",
    "window",
    "stone",
    "quiet",
    "under",
    "above",
    "slowly",
    "reads",
    "writes",
    "a",
    "small",
    "old",
    "clock",
    "keeps",
    "time",
    "while",
    "rain",
    "falls",
    "on",
    "green",
    "hills",
    "and",
    "someone",
    "walks",
    "home",
    "with",
    "bread",
    "light",
    "enough",
    "to",
    "see",
    "every",
    "step",
    "of",
    "the",
    "road",
    "before",
    "night",
    "comes",
    "and",
    "lamps",
    "are",
    "lit",
    "along",
    "the",
    "harbour",
]


def prose(tokenizer: PreTrainedTokenizerBase, num_tokens: int, *, salt: int) -> str:
    """About `num_tokens` tokens of words in random order; another `salt` gives another text."""
    rng = random.Random(salt)
    words = [rng.choice(_WORDS) for _ in range(max(1, num_tokens))]
    ids: list[int] = tokenizer.encode(" ".join(words), add_special_tokens=False)
    return str(tokenizer.decode(ids[: max(1, num_tokens)]))

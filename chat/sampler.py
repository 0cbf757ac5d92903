"""Logits → the next token id, by transformers' own processors in the order that `generate` uses.

A sampler belongs to one reply: its random generator starts from the reply's seed, so the same seed over
the same logits draws the same tokens, whatever else runs in the process.
"""

# pyright: reportUnknownMemberType=false
# (LogitsProcessorList is an untyped list)
from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from chat.settings import SamplingSettings


class Sampler:
    """`sample` maps logits `[1, vocab]` to one id. `context_ids` are what the repetition penalty sees."""

    def __init__(
        self, settings: SamplingSettings, seed: int, context_ids: Sequence[int], device: torch.device
    ) -> None:
        self._greedy = settings.temperature == 0
        self._processors = _processors(settings)
        self._needs_ids = settings.repetition_penalty != 1.0
        self._ids = torch.tensor(
            [list(context_ids) if self._needs_ids else []], dtype=torch.long, device=device
        )
        self._generator = torch.Generator(device).manual_seed(seed)

    @torch.inference_mode()
    def sample(self, logits: Tensor) -> int:
        """Draw one token. Raises ValueError when the model produced no finite number."""
        scores = self._processors(cast(torch.LongTensor, self._ids), cast(torch.FloatTensor, logits.float()))
        if not bool(torch.isfinite(scores.max())):
            raise ValueError("the model's output is not a number")
        if self._greedy:
            token = scores.argmax(dim=-1, keepdim=True)
        else:
            token = torch.multinomial(scores.softmax(dim=-1), 1, generator=self._generator)
        if self._needs_ids:
            self._ids = torch.cat([self._ids, token], dim=-1)
        return int(token)


def _processors(settings: SamplingSettings) -> LogitsProcessorList:
    processors = LogitsProcessorList()
    if settings.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    if settings.temperature == 0:
        return processors
    if settings.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        processors.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1.0:
        processors.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p > 0.0:
        processors.append(MinPLogitsWarper(settings.min_p))
    return processors

"""How long a chat can become in this machine's memory, for each kind of cache, before anything is allocated.

A chat of n tokens fits when its cache fits the budget for live caches, and when cache and working memory
together fit what is free; an offloaded cache asks for the computer's memory, its working memory for the
device's. Caches grow in whole steps, so the number of tokens that fit is a number of steps. Working memory is
what attention looks at where that is not the cache itself: one layer's rows unpacked (see
`chat.layers.workspace`), or two layers' fetched from the computer's memory (see `chat.layers.prefetch`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import psutil
import torch
from transformers import PreTrainedConfig

from chat.layers.kinds import QUANTIZATIONS, is_exact, is_fixed, is_offloaded
from chat.layers.sizes import PACKED_LAYER_KINDS, CacheCost, cache_cost, growth_step
from chat.layers.workspace import SPARE
from chat.model_facts import kv_layers, shares_rows
from chat.settings import CacheKind, CacheSettings

QUALITY_ORDER: tuple[CacheKind, ...] = (
    "dynamic",
    "static",
    "native8",
    "hqq8",
    "fp8",
    "native4",
    "offloaded",
    "offloaded_static",
    "hqq4",
    "quanto4",
    "hqq2",
    "quanto2",
)
"""Best answers first, as measured on the default model (`python -m tests.bench kinds`). Answers of offloaded
kinds are as good as any, but each token waits for the whole cache to come to the device: so they stand where
the ladder has them."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes: `free` on the model's device if all live caches were given up, `max_live`, their budget, and
    what would then be free in the computer's memory, where that is not the model's device."""

    free: int
    max_live: int
    free_host: int | None = None


@dataclass(frozen=True, slots=True)
class KindForecast:
    """`num_tokens` fit, at most as many as the model reads; `fits_context`: so many do."""

    kind: CacheKind
    bytes_per_token: int
    num_tokens: int
    fits_context: bool
    is_recommended: bool = False


def forecast(
    config: PreTrainedConfig,
    settings: CacheSettings,
    dtype: torch.dtype,
    room: Room,
    num_context_tokens: int,
) -> KindForecast:
    """For the kind of `settings`; `config` is a text config, `dtype` what the model computes in."""
    cost = cache_cost(config, settings, dtype)
    working = _working_bytes_per_token(config, settings, dtype)
    step = growth_step(config, settings)
    places = [(room.max_live, cost), (room.free, cost + CacheCost(working))]
    if is_offloaded(settings.kind) and room.free_host is not None:
        places[1:] = [(room.free, CacheCost(working)), (room.free_host, cost)]
    fitting = min(_whole_steps(free - need.fixed, need.per_token, step) for free, need in places)
    if is_fixed(settings.kind):
        fitting = min(fitting, step)
    num_tokens = min(fitting, num_context_tokens)
    return KindForecast(settings.kind, cost.per_token, num_tokens, num_tokens == num_context_tokens)


def with_recommended(
    forecasts: Collection[KindForecast], flagged: Collection[CacheKind] = ()
) -> tuple[KindForecast, ...]:
    """The same, one of them recommended: of those that hold the longest chat the model can read, the one with
    the best answers; where none does, the one that holds most. `flagged` ones, whose answers were measured to
    be bad on this model, only when there is nothing else."""
    ranked = sorted(forecasts, key=lambda each: QUALITY_ORDER.index(each.kind))
    sound = [each for each in ranked if each.kind not in flagged] or ranked
    best = max(sound, key=lambda each: each.num_tokens, default=None)  # of equals the first: the best answers
    return tuple(replace(each, is_recommended=each is best) for each in forecasts)


def free_bytes(device: torch.device) -> int:
    """What a program can still have of the device's memory, caches of freed tensors included."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _whole_steps(num_bytes: int, per_token: int, step: int) -> int:
    """Tokens that fit into so many bytes, in whole steps; without limit when tokens cost nothing."""
    if per_token == 0:
        return 2**62
    return max(0, num_bytes // (per_token * step)) * step


def _working_bytes_per_token(config: PreTrainedConfig, settings: CacheSettings, dtype: torch.dtype) -> int:
    """Of rows that are unpacked or fetched. Models in which layers share rows do that with every layer's into
    memory of its own."""
    offloaded = is_offloaded(settings.kind)
    if is_exact(settings.kind) and not offloaded:
        return 0
    packed = [layer.num_elements for layer in kv_layers(config) if layer.kind in PACKED_LAYER_KINDS]
    elements = sum(packed) if shares_rows(config) else max(packed, default=0) * (2 if offloaded else 1)
    quantization = QUANTIZATIONS.get(settings.kind)
    if quantization is not None and quantization.rotated:
        elements += max(packed, default=0) // 2  # one side once more, still rotated
    return elements * dtype.itemsize * (SPARE + 1) // SPARE

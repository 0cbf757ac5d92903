"""What a cache of some kind takes, before there is one: pure functions of a model's config.

Checked by `tests/chat/test_kinds.py` against the buffers of real caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from chat.layers.kinds import is_fixed, num_tail_tokens, sized_codec
from chat.layers.packed import RowCodec
from chat.model_facts import KvLayer, kv_layers, num_context_tokens
from chat.settings import CacheSettings

PACKED_LAYER_KINDS = ("full_attention", "hybrid")
"""What a config calls the layers that hold one row for every token, and that can be packed therefore."""


@dataclass(frozen=True, slots=True)
class CacheCost:
    """Bytes, wherever rows are kept: for each token that there is room for, and once for the whole cache."""

    per_token: int
    fixed: int = 0

    def __add__(self, other: CacheCost) -> CacheCost:
        return CacheCost(self.per_token + other.per_token, self.fixed + other.fixed)


def bytes_per_token(config: PreTrainedConfig, settings: CacheSettings, dtype: torch.dtype) -> int:
    """Bytes for one more token over all layers, of a text config; see `cache_cost`."""
    return cache_cost(config, settings, dtype).per_token


def cache_cost(config: PreTrainedConfig, settings: CacheSettings, dtype: torch.dtype) -> CacheCost:
    """What a cache of `settings.kind` takes for a model that computes in `dtype`. Sliding layers count as if
    they grew for ever; layers with a state of fixed size count nothing."""
    codec, cost = sized_codec(settings), CacheCost(0)
    for layer in kv_layers(config):
        cost += _layer_cost(layer, codec, num_tail_tokens(settings), dtype)
    return cost


def growth_step(config: PreTrainedConfig, settings: CacheSettings) -> int:
    """By how many tokens buffers grow: kinds of fixed size once by all that they ever have room for."""
    if is_fixed(settings.kind):
        return min(settings.static_tokens, num_context_tokens(config))
    return settings.growth_step


def _layer_cost(layer: KvLayer, codec: RowCodec | None, num_tail: int, dtype: torch.dtype) -> CacheCost:
    dense = layer.num_elements * dtype.itemsize
    if codec is None or layer.kind not in PACKED_LAYER_KINDS:
        return CacheCost(dense)
    parts = [part for width in layer.widths for part in codec.parts(width).values()]
    packed = layer.num_heads * sum(part_dtype.itemsize * width for part_dtype, width in parts)
    return CacheCost(packed, num_tail * dense)

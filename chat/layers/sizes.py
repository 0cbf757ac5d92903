"""What a cache of some kind takes, before there is one: pure functions of a model's config.

Checked by `tests/chat/test_kinds.py` against the buffers of real caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from chat.layers.kinds import num_tail_tokens, sized_codec
from chat.model_facts import kv_layer_kinds, kv_row_shape
from chat.settings import CacheSettings

PACKED_LAYER_KINDS = ("full_attention", "hybrid")
"""What a config calls the layers that hold one row for every token, and that can be packed therefore."""


@dataclass(frozen=True, slots=True)
class CacheCost:
    """Bytes on the device: for each token that there is room for, and once for the whole cache."""

    per_token: int
    fixed: int = 0


def bytes_per_token(config: PreTrainedConfig, settings: CacheSettings, dtype: torch.dtype) -> int:
    """Bytes for one more token over all layers, of a text config; see `cache_cost`."""
    return cache_cost(config, settings, dtype).per_token


def cache_cost(config: PreTrainedConfig, settings: CacheSettings, dtype: torch.dtype) -> CacheCost:
    """What a cache of `settings.kind` takes for a model that computes in `dtype`. Sliding layers count as if
    they grew for ever; layers with a state of fixed size count nothing."""
    kinds = kv_layer_kinds(config)
    num_packed = sum(kind in PACKED_LAYER_KINDS for kind in kinds)
    heads, widths = kv_row_shape(config)
    dense = heads * sum(widths) * dtype.itemsize
    codec = sized_codec(settings)
    if codec is None:
        return CacheCost(len(kinds) * dense)
    parts = [part for width in widths for part in codec.parts(width).values()]
    packed = heads * sum(part_dtype.itemsize * width for part_dtype, width in parts)
    return CacheCost(
        num_packed * packed + (len(kinds) - num_packed) * dense,
        num_packed * num_tail_tokens(settings) * dense,
    )

"""The one place that chooses a layer."""

from __future__ import annotations

from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from chat.layers.growing import GrowingHybridLayer, GrowingLayer
from chat.settings import CacheSettings

AnyLayer = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer


def layer_for(stock: AnyLayer, settings: CacheSettings) -> AnyLayer:
    """The layer of ours that stands for a stock layer with one row per token; others stay as they are."""
    if type(stock) is DynamicLayer:
        return GrowingLayer(settings.growth_step)
    if type(stock) is LinearAttentionAndFullAttentionLayer:
        return GrowingHybridLayer(settings.growth_step, stock.number_of_states)
    return stock

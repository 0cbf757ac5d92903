"""The one place that chooses a layer."""

from __future__ import annotations

from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from chat.layers.chunked import ChunkedHybridLayer, ChunkedLayer
from chat.layers.growing import GrowingHybridLayer, GrowingLayer
from chat.layers.kinds import num_tail_tokens
from chat.layers.packed import PackedHybridLayer, PackedLayer, RowCodec
from chat.layers.workspace import Workspace
from chat.settings import CacheSettings

AnyLayer = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer


def layer_for(
    stock: AnyLayer, settings: CacheSettings, codec: RowCodec | None, workspace: Workspace
) -> AnyLayer:
    """The layer of ours that stands for a stock layer with one row per token, of the kind that `codec` (see
    `codec_for`) packs; sliding windows, convolutions and recurrences stay as they are."""
    if type(stock) is DynamicLayer:
        return _plain(settings, codec, workspace)
    if type(stock) is LinearAttentionAndFullAttentionLayer:
        return _hybrid(settings, codec, workspace, stock.number_of_states)
    return stock


def _plain(settings: CacheSettings, codec: RowCodec | None, workspace: Workspace) -> AnyLayer:
    step, chunk = settings.growth_step, num_tail_tokens(settings)
    if codec is None:
        return GrowingLayer(step)
    return ChunkedLayer(step, codec, workspace, chunk) if chunk else PackedLayer(step, codec, workspace)


def _hybrid(
    settings: CacheSettings, codec: RowCodec | None, workspace: Workspace, number_of_states: int
) -> AnyLayer:
    step, chunk = settings.growth_step, num_tail_tokens(settings)
    if codec is None:
        return GrowingHybridLayer(step, number_of_states)
    if chunk:
        return ChunkedHybridLayer(step, codec, workspace, chunk, number_of_states)
    return PackedHybridLayer(step, codec, workspace, number_of_states)

"""The one place that chooses a layer."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from chat.layers.chunked import ChunkedHybridLayer, ChunkedLayer
from chat.layers.growing import GrowingHybridLayer, GrowingLayer
from chat.layers.kinds import is_fixed, is_offloaded, num_tail_tokens
from chat.layers.offloaded import OffloadedHybridLayer, OffloadedLayer
from chat.layers.packed import PackedHybridLayer, PackedLayer, RowCodec
from chat.layers.prefetch import Prefetcher
from chat.layers.static import (
    OffloadedStaticHybridLayer,
    OffloadedStaticLayer,
    StaticHybridLayer,
    StaticLayer,
)
from chat.layers.workspace import Workspace
from chat.settings import CacheSettings

AnyLayer = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What layers are made with: the kind's settings and what packs its rows (see `codec_for`), by how many
    tokens buffers grow (see `growth_step`), and what all caches of a model share."""

    settings: CacheSettings
    codec: RowCodec | None
    growth_step: int
    workspace: Workspace
    prefetcher: Prefetcher


def layer_for(stock: AnyLayer, parts: LayerParts) -> AnyLayer:
    """The layer of ours that stands for a stock layer with one row per token; sliding windows, convolutions
    and recurrences stay as they are."""
    if type(stock) is DynamicLayer:
        return _plain(parts) if parts.codec is None else _packed(parts, parts.codec)
    if type(stock) is LinearAttentionAndFullAttentionLayer:
        number = stock.number_of_states
        return _hybrid(parts, number) if parts.codec is None else _packed_hybrid(parts, parts.codec, number)
    return stock


def _plain(parts: LayerParts) -> AnyLayer:
    kind, step = parts.settings.kind, parts.growth_step
    if is_offloaded(kind):
        made = OffloadedStaticLayer if is_fixed(kind) else OffloadedLayer
        return made(step, parts.prefetcher)
    return StaticLayer(step) if is_fixed(kind) else GrowingLayer(step)


def _hybrid(parts: LayerParts, number_of_states: int) -> AnyLayer:
    kind, step = parts.settings.kind, parts.growth_step
    if is_offloaded(kind):
        made = OffloadedStaticHybridLayer if is_fixed(kind) else OffloadedHybridLayer
        return made(step, parts.prefetcher, number_of_states)
    made = StaticHybridLayer if is_fixed(kind) else GrowingHybridLayer
    return made(step, number_of_states)


def _packed(parts: LayerParts, codec: RowCodec) -> AnyLayer:
    step, chunk = parts.growth_step, num_tail_tokens(parts.settings)
    if chunk:
        return ChunkedLayer(step, codec, parts.workspace, chunk)
    return PackedLayer(step, codec, parts.workspace)


def _packed_hybrid(parts: LayerParts, codec: RowCodec, number_of_states: int) -> AnyLayer:
    step, chunk = parts.growth_step, num_tail_tokens(parts.settings)
    if chunk:
        return ChunkedHybridLayer(step, codec, parts.workspace, chunk, number_of_states)
    return PackedHybridLayer(step, codec, parts.workspace, number_of_states)

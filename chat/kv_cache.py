"""One conversation's KV cache: a transformers `Cache` together with the token ids it holds.

Law: `token_ids` names exactly the tokens whose keys and values every layer holds, in order. `feed` and
`crop_to` are the only ways to change either, and both change both. `check` proves it; a forward pass
that raised half-way leaves the layers disagreeing, which `recover` mends or reports.

Sign trap of the library (5.24): `Cache.crop` takes a negative number of tokens to remove, and 0 removes
nothing. Only absolute lengths leave this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from cache_store.file_header import TensorInfo
from chat.errors import CacheMismatch
from chat.layer_state import has_state, put_back, state_of
from chat.layers.contract import RowLayer, layer_nbytes
from chat.layers.factory import LayerParts, layer_for
from chat.layers.growing import GrowingLayer
from chat.layers.kinds import codec_for, have_same_rows
from chat.layers.offloaded import in_turn
from chat.layers.prefetch import Prefetcher
from chat.layers.sizes import CacheCost, cache_cost, growth_step
from chat.layers.workspace import Workspace
from chat.model_facts import shares_rows, text_config
from chat.placement import placement_of
from chat.row_reader import RowReader, RowSource, States
from chat.settings import CacheSettings


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all caches of a model unpack into or fetch rows with: one thread feeds them, one by one."""

    workspace: Workspace
    prefetcher: Prefetcher


_shared: WeakKeyDictionary[PreTrainedModel, _Shared] = WeakKeyDictionary()


class KVCache:
    """See the module. Not safe for use from several threads: only the inference thread touches it."""

    def __init__(self, model: PreTrainedModel, settings: CacheSettings) -> None:
        """Empty. Raises KindUnavailable when this machine has not got what `settings.kind` needs."""
        self._model = model
        self._placement = placement_of(model)
        self._settings = settings
        self._token_ids: list[int] = []
        self._idle: frozenset[int] = frozenset()
        shared = _shared_by_caches_of(model)
        step = growth_step(text_config(model), settings)
        parts = LayerParts(settings, codec_for(settings), step, shared.workspace, shared.prefetcher)
        self._cache = DynamicCache(config=model.config)
        self._cache.layers[:] = [layer_for(layer, parts) for layer in self._cache.layers]
        self._rows = [layer for layer in self._cache.layers if isinstance(layer, RowLayer)]
        self._reader = RowReader(self._cache.layers, self._placement)
        in_turn(self._rows)

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """A copy of the ids held, oldest first."""
        return tuple(self._token_ids)

    @property
    def settings(self) -> CacheSettings:
        """What the layers were made for."""
        return self._settings

    @property
    def nbytes(self) -> int:
        """Bytes allocated, spare room included, on the device or in the computer's memory."""
        return sum(layer_nbytes(layer) for layer in self._cache.layers)

    @property
    def capacity(self) -> int:
        """Tokens that fit before a layer allocates again; what is held, where no layer grows in steps."""
        return min((layer.capacity for layer in self._rows), default=len(self))

    def nbytes_for(self, num_tokens: int) -> int:
        """Bytes allocated once `num_tokens` are held."""
        cost = self._cost
        if not self._rows:
            return max(self.nbytes, num_tokens * cost.per_token)
        layer = self._rows[0]
        capacity = layer.capacity_for(num_tokens)
        # While one buffer grows its old copy still stands; never more than one at once.
        largest = max((buffer.nbytes for buffer in layer.buffers), default=0)
        moving = largest if capacity > layer.capacity else 0
        return max(self.nbytes, capacity * cost.per_token + cost.fixed + moving)

    @cached_property
    def _cost(self) -> CacheCost:
        return cache_cost(text_config(self._model), self._settings, self._model.dtype)

    def reserve(self, num_tokens: int) -> None:
        """Allocate once for `num_tokens` in all, instead of step by step while they are fed."""
        for layer in self._rows:
            layer.reserve(num_tokens)

    def num_common(self, token_ids: Sequence[int]) -> int:
        """Length of the longest common beginning of the held ids and `token_ids`."""
        limit = min(len(self._token_ids), len(token_ids))
        for index in range(limit):
            if self._token_ids[index] != token_ids[index]:
                return index
        return limit

    @torch.inference_mode()
    def feed(self, token_ids: Sequence[int]) -> Tensor:
        """Run the model over new tokens; return the logits `[1, vocab]` after the last of them.

        The library derives positions and the causal mask from the length of the cache, so neither is
        passed: a mask of any other length than held + new would be silently wrong. Raises CacheMismatch
        when a layer did not take all tokens, and whatever the model raises; then call `recover`.
        """
        return self._pass(token_ids, 1)[:, -1]

    @torch.inference_mode()
    def feed_for_all(self, token_ids: Sequence[int]) -> Tensor:
        """As `feed`, with the logits `[n, vocab]` after each of the new tokens."""
        return self._pass(token_ids, len(token_ids))[0]

    def _pass(self, token_ids: Sequence[int], num_logits: int) -> Tensor:
        if not token_ids:
            raise ValueError("there is nothing to feed")
        self.check()
        input_ids = torch.tensor([list(token_ids)], dtype=torch.long, device=self._placement.inputs)
        outputs = self._model(
            input_ids=input_ids, cache=self._cache, use_cache=True, logits_to_keep=num_logits
        )
        if not self._token_ids:
            self._note_idle_layers()
        self._token_ids.extend(token_ids)
        self.check()
        return outputs.logits

    def can_crop_to(self, num_tokens: int) -> bool:
        """Whether `crop_to` would be exact for every layer."""
        if num_tokens == len(self):
            return True
        return all(_layer_can_crop(layer) for layer in self._cache.layers)

    def crop_to(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens.

        Raises ValueError when fewer are held, and CacheMismatch when a layer cannot forget exactly (a
        sliding window that already dropped tokens, a recurrent state); then nothing was changed.
        """
        if not 0 <= num_tokens <= len(self):
            raise ValueError(f"cannot crop {len(self)} tokens to {num_tokens}")
        if not self.can_crop_to(num_tokens):
            raise CacheMismatch(
                f"a layer of this model cannot go back from {len(self)} to {num_tokens} tokens"
            )
        if num_tokens == len(self):
            return
        for layer in self._cache.layers:
            _crop_layer(layer, num_tokens)
        del self._token_ids[num_tokens:]
        self.check()

    @torch.inference_mode()
    def copy_prefix(
        self, num_tokens: int, room_for: int = 0, settings: CacheSettings | None = None
    ) -> KVCache:
        """A new cache holding the first `num_tokens` tokens, with room for `room_for`: the bytes are copied,
        nothing is recomputed. `settings`: of another kind that has the same rows.

        Raises CacheMismatch when a layer does not hold rows (see `crop_to`).
        """
        if not 0 <= num_tokens <= len(self):
            raise ValueError(f"cannot copy {num_tokens} of {len(self)} tokens")
        if not self.has_rows():
            raise CacheMismatch("a layer of this model does not hold one row per token")
        copy = KVCache(self._model, settings or self._settings)
        copy.reserve(room_for)
        for source, target in zip(self._rows, copy._rows, strict=True):
            _copy_rows(source, target, min(num_tokens, source.num_tokens))
        copy._token_ids = self._token_ids[:num_tokens]
        copy._idle = self._idle
        copy.check()
        return copy

    def can_convert_to(self, settings: CacheSettings) -> bool:
        """Whether `converted_to` can give rows of that kind: of its own kind, or of any from dense ones."""
        is_dense = all(isinstance(layer, GrowingLayer) for layer in self._rows)
        return self.can_be_saved() and (is_dense or have_same_rows(settings, self._settings))

    @torch.inference_mode()
    def converted_to(self, settings: CacheSettings, room_for: int = 0) -> KVCache:
        """A new cache of another kind with the same tokens and room for `room_for`: dense rows are packed,
        everything else is copied, nothing is recomputed. Both caches stand until this one is let go.

        The rows are those of a chat that was dense up to here, not byte for byte those of one that never was.
        Raises CacheMismatch when `can_convert_to` says no.
        """
        other = KVCache(self._model, settings)
        for _ in self._convert_layers(other, room_for):
            pass
        return other

    @torch.inference_mode()
    def turned_into(self, other: KVCache, room_for: int = 0) -> KVCache:
        """As `converted_to`, into a cache that is empty or holds the rows of the first of these tokens, and
        no states yet. This cache is used up: each layer lets go of its rows as soon as they are
        converted, so that the two never stand whole beside each other (see `nbytes_to_turn`)."""
        for layer in self._convert_layers(other, room_for):
            if isinstance(layer, RowLayer):
                layer.reset()
        self._token_ids.clear()
        return other

    def nbytes_to_turn(self, other: KVCache, room_for: int = 0) -> int:
        """The most bytes that both caches take together at any moment of `turned_into`; only caches with
        layers of very different sizes may take somewhat more."""
        then = other.nbytes_for(max(room_for, len(self)))
        if len(other):
            return self.nbytes + then
        num_layers = max(1, len(self._rows))
        return max(self.nbytes + then // num_layers, then + self.nbytes // num_layers)

    def _convert_layers(self, other: KVCache, room_for: int) -> Iterator[object]:
        """Fill `other` layer by layer, yielding each layer of ours that is done."""
        if not self.can_convert_to(other.settings) or self._token_ids[: len(other)] != other._token_ids:
            raise CacheMismatch(f"rows of the kind {self._settings.kind} cannot become {other.settings.kind}")
        other.reserve(max(room_for, len(self)))
        for source, target in zip(self._cache.layers, other._cache.layers, strict=True):
            if isinstance(source, RowLayer) and isinstance(target, RowLayer):
                _copy_rows(source, target, source.num_tokens)
            if has_state(source) and self._token_ids:
                put_back(target, state_of(source), len(self))
            yield source
        other._token_ids = self._token_ids.copy()
        other._idle = self._idle
        other.check()

    def can_be_saved(self) -> bool:
        """Whether `rows_out` tells everything: a kind of layer that we do not know is never half saved."""
        return all(
            isinstance(layer, RowLayer) or type(layer) in _KNOWN_LAYERS for layer in self._cache.layers
        )

    @torch.inference_mode()
    def rows_out(self, start: int) -> dict[str, Tensor]:
        """Copies, in the computer's memory, of what the tokens `[start, len)` added: `layers.{i}.…` for each
        part of the rows, `[kv_heads, n, width]`, and as `state.{i}.…` the present state of layers without."""
        tensors: dict[str, Tensor] = {}
        for index, layer in enumerate(self._cache.layers):
            if isinstance(layer, RowLayer):
                for name, rows in layer.rows_out(start).items():
                    tensors[f"layers.{index}.{name}"] = rows.to("cpu", copy=True).contiguous()
            for name, tensor in state_of(layer).items():
                tensors[f"state.{index}.{name}"] = tensor.cpu()
        return tensors

    def take_rows(self, source: RowSource, token_ids: Sequence[int], *, with_state: bool) -> None:
        """Append the first rows of a segment, computed for `token_ids`, straight into the layers' buffers.

        `with_state`: also put back the state at its end, for which `token_ids` must be all its tokens and
        this cache's layers with states fresh. Nothing counts until the source was verified: on
        SegmentDamaged or CacheMismatch the rows held before are what this cache holds.
        """
        end = len(self) + len(token_ids)
        self.expect_rows(source.tensors, end)
        states = self.read_rows(source, len(self), end, with_state=with_state)
        self.adopt_rows(token_ids, states if with_state else None)

    @torch.inference_mode()
    def expect_rows(self, tensors: Sequence[TensorInfo], num_tokens: int) -> None:
        """The first step of `take_rows`, for any number of sources: room for `num_tokens` in all, in layers
        that have rows like these. Raises SegmentDamaged when they are of another kind."""
        self._reader.make_room(tensors, num_tokens)

    def read_rows(self, source: RowSource, start: int, end: int, *, with_state: bool) -> States:
        """The second step: read and verify one source, for the tokens `[start, end)`. The one method that
        several threads may call at once, each for other tokens. Raises SegmentDamaged."""
        return self._reader.read(source, start, end, with_state=with_state)

    @torch.inference_mode()
    def adopt_rows(self, token_ids: Sequence[int], states: States | None) -> None:
        """The last step: from now on the rows that were read behind what is held count, as those of these
        tokens. `states` are those at their end (None: they are still to come). Raises CacheMismatch."""
        num_tokens = len(self) + len(token_ids)
        self._reader.adopt(num_tokens, states)
        self._token_ids.extend(token_ids)
        if states is not None or self.has_rows():  # else layers with states are still to come
            self._note_idle_layers()
            self.check()

    def has_rows(self) -> bool:
        """Whether every layer keeps one row per token, or nothing, so that a prefix can be copied out."""
        layers = self._cache.layers
        return all(isinstance(layer, (RowLayer, DummyLayer)) and not has_state(layer) for layer in layers)

    def recover(self) -> bool:
        """After a failed `feed`: cut every layer back to the tokens that all of them hold.

        Returns False when that is not exact for this model; the cache must then be thrown away.
        """
        for layer in self._rows:
            if layer.num_tokens > len(self):
                layer.crop_to(len(self))
        try:
            self.check()
        except CacheMismatch:
            return False
        return self.has_rows()

    def check(self) -> None:
        """Prove the law of the module. Raises CacheMismatch."""
        for index, layer in enumerate(self._cache.layers):
            length = len(self) if index in self._idle else _layer_length(layer)
            if length is not None and length != len(self):
                raise CacheMismatch(f"layer {index} holds {length} tokens, but the id list has {len(self)}")

    def _note_idle_layers(self) -> None:
        """Layers that the first pass left untouched are fed by another layer's rows and stay empty."""
        layers = enumerate(self._cache.layers)
        self._idle = frozenset(
            index for index, layer in layers if isinstance(layer, DynamicLayer) and not layer.is_initialized
        )


_KNOWN_LAYERS = (
    DummyLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""Stock layers that hold nothing, or a state that `layer_state` knows whole."""


def _layer_length(layer: object) -> int | None:
    """Tokens seen; None where a layer counts nothing because it keeps a recurrent state only."""
    if not isinstance(layer, DynamicLayer):
        return None
    return layer.get_seq_length() if layer.is_initialized else 0


def _layer_can_crop(layer: object) -> bool:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return False
    if isinstance(layer, DynamicSlidingWindowLayer):
        return layer.cumulative_length < layer.sliding_window
    return isinstance(layer, (DynamicLayer, DummyLayer))


def _crop_layer(layer: object, num_tokens: int) -> None:
    if isinstance(layer, RowLayer):
        layer.crop_to(min(num_tokens, layer.num_tokens))
    elif isinstance(layer, DynamicLayer) and layer.is_initialized:
        layer.crop(num_tokens - layer.get_seq_length())


def _copy_rows(source: RowLayer, target: RowLayer, num_tokens: int) -> None:
    """Add of the first rows of `source` those that `target` lacks: in their form, or packed where attention
    runs."""
    start = target.num_tokens
    if type(source) is type(target) and not start:
        target.copy_from(source, num_tokens)
    elif start < num_tokens:
        rows, device = source.room(start, num_tokens), source.device
        if source.part_names == target.part_names:
            target.take_copies(rows, device)
        else:
            target.append(rows["keys"][None].to(device), rows["values"][None].to(device))


def _shared_by_caches_of(model: PreTrainedModel) -> _Shared:
    shared = _shared.get(model)
    if shared is None:
        workspace = Workspace(shared=not shares_rows(text_config(model)))
        shared = _shared[model] = _Shared(workspace, Prefetcher(workspace))
    return shared

"""The fixed-size state of layers that keep no row per token: sliding windows, convolutions, recurrences.

Such a layer cannot be cropped; it can only be put back to a moment at which its state was kept. `state_of`
copies the state out as plain tensors, `put_back` makes a fresh layer continue from it. A state is only
valid together with the number of tokens it was taken at, which the caller keeps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from chat.errors import CacheMismatch


def has_state(layer: object) -> bool:
    """Whether the layer needs a state, beside or instead of rows, to be put back."""
    return isinstance(layer, (DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin))


def state_of(layer: object) -> dict[str, Tensor]:
    """Copies of everything the layer would need to go on from here; empty for a layer of rows only."""
    state: dict[str, Tensor] = {}
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized:
        assert layer.keys is not None
        assert layer.values is not None
        state["window_keys"] = layer.keys.clone()
        state["window_values"] = layer.values.clone()
        state["num_seen"] = torch.tensor([layer.cumulative_length])
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
            for index, tensor in states.items():
                if tensor is not None:
                    state[f"{kind}.{index}"] = tensor.clone()
    return state


def put_back(layer: object, state: Mapping[str, Tensor], num_tokens: int) -> None:
    """Make a fresh layer continue after `num_tokens` tokens. Raises CacheMismatch when the state is not
    one of that moment or lacks a part."""
    try:
        if isinstance(layer, DynamicSlidingWindowLayer):
            _put_back_window(layer, state, num_tokens)
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            _put_back_states(layer, state)
    except KeyError as missing:
        raise CacheMismatch(f"the kept state lacks {missing}") from missing


def _put_back_window(layer: DynamicSlidingWindowLayer, state: Mapping[str, Tensor], num_tokens: int) -> None:
    keys, values = state["window_keys"], state["window_values"]
    kept = min(num_tokens, layer.sliding_window - 1)
    if int(state["num_seen"]) != num_tokens or keys.shape[-2] != kept or values.shape[-2] != kept:
        raise CacheMismatch(f"the kept window is not the one after {num_tokens} tokens")
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys.clone(), values.clone()
    layer.cumulative_length = num_tokens


def _put_back_states(layer: LinearAttentionCacheLayerMixin, state: Mapping[str, Tensor]) -> None:
    """Through the layer's own updates, so that its flags and static addresses are as after a real prefill."""
    found = 0
    for index in range(layer.number_of_states):
        if (conv := state.get(f"conv.{index}")) is not None:
            layer.update_conv_state(conv.clone(), index)
            found += 1
        if (recurrent := state.get(f"recurrent.{index}")) is not None:
            layer.update_recurrent_state(recurrent.clone(), index)
            found += 1
            layer.has_previous_state[index] = True
    if not found:
        raise KeyError("conv or recurrent states")

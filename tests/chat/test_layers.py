"""The growing layer holds what the stock layer holds, at a cost per token that does not grow."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import DynamicLayer

import chat.layers.growing
from chat.layers.contract import layer_nbytes
from chat.layers.growing import GrowingLayer
from tests.chat.passes import out_of_memory_in

HEADS, HEAD_DIM, STEP = 2, 4, 16
ROW_BYTES = 2 * HEADS * HEAD_DIM * 4  # keys and values, float32


def states(num_tokens: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values `[1, HEADS, num_tokens, HEAD_DIM]` in which every number differs."""
    size = HEADS * num_tokens * HEAD_DIM
    keys = torch.arange(first, first + size, dtype=torch.float32).reshape(1, HEADS, num_tokens, HEAD_DIM)
    return keys, keys + 0.5


def grown(num_tokens: int) -> GrowingLayer:
    layer = GrowingLayer(STEP)
    layer.update(*states(num_tokens))
    return layer


def keys_of(layer: GrowingLayer) -> Tensor:
    assert layer.keys is not None
    return layer.keys


def values_of(layer: GrowingLayer) -> Tensor:
    assert layer.values is not None
    return layer.values


def storage_bytes(layer: GrowingLayer) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in (keys_of(layer), values_of(layer)))


ACTIONS = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 40)),
    st.tuples(st.just("crop"), st.integers(0, 40)),
)


@given(st.lists(ACTIONS, max_size=12))
@settings(max_examples=60, deadline=None)
def test_it_holds_byte_for_byte_what_the_stock_layer_holds(actions: list[tuple[str, int]]) -> None:
    """Law 3. Crops never ask for more than there is: there the stock layer is known to go wrong."""
    ours, stock = GrowingLayer(STEP), DynamicLayer()
    for number, (verb, count) in enumerate(actions):
        if verb == "append":
            mine = ours.update(*states(count, 1000 * number))
            theirs = stock.update(*states(count, 1000 * number))
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        else:
            removed = min(count, stock.get_seq_length())
            if removed == stock.get_seq_length() and removed:
                stock = DynamicLayer()
                ours.crop(-removed)
                continue
            ours.crop(-removed)
            stock.crop(-removed)
        assert ours.num_tokens == ours.get_seq_length() == stock.get_seq_length()
        assert ours.get_mask_sizes(3) == stock.get_mask_sizes(3)


def test_cropping_to_nothing_keeps_nothing() -> None:
    """C01: neither a crop by everything nor a crop by more than everything leaves a token behind."""
    for removed in (-50, -51, -1000):
        layer = grown(50)
        layer.crop(removed)
        assert layer.get_seq_length() == layer.num_tokens == 0
        keys, values = layer.update(*states(3, 900))
        assert torch.equal(keys, states(3, 900)[0])
        assert torch.equal(values, states(3, 900)[1])


def test_a_crop_by_nothing_removes_nothing() -> None:
    """C01."""
    layer = grown(50)
    layer.crop(0)
    assert torch.equal(keys_of(layer), states(50)[0])


def test_a_positive_crop_is_refused_like_in_the_library() -> None:
    """C01: code written for the old meaning of the argument must not pass silently."""
    layer = grown(50)
    with pytest.raises(ValueError, match="negative"):
        layer.crop(20)
    assert layer.num_tokens == 50


@pytest.mark.parametrize("length", [-1, 51])
def test_cropping_to_a_length_that_is_not_held_is_refused(length: int) -> None:
    """C01."""
    layer = grown(50)
    with pytest.raises(ValueError, match="crop"):
        layer.crop_to(length)
    assert layer.num_tokens == 50


@pytest.mark.parametrize("kept", [0, 1, 15, 16, 17, 49, 50])
def test_crop_then_append_equals_append(kept: int) -> None:
    """Law 3."""
    keys, values = states(70)
    straight, back = GrowingLayer(STEP), GrowingLayer(STEP)
    straight.update(keys, values)
    back.update(keys[:, :, :50], values[:, :, :50])
    back.crop_to(kept)
    back.update(keys[:, :, kept:], values[:, :, kept:])
    assert torch.equal(keys_of(straight), keys_of(back))
    assert torch.equal(values_of(straight), values_of(back))


def test_appending_one_token_copies_nothing_until_the_room_is_used_up() -> None:
    """Law 5."""
    layer = grown(1)
    places = {keys_of(layer).data_ptr()}
    while layer.num_tokens < layer.capacity:
        layer.update(*states(1))
        places.add(keys_of(layer).data_ptr())
    assert layer.num_tokens >= STEP
    assert len(places) == 1


def test_a_long_chat_is_copied_a_bounded_number_of_times_per_token() -> None:
    """Law 5: with the stock layer the rows copied would be the square of the length."""
    layer, num_tokens = GrowingLayer(STEP), 4000
    num_growths = num_copied = 0
    for number in range(num_tokens):
        before = layer.capacity
        layer.update(*states(1))
        if layer.capacity != before:
            num_growths += 1
            num_copied += number
    assert num_growths < 60
    assert num_copied < 12 * num_tokens


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 400, 4000])
def test_at_most_an_eighth_and_a_step_stand_empty(num_tokens: int) -> None:
    layer = GrowingLayer(STEP)
    for start in range(0, num_tokens, 10):
        layer.update(*states(min(10, num_tokens - start)))
        assert layer.num_tokens <= layer.capacity <= layer.num_tokens * 9 / 8 + STEP


def test_the_bytes_it_reports_are_the_bytes_it_holds() -> None:
    layer = grown(50)
    assert layer.nbytes == layer_nbytes(layer) == layer.capacity * ROW_BYTES
    assert layer.nbytes == storage_bytes(layer)
    layer.crop_to(5)
    assert layer.nbytes == storage_bytes(layer)


def test_a_stock_layer_is_weighed_by_its_tensors() -> None:
    layer = DynamicLayer()
    layer.update(*states(7))
    assert layer_nbytes(layer) == 7 * ROW_BYTES


def test_forgetting_everything_frees_the_memory() -> None:
    layer = grown(50)
    layer.reset()
    assert layer.nbytes == layer.num_tokens == layer.get_seq_length() == 0
    layer.update(*states(2))
    assert torch.equal(keys_of(layer), states(2)[0])


def test_the_library_sees_a_croppable_layer_without_a_maximum() -> None:
    layer = grown(3)
    assert layer.is_croppable
    assert not layer.is_sliding
    assert layer.get_max_length() == -1


@pytest.mark.parametrize("failing_call", [1, 2])
def test_running_out_of_memory_while_growing_leaves_a_layer_that_can_still_be_used(failing_call: int) -> None:
    """C31: keys and values grow one after the other; the second may be refused when the first was not."""
    layer = grown(STEP)
    with out_of_memory_in(chat.layers.growing, "grown", failing_call), pytest.raises(torch.OutOfMemoryError):
        layer.update(*states(1))
    assert torch.equal(keys_of(layer), states(STEP)[0])
    layer.update(*states(3, 500))
    assert torch.equal(keys_of(layer), torch.cat([states(STEP)[0], states(3, 500)[0]], dim=-2))
    assert torch.equal(values_of(layer), torch.cat([states(STEP)[1], states(3, 500)[1]], dim=-2))

"""A cache never lies: its ids name exactly what every layer holds, whatever is fed, cut, copied or broken."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import chat.layers.growing
from chat.errors import CacheMismatch
from chat.kv_cache import KVCache
from chat.layers.growing import GrowingLayer
from chat.model import LoadedModel
from chat.settings import CacheSettings
from tests.chat.passes import Passes, llama, out_of_memory_in
from tests.tiny_models import WINDOW, tiny_model

STEP = 16
IDS = tuple(range(20, 120))


def new_cache(loaded: LoadedModel | None = None) -> KVCache:
    return KVCache((loaded or llama()).model, CacheSettings(growth_step=STEP))


def holding(num_tokens: int, loaded: LoadedModel | None = None) -> KVCache:
    cache = new_cache(loaded)
    if num_tokens:
        cache.feed(IDS[:num_tokens])
    return cache


def layers(cache: KVCache) -> list[GrowingLayer]:
    return cast("Any", cache)._cache.layers


def held_keys(cache: KVCache) -> list[torch.Tensor]:
    """The keys themselves, layer by layer."""
    return [layer.keys for layer in layers(cache) if layer.keys is not None]


def rows(cache: KVCache, num_tokens: int | None = None) -> list[torch.Tensor]:
    """A copy of every layer's keys and values, first `num_tokens` of them."""
    tensors = [tensor for layer in layers(cache) for tensor in (layer.keys, layer.values)]
    return [tensor[:, :, :num_tokens].clone() for tensor in tensors if tensor is not None]


def assert_equal_rows(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@torch.inference_mode()
def fresh_logits(ids: tuple[int, ...], loaded: LoadedModel | None = None) -> torch.Tensor:
    """ORACLE: one pass over everything, with no cache at all."""
    model = (loaded or llama()).model
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1]


# feeding


def test_seven_tokens_on_forty_give_what_a_fresh_run_gives() -> None:
    """C06."""
    cache = holding(40)
    torch.testing.assert_close(cache.feed(IDS[40:47]), fresh_logits(IDS[:47]))
    cache.check()


def test_no_mask_and_no_positions_can_be_passed_so_none_can_be_of_the_wrong_length() -> None:
    """C06: the library takes a mask of any length without an error; here there is no way to give it one."""
    assert list(inspect.signature(KVCache.feed).parameters) == ["self", "token_ids"]
    seen: list[dict[str, Any]] = []
    cache = holding(40)
    hook = llama().model.register_forward_pre_hook(lambda *args: seen.append(args[2]), with_kwargs=True)
    try:
        cache.feed(IDS[40:47])
    finally:
        hook.remove()
    assert [(call.get("attention_mask"), call.get("position_ids")) for call in seen] == [(None, None)]


def test_padding_and_end_of_turn_ids_in_the_text_leave_no_hole() -> None:
    """C06 and C14: a mask guessed from ids would hide these tokens."""
    tokenizer: Any = llama().tokenizer
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    ids = (*IDS[:20], pad, end, pad, *IDS[20:37], pad, end, *IDS[37:42])
    cache = new_cache()
    cache.feed(ids[:40])
    torch.testing.assert_close(cache.feed(ids[40:]), fresh_logits(ids))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6))
@settings(max_examples=6, deadline=None)
def test_any_cut_into_chunks_gives_the_same_answer(sizes: list[int]) -> None:
    ids = IDS[: min(sum(sizes), 100)]
    cache, start = new_cache(), 0
    logits = torch.empty(0)
    for size in sizes:
        if start < len(ids):
            logits = cache.feed(ids[start : start + size])
            cache.check()
        start += size
    assert cache.token_ids == ids
    torch.testing.assert_close(logits, fresh_logits(ids), rtol=1e-4, atol=1e-4)


def test_there_is_no_feeding_of_nothing() -> None:
    cache = holding(5)
    with pytest.raises(ValueError, match="nothing"):
        cache.feed([])
    assert len(cache) == 5


def test_a_layer_that_did_not_take_the_tokens_is_noticed_before_any_logits_are_used() -> None:
    """Law 4. `feed` promises CacheMismatch."""
    cache = holding(10)
    layer: Any = layers(cache)[1]
    take = layer.update

    def lose(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen = [states.clone() for states in take(keys, values, *args, **kwargs)]
        layer.crop(-1)
        return seen

    layer.update = lose
    with pytest.raises(CacheMismatch):
        cache.feed(IDS[10:12])


# going back


@pytest.mark.parametrize("kept", [0, 1, 15, 16, 17, 49, 50])
def test_going_back_leaves_no_trace_of_what_was_after(kept: int) -> None:
    """C01, law 3: the rows kept are the same bytes, and what is fed next is answered as by a fresh run."""
    cache = holding(50)
    before = rows(cache, kept)
    cache.crop_to(kept)
    assert cache.token_ids == IDS[:kept]
    cache.check()
    assert_equal_rows(rows(cache), before)
    other = tuple(range(200, 220))
    torch.testing.assert_close(cache.feed(other), fresh_logits((*IDS[:kept], *other)))


def test_crop_then_append_equals_append() -> None:
    """Law 3: bytes and logits."""
    straight, back = holding(30), holding(30)
    back.feed(range(200, 225))
    back.crop_to(30)
    assert torch.equal(straight.feed(IDS[30:40]), back.feed(IDS[30:40]))
    assert_equal_rows(rows(straight), rows(back))


@pytest.mark.parametrize("length", [-1, 51, 1000])
def test_going_back_to_more_than_is_held_is_refused_and_changes_nothing(length: int) -> None:
    """C01: asking the library for that leaves stale tokens."""
    cache = holding(50)
    before = rows(cache)
    with pytest.raises(ValueError, match="crop"):
        cache.crop_to(length)
    assert cache.token_ids == IDS[:50]
    assert_equal_rows(rows(cache), before)


def test_an_empty_cache_can_be_cropped_to_nothing() -> None:
    """C01."""
    cache = new_cache()
    cache.crop_to(0)
    assert len(cache) == 0
    torch.testing.assert_close(cache.feed(IDS[:5]), fresh_logits(IDS[:5]))


def test_going_back_and_forth_allocates_nothing() -> None:
    """Law 5: an edit costs a number, not a copy."""
    cache = holding(50)
    places = [keys.data_ptr() for keys in held_keys(cache)]
    for kept in (40, 10, 0, 45):
        cache.crop_to(min(kept, len(cache)))
        cache.feed(IDS[len(cache) : 50])
    assert [keys.data_ptr() for keys in held_keys(cache)] == places


# copies and comparisons


@pytest.mark.parametrize("length", [0, 1, 16, 33, 50])
def test_a_copied_beginning_is_byte_equal_and_stands_alone(length: int) -> None:
    """Law 3; and what happens to one of the two never shows in the other."""
    source = holding(50)
    before = rows(source)
    copy = source.copy_prefix(length)
    copy.check()
    assert copy.token_ids == IDS[:length]
    if length:
        assert_equal_rows(rows(copy), rows(source, length))
    other = tuple(range(200, 210))
    torch.testing.assert_close(copy.feed(other), fresh_logits((*IDS[:length], *other)))
    assert_equal_rows(rows(source), before)
    source.crop_to(0)
    source.feed(range(10, 20))
    copy.crop_to(length)
    torch.testing.assert_close(copy.feed(other), fresh_logits((*IDS[:length], *other)))


@pytest.mark.parametrize("length", [-1, 51])
def test_a_copy_of_more_than_there_is_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="copy"):
        holding(50).copy_prefix(length)


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
@settings(max_examples=15, deadline=None)
def test_the_common_beginning_is_counted_in_ids(held: list[int], asked: list[int]) -> None:
    cache = new_cache()
    if held:
        cache.feed(held)
    common = cache.num_common(asked)
    assert held[:common] == asked[:common]
    assert common == min(len(held), len(asked)) or held[common] != asked[common]


def test_the_ids_handed_out_are_a_copy() -> None:
    cache = holding(5)
    ids = cache.token_ids
    cache.feed(IDS[5:7])
    assert ids == IDS[:5]


# weight


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 90])
def test_the_bytes_foretold_are_the_bytes_allocated(num_tokens: int) -> None:
    """Law 5: a limit that is checked before allocating must foresee what will be allocated."""
    loaded, cache = llama(), new_cache()
    foretold = cache.nbytes_for(num_tokens)
    cache.feed(IDS[:num_tokens])
    assert cache.nbytes == foretold
    assert cache.nbytes == cache.capacity * loaded.kv_bytes_per_token


def tensors_in(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in cast("dict[Any, Any]", value).values() for tensor in tensors_in(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in cast("list[Any]", value) for tensor in tensors_in(item)]
    return []


@pytest.mark.parametrize("kind", ["llama", "lfm2", "qwen3_next", "falcon_h1", "mistral", "gemma3_text"])
def test_rows_and_states_are_both_weighed(kind: str) -> None:
    """C30: a budget counts whatever a layer holds, not only what it holds per token."""
    cache = holding(30, tiny_model(kind))
    held = [tensor for layer in layers(cache) for tensor in tensors_in(vars(layer))]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    assert cache.nbytes >= sum(storages.values()) > 0


# what breaks half-way


@pytest.mark.parametrize("num_layers_done", [0, 1, 2])
@pytest.mark.parametrize("held", [0, 20])
def test_a_pass_that_broke_between_layers_can_be_taken_back(held: int, num_layers_done: int) -> None:
    """C31: the first layers then hold more than the last ones."""
    loaded = llama(num_layers=3)
    cache = holding(held, loaded)
    with Passes(cast("Any", loaded.model).model.layers[num_layers_done]) as passes:
        passes.fail(ValueError("broken by a test"))
        with pytest.raises(ValueError, match="broken by a test"):
            cache.feed(IDS[held : held + 30])
    assert cache.recover()
    assert cache.token_ids == IDS[:held]
    cache.check()
    torch.testing.assert_close(cache.feed(IDS[held:60]), fresh_logits(IDS[:60], loaded))


@pytest.mark.parametrize("failing_call", [1, 2, 3, 4])
def test_a_layer_that_had_no_memory_to_grow_can_be_taken_back(failing_call: int) -> None:
    """C31: the next, shorter message must work on what was kept."""
    cache = holding(STEP)
    with (
        out_of_memory_in(chat.layers.growing, "grown", failing_call),
        pytest.raises(torch.OutOfMemoryError),
    ):
        cache.feed(IDS[STEP : STEP + 8])
    if cache.recover():
        torch.testing.assert_close(cache.feed(IDS[STEP : STEP + 4]), fresh_logits(IDS[: STEP + 4]))


def test_an_id_that_the_model_does_not_know_leaves_the_cache_usable() -> None:
    cache = holding(10)
    with pytest.raises(IndexError):
        cache.feed([10**6])
    assert cache.recover()
    torch.testing.assert_close(cache.feed(IDS[10:20]), fresh_logits(IDS[:20]))


def longer_list(cache: Any) -> None:
    cache._token_ids.append(7)


def shorter_layer(cache: Any) -> None:
    cache._cache.layers[1].crop(-1)


def emptied_layer(cache: Any) -> None:
    cache._cache.layers[0].reset()


@pytest.mark.parametrize("harm", [longer_list, shorter_layer, emptied_layer])
def test_a_disagreement_between_ids_and_layers_is_found(harm: Callable[[KVCache], None]) -> None:
    """Law 4."""
    cache = holding(10)
    cache.check()
    harm(cache)
    with pytest.raises(CacheMismatch):
        cache.check()


def test_what_cannot_be_taken_back_is_reported() -> None:
    """C31: a layer that holds less than the id list says has lost something; no cut brings it back."""
    cache = holding(10)
    shorter_layer(cache)
    assert not cache.recover()


# layers that cannot go back


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_a_sliding_window_goes_back_exactly_until_it_is_full_and_never_after(kind: str) -> None:
    loaded = tiny_model(kind)
    young, old = holding(WINDOW - 1, loaded), holding(WINDOW + 10, loaded)
    assert young.can_crop_to(5)
    young.crop_to(5)
    torch.testing.assert_close(young.feed(IDS[5:30]), fresh_logits(IDS[:30], loaded), rtol=1e-4, atol=1e-4)
    assert old.can_crop_to(WINDOW + 10)
    assert not old.can_crop_to(WINDOW + 9)
    with pytest.raises(CacheMismatch):
        old.crop_to(5)
    assert old.token_ids == IDS[: WINDOW + 10]
    old.check()


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next", "falcon_h1", "mistral", "gemma3_text"])
def test_no_part_of_a_state_is_ever_taken_for_the_whole(kind: str) -> None:
    """Cropping, copying and taking back are refused, and nothing is changed by asking."""
    loaded = tiny_model(kind)
    cache = holding(30, loaded)
    assert not cache.has_rows()
    for step_back in (cache.crop_to, cache.copy_prefix):
        with pytest.raises(CacheMismatch):
            step_back(29)
    assert not cache.recover()
    cache.crop_to(30)
    torch.testing.assert_close(cache.feed(IDS[30:45]), fresh_logits(IDS[:45], loaded), rtol=1e-3, atol=1e-3)

"""What this app leans on in its libraries. A failure here after an upgrade says which reliance broke."""

from __future__ import annotations

import inspect
import os
import re
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.integrations.sdpa_attention import use_gqa_in_sdpa
from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

from chat.model import GROUPS_SWITCH, attend_in_groups
from tests.chat.passes import llama
from tests.chat.tokenizers import bos_tokenizer, sentencepiece_tokenizer
from tests.tiny_models import WINDOW, tiny_model, tiny_tokenizer


def states(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.arange(num_tokens, dtype=torch.float32).reshape(1, 1, num_tokens, 1)
    return keys, -keys


def filled(layer: DynamicLayer, num_tokens: int) -> DynamicLayer:
    layer.update(*states(num_tokens))
    return layer


def kinds(model: PreTrainedModel) -> set[type]:
    return {type(layer) for layer in DynamicCache(config=model.config).layers}


# crop


def test_crop_takes_the_number_of_tokens_to_remove_as_a_negative_number() -> None:
    layer = filled(DynamicLayer(), 10)
    layer.crop(-3)
    assert layer.get_seq_length() == 7
    with pytest.raises(ValueError, match="positive"):
        layer.crop(3)


def test_crop_by_zero_removes_nothing() -> None:
    layer = filled(DynamicLayer(), 10)
    layer.crop(0)
    assert layer.get_seq_length() == 10


def test_a_sliding_layer_counts_all_tokens_and_keeps_a_window_less_one() -> None:
    layer = filled(DynamicSlidingWindowLayer(WINDOW), 40)
    assert layer.get_seq_length() == layer.cumulative_length == 40
    assert layer.keys is not None
    assert layer.keys.shape[-2] == WINDOW - 1


def test_a_sliding_layer_can_be_cropped_before_its_window_is_full_only() -> None:
    layer = filled(DynamicSlidingWindowLayer(WINDOW), WINDOW - 1)
    layer.crop(-5)
    assert layer.get_seq_length() == WINDOW - 6
    layer = filled(DynamicSlidingWindowLayer(WINDOW), WINDOW)
    with pytest.raises(RuntimeError, match="past"):
        layer.crop(-5)


def test_croppable_says_yes_for_a_sliding_layer_that_will_refuse() -> None:
    assert filled(DynamicSlidingWindowLayer(WINDOW), 40).is_croppable


# which layers a config gives


def test_full_attention_maps_to_the_dynamic_layer() -> None:
    assert DYNAMIC_LAYER_TYPE_MAPPING["full_attention"] is DynamicLayer
    assert kinds(llama().model) == {DynamicLayer}


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_a_sliding_window_in_the_config_maps_to_the_sliding_layer(kind: str) -> None:
    assert DynamicSlidingWindowLayer in kinds(tiny_model(kind).model)


def state_layers(kind: str) -> list[LinearAttentionCacheLayerMixin]:
    """The layers that keep a state instead of rows, after four tokens."""
    model = tiny_model(kind).model
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.tensor([[5, 6, 7, 8]]), cache=cache, use_cache=True)
    return [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1"])
def test_layers_with_a_recurrent_state_are_known_by_their_mixin_and_not_croppable(kind: str) -> None:
    layers = state_layers(kind)
    assert layers
    assert not any(layer.is_croppable for layer in layers)


def test_convolution_layers_are_known_by_their_mixin_and_refuse_to_crop_although_they_say_they_can() -> None:
    layers = state_layers("lfm2")
    assert layers
    for layer in layers:
        assert layer.is_croppable
        with pytest.raises(RuntimeError):
            layer.crop(-1)


# the call


def test_the_cache_is_passed_and_returned_as_cache() -> None:
    model = llama().model
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        outputs = model(input_ids=torch.tensor([[5, 6, 7]]), cache=cache, use_cache=True, logits_to_keep=1)
    assert outputs.cache is cache
    assert outputs.logits.shape[:2] == (1, 1)
    assert cache.get_seq_length() == 3


def test_a_layer_that_is_put_into_the_cache_is_the_one_that_is_updated() -> None:
    class Own(DynamicLayer):
        pass

    model = llama().model
    cache = DynamicCache(config=model.config)
    cache.layers[0] = Own()
    with torch.inference_mode():
        model(input_ids=torch.tensor([[5, 6, 7]]), cache=cache, use_cache=True)
    assert type(cache.layers[0]) is Own
    assert cache.layers[0].get_seq_length() == 3


def test_without_mask_and_positions_new_tokens_stand_after_the_cached_ones() -> None:
    model, ids = llama().model, torch.arange(10, 57)[None]
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=ids[:, :40], cache=cache, use_cache=True)
        continued = model(input_ids=ids[:, 40:], cache=cache, use_cache=True).logits[0, -1]
        whole = model(input_ids=ids, use_cache=False).logits[0, -1]
    torch.testing.assert_close(continued, whole)


# control tokens in text


def pattern(tokens: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tokens)))


def test_marked_control_tokens_are_encoded_as_text_and_unmarked_ones_as_themselves() -> None:
    tokenizer = tiny_tokenizer()
    control = tokenizer.convert_tokens_to_ids("<|im_end|>")
    marked = mark_control_tokens("a<|im_end|>b", pattern(["<|im_end|>"]))
    assert control not in encode_marked_chat(tokenizer, marked)
    assert tokenizer.decode(encode_marked_chat(tokenizer, marked)) == "a<|im_end|>b"
    assert control in encode_marked_chat(tokenizer, "a<|im_end|>b")


def test_markers_in_the_text_itself_are_dropped_so_that_nobody_can_forge_one() -> None:
    once = mark_control_tokens("<|im_end|>", pattern(["<|im_end|>"]))
    assert mark_control_tokens(once, pattern(["<|im_end|>"])) == once


def test_a_marked_chat_is_encoded_without_a_start_token() -> None:
    tokenizer = bos_tokenizer()
    assert tokenizer.encode("hi")[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in encode_marked_chat(tokenizer, "hi")


# half characters


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), sentencepiece_tokenizer()], ids=["bytes", "pieces"])
def test_an_unfinished_character_is_decoded_to_a_replacement_at_the_end(tokenizer: Any) -> None:
    backend = tokenizer.backend_tokenizer
    ids = backend.encode("a 😀", add_special_tokens=False).ids
    texts = [backend.decode(ids[: len(ids) - missing]) for missing in range(4)]
    assert texts[0] == "a 😀"
    assert all(text.startswith("a ") and text.endswith("\ufffd") for text in texts[1:])


def test_the_library_s_helpers_have_the_parameters_that_we_pass() -> None:
    assert list(inspect.signature(mark_control_tokens).parameters) == ["obj", "control_tokens_re"]
    assert list(inspect.signature(encode_marked_chat).parameters) == ["tokenizer", "chat"]


# attention on the CPU


def test_the_switch_for_grouped_attention_is_read_at_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.zeros(1, 1, 4, 8)
    mask = torch.ones(1, 1, 2, 4, dtype=torch.bool)
    for value, grouped in (("1", True), ("0", False)):
        monkeypatch.setenv(GROUPS_SWITCH, value)
        assert use_gqa_in_sdpa(mask, keys, keys) is grouped


def test_loading_for_the_cpu_turns_grouped_attention_on_and_for_others_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(GROUPS_SWITCH, "")
    for name, value in (("cpu", "1"), ("cuda", "0")):
        attend_in_groups(torch.device(name))
        assert os.environ[GROUPS_SWITCH] == value

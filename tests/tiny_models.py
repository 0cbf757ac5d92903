"""Tiny models with random weights and a real tokenizer, built in code: the ground that laws are tested on.

Two layers (four where a kind mixes layer types; in Gemma 3n and 4 the last two read the rows of the first),
float32, a fixed seed. The weights are wide enough that every earlier token in reach changes what comes next,
so a cache that lost, doubled or moved one is seen. Greedy decoding never ends a reply by itself (the
end-of-turn row of the output layer is zero); sampling sometimes does. The tokenizer is byte-level BPE with
ChatML control tokens: it knows every byte, so any text survives a round trip, and it writes no start token.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from chat.model import LoadedModel, describe

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The ChatML template; a chat without a system message gets none."""

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINKING_TOKENS = ("<think>", "</think>")
"""Added, but not flagged special, as real tokenizers have them."""

_MERGED_WORDS = (
    " the",
    " and",
    " you",
    " is",
    " a dog",
    "ing",
    "tion",
    "user",
    "assistant",
    "system",
    "\n\n",
    "  ",
)

WINDOW = 16
"""Tokens that the sliding layers of the tiny models look back."""

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}

_MIXED: dict[str, Any] = {"num_hidden_layers": 4}

_KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "smollm3": {},
    "mistral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "gemma2": {**_MIXED, "sliding_window": WINDOW},
    "gemma3_text": {
        **_MIXED,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_oss": {
        **_MIXED,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "lfm2": {**_MIXED, "layer_types": ["conv", "full_attention"] * 2},
    "qwen3_next": {
        **_MIXED,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 8,
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "gemma3n_text": {
        **_MIXED,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [128] * 4,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        **_MIXED,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 16,
    },
    "granitemoehybrid": {
        **_MIXED,
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 8,
    },
}

TINY_KINDS: tuple[str, ...] = tuple(_KINDS)
"""Every kind that `tiny_model` builds."""


def tiny_llama(*, seed: int = 0, **overrides: Any) -> LoadedModel:
    """Plain full attention; `overrides` are config fields, such as `max_position_embeddings=64`."""
    return tiny_model("llama", seed=seed, **overrides)


def tiny_model(kind: str, *, seed: int = 0, **overrides: Any) -> LoadedModel:
    """A model of one of `TINY_KINDS`. Equal arguments give equal weights."""
    tokenizer = tiny_tokenizer()
    fields = {**_BASE, **_KINDS[kind], "vocab_size": len(tokenizer), **_token_ids(tokenizer), **overrides}
    source = f"random:{kind}:{seed}:{sorted(overrides.items())}"
    return describe(f"tiny {kind}", _random_model(kind, fields, seed), tokenizer, source)


def tiny_tokenizer(chat_template: str = CHATML) -> PreTrainedTokenizerFast:
    """A fresh tokenizer of a few hundred tokens; changing it changes no other."""
    backend = Tokenizer(models.BPE(vocab=dict(_vocabulary()), merges=list(_merges())))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in CONTROL_TOKENS])
    backend.add_tokens([AddedToken(token, normalized=False) for token in THINKING_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def _random_model(kind: str, fields: dict[str, Any], seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(kind, **fields)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        output: Any = model.get_output_embeddings()
        output.weight[fields["eos_token_id"]] = 0.0
    return model.eval().requires_grad_(False)


def _token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


@lru_cache(1)
def _vocabulary() -> dict[str, int]:
    """Every byte first, then each merge in order."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in _merges())]
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}


@lru_cache(1)
def _merges() -> tuple[tuple[str, str], ...]:
    return tuple(dict.fromkeys(pair for word in _MERGED_WORDS for pair in _folds(_as_bytes(word))))


def _as_bytes(word: str) -> str:
    """`word` in the printable alphabet in which byte-level BPE spells bytes."""
    return "".join(
        piece for piece, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(word)
    )


def _folds(word: str) -> Iterator[tuple[str, str]]:
    """The merges that build `word` one character at a time from the left."""
    return ((word[:end], word[end]) for end in range(1, len(word)))

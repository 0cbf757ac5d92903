"""A tiny llama written as a GGUF file: the real format, a few hundred kilobytes, made in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import gguf
import torch

from chat.model import LoadedModel
from tests.tiny_models import CONTROL_TOKENS, THINKING_TOKENS

_ARCHITECTURE = "llama"
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_tiny_gguf(path: Path, loaded: LoadedModel) -> None:
    """Write a `tiny_llama` with its tokenizer and template, weights in float32."""
    writer = gguf.GGUFWriter(path, _ARCHITECTURE)
    _add_config(writer, loaded)
    _add_tokenizer(writer, loaded)
    for name, tensor in cast("dict[str, torch.Tensor]", loaded.model.state_dict()).items():
        writer.add_tensor(_gguf_name(name), _as_stored(name, tensor, loaded).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_config(writer: gguf.GGUFWriter, loaded: LoadedModel) -> None:
    config: Any = loaded.model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter, loaded: LoadedModel) -> None:
    tokenizer: Any = loaded.tokenizer
    tokens: list[str] = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    kinds = {
        **dict.fromkeys(CONTROL_TOKENS, gguf.TokenType.CONTROL),
        **dict.fromkeys(THINKING_TOKENS, gguf.TokenType.USER_DEFINED),
    }
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token in tokens])
    writer.add_token_merges(_merges(tokenizer))
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)


def _merges(tokenizer: Any) -> list[str]:
    return [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]


def _gguf_name(name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` → `blk.0.ffn_up.weight`."""
    stem = name.removesuffix(".weight")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.weight"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_NAMES[part]}.weight"


def _as_stored(name: str, tensor: torch.Tensor, loaded: LoadedModel) -> torch.Tensor:
    """GGUF keeps the two rows that rotate together next to each other; transformers keeps them half a
    head apart."""
    config: Any = loaded.model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, num_heads in heads.items():
        if part in name:
            halves = tensor.reshape(num_heads, 2, config.head_dim // 2, config.hidden_size)
            return halves.transpose(1, 2).reshape(tensor.shape).contiguous()
    return tensor.contiguous()

"""What follows from a model's config and tokenizer: pure functions, no files, nothing loaded.

Whether the template can render a chat, which tokens end a reply, what a token costs in a cache, how long
a chat may grow, and the fingerprint that ties a cache to everything it was made with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import tokenizers
import torch
import transformers
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import get_layer_types_and_kwargs  # pyright: ignore[reportUnknownVariableType]

from chat.checkpoint import first_line
from chat.errors import ModelUnusable
from chat.weight_forms import form_in_words

FINGERPRINT_FORMAT = "1"
UNBOUNDED_CONTEXT = 2**20
"""Tokens; stands in where a model states no limit (state-space models)."""

_QUESTION, _REPLY, _NEXT_QUESTION = "Which bird is that?", "A kestrel.", "And the other one?"
_POSITION_FIELDS = (
    "rope_parameters",
    "max_position_embeddings",
    "sliding_window",
    "attention_chunk_size",
    "layer_types",
)
_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_KV_LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "hybrid", "hybrid_sliding")


@dataclass(frozen=True, slots=True)
class KvLayer:
    """What one token leaves in one layer: a key and a value for each head. `kind` is the library's name."""

    kind: str
    num_heads: int
    widths: tuple[int, int]

    @property
    def num_elements(self) -> int:
        """Of keys and values together."""
        return self.num_heads * sum(self.widths)


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The part of the config that is about text; the whole of it in a model that only knows text."""
    return cast("Any", model.config).get_text_config(decoder=True)


def check_template(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Render a chat of three messages. Raises ModelUnusable when that fails or loses a message."""
    if not cast("Any", tokenizer).chat_template:
        raise ModelUnusable(
            f"{name} has no chat template, so it can continue text but not chat; choose a model made for chat"
            " (often named Instruct) with --model."
        )
    texts = (_QUESTION, _REPLY, _NEXT_QUESTION)
    try:
        rendered = _render(tokenizer, texts, add_generation_prompt=True)
    except Exception as error:  # a template is a program of its own: it may raise anything
        raise ModelUnusable(
            f"{name} cannot chat because its chat template fails ({first_line(error)}); choose another model"
            " with --model, or mend the template."
        ) from error
    places = [rendered.find(text) for text in texts]
    if -1 in places or places != sorted(places):
        raise ModelUnusable(
            f"{name} cannot chat because its chat template drops messages; choose another model with --model,"
            " or mend the template."
        )


def check_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write and read a sentence. Raises ModelUnusable when nothing like it comes back: without its files a
    tokenizer may load all the same, knowing no words."""
    coder = cast("Any", tokenizer)
    back: str = coder.decode(coder.encode(_QUESTION, add_special_tokens=False))
    if "".join(back.split()).casefold() != "".join(_QUESTION.split()).casefold():
        raise ModelUnusable(
            f"{name} has a tokenizer that knows no words, because its files are missing or damaged; fetch the"
            " model again or choose another one with --model."
        )


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All that may end a reply: what the generation config names, what the tokenizer names, and what the
    template itself writes behind a reply (chat models often end with another token than the base model)."""
    named: list[Any] = [tokenizer.eos_token_id, _closing_token_id(tokenizer)]
    generation_config = cast("Any", model.generation_config)  # None for some models, whatever its type says
    if generation_config is not None:
        in_config: Any = generation_config.eos_token_id
        named += in_config if isinstance(in_config, list) else [in_config]
    return frozenset(int(token_id) for token_id in named if token_id is not None)


def kv_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values for one more token in a dense cache, over all layers that keep any.

    Sliding layers count in full, although they stop growing at their window; layers with a state of
    fixed size (linear attention, convolution) and layers that use another's keys count nothing.
    """
    return sum(layer.num_elements for layer in kv_layers(config)) * dtype.itemsize


def kv_layers(config: PreTrainedConfig) -> tuple[KvLayer, ...]:
    """The layers that keep keys and values of their own, in order."""
    kinds: list[str] = get_layer_types_and_kwargs(config)[0]
    num_own = len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)
    layers = zip(kinds[:num_own], cast("Any", config).per_layer_config, strict=False)
    return tuple(KvLayer(kind, *_row_shape(layer)) for kind, layer in layers if kind in _KV_LAYER_KINDS)


def _row_shape(layer: Any) -> tuple[int, tuple[int, int]]:
    """Heads and widths of a layer, from its own config."""
    num_latent = getattr(layer, "kv_lora_rank", None)
    if num_latent:  # latent attention keeps one compressed vector and one rotated key for all heads
        return 1, (num_latent, layer.qk_rope_head_dim)
    num_heads = getattr(layer, "num_key_value_heads", None) or getattr(layer, "num_attention_heads", 0)
    if not num_heads:
        return 0, (0, 0)
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    return num_heads, (head_dim, head_dim)


def shares_rows(config: PreTrainedConfig) -> bool:
    """Whether some layers read the keys and values of an earlier one, instead of keeping their own."""
    return bool(getattr(config, "num_kv_shared_layers", None) or getattr(config, "kv_sharing_modes", None))


def num_context_tokens(config: PreTrainedConfig) -> int:
    """The longest chat that the model can read, in tokens; `UNBOUNDED_CONTEXT` when it states no limit."""
    stated = (getattr(config, field, None) for field in _CONTEXT_FIELDS)
    return next((int(limit) for limit in stated if limit), UNBOUNDED_CONTEXT)


def fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str) -> Mapping[str, str]:
    """What a cache made by `model` depends on, by name; `source` stands for the weights as they were saved,
    `weights` is only there when they are used in another form."""
    config = text_config(model)
    form = form_in_words(model)
    positions = {field: getattr(config, field, None) for field in _POSITION_FIELDS}
    return MappingProxyType(
        {
            "format": FINGERPRINT_FORMAT,
            "model": source,
            "dtype": str(model.dtype).removeprefix("torch."),
            "attention": str(cast("Any", config)._attn_implementation),
            "tokenizer": _sha256(_backend(tokenizer).to_str()),
            "template": _sha256(cast("Any", tokenizer).get_chat_template()),
            "positions": json.dumps(positions, sort_keys=True, default=str),
            "transformers": transformers.__version__,
            **({"weights": form} if form else {}),
        }
    )


def _closing_token_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The added token that the template writes right behind a reply, or None when it writes none."""
    rendered = _render(tokenizer, (_QUESTION, _REPLY), add_generation_prompt=False)
    behind = rendered.rpartition(_REPLY)[2].lstrip()
    ids = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
    matching = [content for content in ids if content.strip() and behind.startswith(content)]
    return ids[max(matching, key=len)] if matching else None


def _render(
    tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...], *, add_generation_prompt: bool
) -> str:
    """`texts` as a chat that a user begins."""
    chat = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]
    return str(
        cast("Any", tokenizer).apply_chat_template(
            chat, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    )


def _backend(tokenizer: PreTrainedTokenizerBase) -> tokenizers.Tokenizer:
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer.backend_tokenizer


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

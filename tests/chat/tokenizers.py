"""More tokenizers for the tiny models: one with its own start token, two in SentencePiece's manner."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from chat.model import LoadedModel
from tests.tiny_models import CHATML, tiny_llama, tiny_tokenizer

BOS = "<|endoftext|>"

BOS_CHATML = "{{ bos_token }}" + CHATML
"""Writes the start token itself, as Llama 3's and DeepSeek's templates do."""

TRIMMING = CHATML.replace("message['content']", "(message['content'] | trim)")
"""Takes white space off both ends of every message."""

PADDING = CHATML.replace(
    "+ message['content']", "+ (' ' if message['role'] == 'assistant' else '') + message['content']"
)
"""Puts a space before each past reply that was not there while it was written."""

NO_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% endfor %}" + CHATML
)

THINKING = CHATML.replace(
    "message['content'] + '<|im_end|>",
    "(message['content'].split('</think>')[-1] if message['role'] == 'assistant' else message['content'])"
    " + '<|im_end|>",
)
"""Drops the thinking block of every past reply, as Qwen3's template does."""

_WORDS = ("the", "and", "you", "is", "a", "dog", "Hi", "user", "assistant", "system")


def with_template(loaded: LoadedModel, chat_template: str) -> LoadedModel:
    """The same weights under another template."""
    return replace(loaded, tokenizer=tiny_tokenizer(chat_template))


def bos_tokenizer(chat_template: str = BOS_CHATML) -> PreTrainedTokenizerFast:
    """The tiny tokenizer, but `encode` puts a start token in front, as Llama 3's does."""
    tokenizer = tiny_tokenizer(chat_template)
    tokenizer.bos_token = BOS
    bos_id = tokenizer.convert_tokens_to_ids(BOS)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos_id)]
    )
    return tokenizer


def sentencepiece_tokenizer(chat_template: str = CHATML) -> PreTrainedTokenizerFast:
    """Spaces become `▁`, one is put before every text, unknown characters become byte tokens."""
    merges = list(dict.fromkeys(pair for word in _WORDS for pair in _folds("▁" + word)))
    alphabet = ["▁", *map(chr, range(33, 127)), "\n"]
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *alphabet, *("".join(pair) for pair in merges)]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(["<unk>", *tokens]))}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")]
    )
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<|im_start|>", "<|im_end|>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>", chat_template=chat_template
    )


def metaspace_tokenizer(chat_template: str = CHATML) -> PreTrainedTokenizerFast:
    """The same words, with the space put in front by the pre-tokenizer instead of the normalizer."""
    tokenizer = sentencepiece_tokenizer(chat_template)
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    return tokenizer


def sentencepiece_llama(chat_template: str = CHATML, *, metaspace: bool = False) -> LoadedModel:
    """A tiny model for those tokenizers."""
    tokenizer = (metaspace_tokenizer if metaspace else sentencepiece_tokenizer)(chat_template)
    end = int(cast("int", tokenizer.eos_token_id))
    loaded = tiny_llama(vocab_size=len(tokenizer), eos_token_id=end, pad_token_id=None)
    return replace(loaded, tokenizer=tokenizer, eos_token_ids=frozenset({end}))


def _folds(word: str) -> list[tuple[str, str]]:
    return [(word[:end], word[end]) for end in range(1, len(word))]

"""What each kind of cache costs and how near its answers stay to the dense one's, on the default model.

A text of 2,048 tokens, the language reference that comes with Python, is read `PASS_TOKENS` at a time, so
that most of it is seen through the kind's own rows. `perplexity`, `mean_kl` (of the next token's
distribution, in nats) and `top1_agreement` compare with the dense cache of the same run;
`bytes_per_token` is every tensor that the cache holds after the text, by its tokens; `ratio_to_bf16` compares
that with dense rows in bfloat16. `decode_tps` is for one token at a time behind the text.
`append_us_per_token` is what taking one token's rows costs in all layers together, packing included, the mean
over `APPEND_TOKENS` tokens in a row, when so many tokens are held already.

`stock_quanto4` is the library's own quantized cache with its defaults; it has no append apart from its
update, which unpacks everything, so that is what is timed there. A kind whose library is missing is null.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, QuantizedCache

from chat.layers.contract import RowLayer, layer_nbytes
from chat.layers.factory import LayerParts, layer_for
from chat.layers.kinds import availability, codec_for
from chat.layers.offloaded import in_turn
from chat.layers.prefetch import Prefetcher
from chat.layers.sizes import bytes_per_token, growth_step
from chat.layers.workspace import Workspace
from chat.model import LoadedModel
from chat.model_facts import text_config
from chat.settings import CacheKind, CacheSettings
from tests.bench.default_model import load_default_model

TOPICS = ("objects", "types", "naming", "exprlists")
NUM_TOKENS = 2048
PASS_TOKENS = 64
DECODE_TOKENS = 24
APPEND_AT = (512, 2048)
APPEND_TOKENS = 128
"""Twice the tokens of a chunk, and as many as the library's own cache keeps before it packs."""
NUM_REPEATS = 5

Say = Callable[..., None]


@dataclass(frozen=True)
class Reading:
    """Of the text: log-probabilities `[n, vocab]` pass by pass, and the cache that holds it now."""

    passes: list[Tensor]
    cache: Cache


def run(say: Say) -> dict[str, Any]:
    loaded = load_default_model()
    ids = text_ids(loaded)
    makers, unavailable = _makers(loaded)
    dense = read(loaded, ids, makers["dynamic"]())
    results: dict[str, Any] = dict.fromkeys((*get_args(CacheKind), "stock_quanto4"))
    for name, make in makers.items():
        results[name] = _measure(loaded, ids, make, dense)
        say(f"{name:>13}: " + " · ".join(f"{key} {_short(value)}" for key, value in results[name].items()))
    for name, reason in unavailable.items():
        say(f"{name:>13}: {reason}")
    return {"tokens": len(ids), "dtype": str(loaded.dtype), "kinds": results, "unavailable": unavailable}


def text_ids(loaded: LoadedModel) -> list[int]:
    text = "\n\n".join(topics[topic] for topic in TOPICS)
    ids: list[int] = loaded.tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) >= NUM_TOKENS
    return ids[:NUM_TOKENS]


def _makers(loaded: LoadedModel) -> tuple[dict[str, Callable[[], Cache]], dict[str, str]]:
    """How an empty cache of each kind is made, and why others cannot be."""
    makers: dict[str, Callable[[], Cache]] = {}
    unavailable: dict[str, str] = {}
    for kind in get_args(CacheKind):
        reason = availability(kind, loaded.device.type).reason
        if reason:
            unavailable[kind] = reason
        else:
            makers[kind] = lambda kind=kind: cache_of(loaded, kind)
    reason = availability("quanto4", loaded.device.type).reason
    if reason:
        unavailable["stock_quanto4"] = reason
    else:
        makers["stock_quanto4"] = lambda: QuantizedCache("quanto", loaded.model.config, nbits=4)
    return makers, unavailable


def cache_of(loaded: LoadedModel, kind: CacheKind) -> Cache:
    settings, workspace = CacheSettings(kind=kind, static_tokens=NUM_TOKENS), Workspace(shared=True)
    step = growth_step(text_config(loaded.model), settings)
    parts = LayerParts(settings, codec_for(settings), step, workspace, Prefetcher(workspace))
    cache = DynamicCache(config=loaded.model.config)
    cache.layers[:] = [layer_for(layer, parts) for layer in cache.layers]
    in_turn(cache.layers)
    for layer in cache.layers:
        assert isinstance(layer, RowLayer)
        layer.reserve(NUM_TOKENS)
    return cache


def _measure(
    loaded: LoadedModel, ids: list[int], make: Callable[[], Cache], dense: Reading
) -> dict[str, Any]:
    reading = read(loaded, ids, make())
    kl, agreement = _difference(dense, reading)
    found = perplexity(reading, ids)
    per_token = _nbytes(reading.cache) / len(ids)
    return {
        "bytes_per_token": per_token,
        "ratio_to_bf16": per_token
        / bytes_per_token(text_config(loaded.model), CacheSettings(), torch.bfloat16),
        "perplexity": found,
        "perplexity_change": found / perplexity(dense, ids) - 1,
        "mean_kl": kl,
        "top1_agreement": agreement,
        "decode_tps": decode_tps(loaded, ids, reading.cache),
        "append_us_per_token": {
            str(num_held): _append_us(loaded, ids[:num_held], make) for num_held in APPEND_AT
        },
    }


@torch.inference_mode()
def read(loaded: LoadedModel, ids: list[int], cache: Cache) -> Reading:
    """Read the ids in passes, keeping every distribution."""
    return Reading(
        [
            loaded.model(input_ids=chunk, cache=cache, use_cache=True).logits[0].float().log_softmax(-1)
            for chunk in _chunks(loaded, ids, PASS_TOKENS)
        ],
        cache,
    )


def _chunks(loaded: LoadedModel, ids: list[int], size: int) -> Iterator[Tensor]:
    for start in range(0, len(ids), size):
        yield torch.tensor([ids[start : start + size]], device=loaded.device)


def perplexity(reading: Reading, ids: list[int]) -> float:
    total, start = 0.0, 1
    for found in reading.passes:
        targets = torch.tensor(ids[start : start + len(found)], device=found.device)
        total += float(found[: len(targets)].gather(1, targets[:, None]).double().sum())
        start += len(found)
    return math.exp(-total / (len(ids) - 1))


def _difference(dense: Reading, reading: Reading) -> tuple[float, float]:
    """Mean divergence from the dense distributions, and how often the likeliest token is the same."""
    divergence, num_same, num_tokens = 0.0, 0, 0
    for expected, found in zip(dense.passes, reading.passes, strict=True):
        divergence += float((expected.exp() * (expected - found)).sum())
        num_same += int((expected.argmax(-1) == found.argmax(-1)).sum())
        num_tokens += len(found)
    return divergence / num_tokens, num_same / num_tokens


def _nbytes(cache: Cache) -> int:
    """Every tensor of every layer; the library's packed tensors are looked into."""
    return sum(
        layer_nbytes(layer) if isinstance(layer, RowLayer) else _inner_bytes(vars(layer))
        for layer in cache.layers
    )


def _inner_bytes(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_inner_bytes, value.values()))
    if isinstance(value, Tensor):
        inner = [part for part in vars(value).values() if isinstance(part, Tensor)]
        return sum(map(_inner_bytes, inner)) if inner else value.nbytes
    return 0


@torch.inference_mode()
def decode_tps(loaded: LoadedModel, ids: list[int], cache: Cache) -> float:
    """From the median of single steps behind the text."""
    times: list[float] = []
    for chunk in _chunks(loaded, ids[:DECODE_TOKENS], 1):
        began = time.perf_counter()
        loaded.model(input_ids=chunk, cache=cache, use_cache=True, logits_to_keep=1)
        finish(loaded)
        times.append(time.perf_counter() - began)
    return 1 / statistics.median(times)


@torch.inference_mode()
def _append_us(loaded: LoadedModel, ids: list[int], make: Callable[[], Cache]) -> float:
    """The least of several runs: whatever else the machine does only adds to one."""
    cache = make()
    for chunk in _chunks(loaded, ids, 256):
        loaded.model(input_ids=chunk, cache=cache, use_cache=True, logits_to_keep=1)
    states = _states(loaded)
    return min(_append_once(loaded, cache, states) for _ in range(NUM_REPEATS)) * 1e6


def _append_once(loaded: LoadedModel, cache: Cache, states: tuple[Tensor, Tensor]) -> float:
    began = time.perf_counter()
    for _ in range(APPEND_TOKENS):
        for layer in cache.layers:
            if isinstance(layer, RowLayer):
                layer.append(*states)
            else:
                layer.update(*states)  # pyright: ignore[reportAttributeAccessIssue]
    finish(loaded)
    seconds = (time.perf_counter() - began) / APPEND_TOKENS
    for layer in cache.layers:
        if isinstance(layer, RowLayer):
            layer.crop(-APPEND_TOKENS)
    return seconds


def _states(loaded: LoadedModel) -> tuple[Tensor, Tensor]:
    """One token's keys and values, as large as those of a model."""
    config = text_config(loaded.model)
    shape = 1, config.num_key_value_heads, 1, config.head_dim
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    return (
        keys.to(loaded.device, loaded.dtype),
        values.to(loaded.device, loaded.dtype),
    )


def finish(loaded: LoadedModel) -> None:
    """Wait for a device that computes on its own."""
    if loaded.device.type == "cuda":
        torch.cuda.synchronize(loaded.device)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " / ".join(f"{each:,.0f} at {key}" for key, each in value.items())
    return f"{value:,.4g}"

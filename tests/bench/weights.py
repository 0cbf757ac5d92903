"""What each form of the default model's weights takes and gives.

`weight_bytes` is every tensor that the loaded model holds: parameters, buffers, scales. `prefill_tps` reads
`PREFILL_TOKENS` of the text of `kinds` in passes of 256, as the app reads a message; `decode_tps` writes one
token at a time behind 64 and 1,024 tokens of it, the median step; both over the app's own dense cache.
`perplexity` is that of the whole text through that cache, and `perplexity_change` compares it with full
float32 weights of the same run. `load_s` is one load from a warm disk, quantization included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from chat.model import LoadedModel, choose_device
from chat.settings import DtypeName, WeightForm
from tests.bench.default_model import load_default_model
from tests.bench.kinds import cache_of, decode_tps, finish, perplexity, read, text_ids

FORMS: dict[str, tuple[WeightForm, DtypeName]] = {
    "float32": ("full", "float32"),
    "bfloat16": ("full", "bfloat16"),
    "int8": ("int8", "float32"),
    "nf4": ("nf4", "float32"),
    "int8_bfloat16": ("int8", "bfloat16"),
    "nf4_bfloat16": ("nf4", "bfloat16"),
}
"""Weights, and the format of what is not quantized: embedding, output layer, activations, cache."""
DECODE_AT = (64, 1024)
PREFILL_TOKENS = 1024
CHUNK_TOKENS = 256
NUM_REPEATS = 3

Say = Callable[..., None]


def run(say: Say) -> dict[str, Any]:
    load_default_model()  # fetched, and in the page cache
    results: dict[str, dict[str, Any]] = {}
    for name, (weights, dtype) in FORMS.items():
        began = time.perf_counter()
        loaded = load_default_model(weights=weights, dtype=dtype)
        results[name] = _measure(loaded, time.perf_counter() - began)
        del loaded
        results[name]["perplexity_change"] = (
            results[name]["perplexity"] / results["float32"]["perplexity"] - 1
        )
        say(f"{name:>13}: " + " · ".join(f"{key} {_short(value)}" for key, value in results[name].items()))
    return {"device": choose_device("auto").type, "weights": results}


def nbytes(model: Any) -> int:
    """Of parameters, buffers, and of the scales that quantized layers keep beside them."""
    held = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        state, packed = getattr(module, "state", None), getattr(weight, "quant_state", None)
        keepers = (weight, "SCB"), (state, "SCB"), (packed, "absmax")
        scales = [getattr(keeper, name, None) for keeper, name in keepers]
        held += [scale for scale in scales if scale is not None]
    return sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in held}.values())


def _measure(loaded: LoadedModel, load_s: float) -> dict[str, Any]:
    ids = text_ids(loaded)
    prefill_tps = max(_prefill_tps(loaded, ids) for _ in range(NUM_REPEATS))
    return {
        "weight_bytes": nbytes(loaded.model),
        "prefill_tps": prefill_tps,
        "decode_tps": {str(num_held): _decode_tps(loaded, ids, num_held) for num_held in DECODE_AT},
        "perplexity": perplexity(read(loaded, ids, cache_of(loaded, "dynamic")), ids),
        "load_s": load_s,
    }


@torch.inference_mode()
def _prefill_tps(loaded: LoadedModel, ids: list[int]) -> float:
    cache = cache_of(loaded, "dynamic")
    began = time.perf_counter()
    for start in range(0, PREFILL_TOKENS, CHUNK_TOKENS):
        chunk = torch.tensor([ids[start : start + CHUNK_TOKENS]], device=loaded.device)
        loaded.model(input_ids=chunk, cache=cache, use_cache=True, logits_to_keep=1)
    finish(loaded)
    return PREFILL_TOKENS / (time.perf_counter() - began)


@torch.inference_mode()
def _decode_tps(loaded: LoadedModel, ids: list[int], num_held: int) -> float:
    cache = cache_of(loaded, "dynamic")
    held = torch.tensor([ids[:num_held]], device=loaded.device)
    loaded.model(input_ids=held, cache=cache, use_cache=True, logits_to_keep=1)
    return statistics.median(decode_tps(loaded, ids[num_held:], cache) for _ in range(NUM_REPEATS))


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " / ".join(f"{each:,.1f} at {key}" for key, each in value.items())
    return f"{value:,.4g}"

"""What a turn costs as a chat grows to 4,096 tokens, with our cache and with none.

Cached: the app below the page, from a message that is sent to its first token; each point is the median of
several edits of the newest question, all with the same number of new tokens. Uncached: the library's own
fresh prefill of the same ids in one pass, which is what an app without reuse pays at every turn. Decode:
tokens per second of one reply whose context ends at 256 tokens, with the cache and with everything
computed anew for each token.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from chat.model import LoadedModel
from chat.settings import CacheSettings, SamplingSettings
from tests.bench.default_model import load_default_model
from tests.bench.prose import prose
from tests.house import House

HISTORY_TOKENS = (256, 512, 1024, 2048, 3072, 4096)
NUM_REPEATS = 5
NUM_UNCACHED_REPEATS = 2
ONE_TOKEN = SamplingSettings(temperature=0, max_new_tokens=1)
DECODE_CONTEXT = 256
DECODE_TOKENS = 64

Say = Callable[..., None]


def run(say: Say) -> dict[str, Any]:
    loaded = load_default_model()
    with (
        tempfile.TemporaryDirectory() as folder,
        House(Path(folder), loaded, settings=CacheSettings()) as house,
    ):
        points = [_point(house, chat_tokens, say) for chat_tokens in _grow(house)]
    cached = [point["cached_s"] for point in points]
    uncached = [point["uncached_s"] for point in points]
    cached_tps, uncached_tps = _decode_speeds(loaded)
    say(f"decode: {cached_tps:.1f} tok/s with the cache, {uncached_tps:.2f} tok/s without")
    return {
        "history_tokens": [point["tokens"] for point in points],
        "new_tokens": [point["new_tokens"] for point in points],
        "ttft_cached_s": cached,
        "ttft_uncached_s": uncached,
        "ttft_growth": cached[-1] / cached[0],
        "uncached_over_cached": uncached[-1] / cached[-1],
        "decode_cached_tps": cached_tps,
        "decode_uncached_tps": uncached_tps,
    }


def _grow(house: House):
    """Grow one chat with long messages; yield its id each time a history length is reached."""
    chat: str | None = None
    for target in HISTORY_TOKENS:
        view = house.chats.view("ada", chat) if chat else None
        have = len(house.prompt(view)) if view else 0
        text = prose(house.loaded.tokenizer, target - have - 40, salt=target)
        chat = house.say(text, chat, ONE_TOKEN).conversation.id
        yield chat


def _point(house: House, chat: str, say: Say) -> dict[str, Any]:
    view = house.say("Please tell me number 0 now.", chat, ONE_TOKEN)
    times: list[float] = []
    for repeat in range(1, NUM_REPEATS + 1):
        question = house.chats.view("ada", chat).messages[-2]
        view = house.edit(question.id, f"Please tell me number {repeat} now.", ONE_TOKEN)
        times.append(float(view.messages[-1].stats["ttft_s"]))  # pyright: ignore[reportArgumentType]
    stats = view.messages[-1].stats
    ids = house.prompt(view, upto=-1).token_ids
    fresh = [fresh_prefill_s(house.loaded, ids) for _ in range(NUM_UNCACHED_REPEATS)]
    point = {
        "tokens": len(ids),
        "new_tokens": stats["num_prefilled_tokens"],
        "cached_s": statistics.median(times),
        "uncached_s": statistics.median(fresh),
    }
    say(
        f"{point['tokens']:>6,} tokens: first token after {point['cached_s']:.3f} s with the cache"
        f" ({point['new_tokens']} read), {point['uncached_s']:.3f} s without"
    )
    return point


@torch.inference_mode()
def fresh_prefill_s(loaded: LoadedModel, ids: tuple[int, ...]) -> float:
    """Seconds of the stock library from ids to the first token."""
    started = time.perf_counter()
    cache = DynamicCache(config=loaded.model.config)
    input_ids = torch.tensor([ids], device=loaded.device)
    logits = loaded.model(input_ids=input_ids, cache=cache, use_cache=True, logits_to_keep=1).logits
    int(logits[0, -1].argmax())
    return time.perf_counter() - started


@torch.inference_mode()
def _decode_speeds(loaded: LoadedModel) -> tuple[float, float]:
    text = prose(loaded.tokenizer, DECODE_CONTEXT, salt=1)
    ids: list[int] = loaded.tokenizer.encode(text)[: DECODE_CONTEXT - DECODE_TOKENS]
    with (
        tempfile.TemporaryDirectory() as folder,
        House(Path(folder), loaded, settings=CacheSettings()) as house,
    ):
        house.say("Hello", None, ONE_TOKEN)
        sampling = SamplingSettings(temperature=0, max_new_tokens=DECODE_TOKENS)
        view = house.say(
            str(loaded.tokenizer.decode(ids[:-40])) + " Write a long list of animals.", None, sampling
        )
        cached = float(view.messages[-1].stats["decode_tokens_per_s"])  # pyright: ignore[reportArgumentType]
    started = time.perf_counter()
    for _ in range(DECODE_TOKENS):
        logits = loaded.model(
            input_ids=torch.tensor([ids], device=loaded.device), use_cache=False, logits_to_keep=1
        ).logits
        ids.append(int(logits[0, -1].argmax()))
    return cached, DECODE_TOKENS / (time.perf_counter() - started)

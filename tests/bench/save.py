"""What saving costs: bytes handed to the operating system per new token, and the speed of decode.

A chat of 20 turns, three of them edits of the question before. `bytes_written_per_new_token` counts every
byte that the process passes to the system's write calls while it lasts, the transcript and its log
included, over the tokens that were read or written for the first time; `write_amplification` compares it
with the bytes that the cache itself takes per token. `decode_slowdown` is the time per token with saving on
over that with saving off, medians of turns that alternate in the same run.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chat.chats import ChatView
from chat.model import LoadedModel
from chat.settings import CacheSettings, SamplingSettings
from chat.stats import TurnStats
from tests.bench.default_model import load_default_model
from tests.bench.machine import bytes_written
from tests.bench.prose import prose
from tests.house import House

NUM_TURNS = 20
EDITED_TURNS = (6, 12, 18)
MESSAGE_TOKENS = 40
REPLY = SamplingSettings(temperature=0.8, max_new_tokens=48, seed=1)
LONG_REPLY = SamplingSettings(temperature=0.8, max_new_tokens=160, seed=1)
NUM_PAIRS = 5
DISK = 10**10


def run(say: Callable[..., None]) -> dict[str, Any]:
    loaded = load_default_model()
    written, num_new = _write_chat(loaded)
    per_token = written / num_new
    say(
        f"{num_new:,} new tokens: {per_token:,.0f} bytes written for each, {loaded.kv_bytes_per_token:,} held"
    )
    with_saving, without = _decode_speeds(loaded)
    say(f"decode: {with_saving:.1f} tok/s with saving, {without:.1f} tok/s without")
    return {
        "num_new_tokens": num_new,
        "bytes_written_per_new_token": per_token,
        "kv_bytes_per_token": loaded.kv_bytes_per_token,
        "write_amplification": per_token / loaded.kv_bytes_per_token,
        "decode_saving_tps": with_saving,
        "decode_tps": without,
        "decode_slowdown": without / with_saving,
    }


def _write_chat(loaded: LoadedModel) -> tuple[int, int]:
    """Bytes written and tokens computed for the first time."""
    with tempfile.TemporaryDirectory() as folder:
        house = House(Path(folder), loaded, settings=CacheSettings(), max_disk_bytes=DISK)
        before = bytes_written()
        with house:
            num_new, chat = 0, None
            for turn in range(NUM_TURNS):
                view = _take_turn(house, chat, turn)
                chat = view.conversation.id
                num_new += _num_new(view)
        return bytes_written() - before, num_new


def _take_turn(house: House, chat: str | None, turn: int) -> ChatView:
    text = prose(house.loaded.tokenizer, MESSAGE_TOKENS, salt=turn)
    if chat is not None and turn in EDITED_TURNS:
        question = house.chats.view("ada", chat).messages[-2]
        return house.edit(question.id, text, REPLY)
    return house.say(text, chat, REPLY)


def _num_new(view: ChatView) -> int:
    stats = TurnStats.from_json(view.messages[-1].stats)
    return stats.num_prefilled_tokens - stats.num_read_again + stats.num_reply_tokens


def _decode_speeds(loaded: LoadedModel) -> tuple[float, float]:
    """Tokens per second with saving and without, turns taken in turn."""
    with (
        tempfile.TemporaryDirectory() as saved,
        tempfile.TemporaryDirectory() as unsaved,
        House(Path(saved), loaded, settings=CacheSettings(), max_disk_bytes=DISK) as saving,
        House(Path(unsaved), loaded, settings=CacheSettings()) as plain,
    ):
        speeds = [(_decode_tps(saving, turn), _decode_tps(plain, turn)) for turn in range(NUM_PAIRS + 1)]
    pairs = speeds[1:]  # the first pair warms up
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def _decode_tps(house: House, turn: int) -> float:
    text = prose(house.loaded.tokenizer, MESSAGE_TOKENS, salt=turn) + " Tell me a long story about it."
    return TurnStats.from_json(house.say(text, None, LONG_REPLY).messages[-1].stats).decode_tokens_per_s

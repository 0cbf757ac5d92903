"""What going back costs in a chat of 4,096 tokens: regenerate, edit in the middle, switch back.

Each figure is a median over several goes on the app below the page, saving on: tokens read before the first
word, seconds from the request to that word, bytes handed to the operating system until everything is saved.
`switch_back` shows another branch and asks for one more answer at its end, so that its rows come from disk.
`cold` is the library's own fresh prefill of the same ids; `decode_step_s` the time of one token at that
length.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chat.chats import ChatView
from chat.settings import CacheSettings, SamplingSettings
from chat.stats import TurnStats
from tests.bench.default_model import load_default_model
from tests.bench.machine import bytes_written
from tests.bench.prose import prose
from tests.bench.turns import fresh_prefill_s
from tests.house import OWNER, House

NUM_TOKENS = 4096
NUM_TURNS = 8
NUM_GOES = 5
DISK = 10**10
REPLY = SamplingSettings(temperature=0, max_new_tokens=16)

Say = Callable[..., None]


@dataclass(frozen=True)
class Go:
    """One turn: what it cost, and how fast it decoded."""

    stats: TurnStats
    num_bytes: int


def run(say: Say) -> dict[str, Any]:
    loaded = load_default_model()
    with (
        tempfile.TemporaryDirectory() as folder,
        House(Path(folder), loaded, settings=CacheSettings(), max_disk_bytes=DISK) as house,
    ):
        view = _grown(house)
        goes = {
            "regenerate": _regenerate(house, view),
            "edit_middle": _edit_middle(house, view),
            "switch_back": _switch_back(house, view),
        }
        ids = house.prompt(view, upto=-1).token_ids
        cold_s = statistics.median(fresh_prefill_s(loaded, ids) for _ in range(2))
    steps = [1 / go.stats.decode_tokens_per_s for go in goes["regenerate"] if go.stats.decode_tokens_per_s]
    result: dict[str, Any] = {name: _medians(each) for name, each in goes.items()}
    result["cold"] = {"prefilled_tokens": len(ids), "ttft_s": cold_s}
    result["decode_step_s"] = statistics.median(steps)
    result["regenerate_over_decode_step"] = result["regenerate"]["ttft_s"] / result["decode_step_s"]
    result["cold_over_regenerate"] = cold_s / result["regenerate"]["ttft_s"]
    for name in (*goes, "cold"):
        say(f"{name:>12}: {result[name]['prefilled_tokens']:>5,} read, {result[name]['ttft_s']:.3f} s")
    return result


def _grown(house: House) -> ChatView:
    """A chat of about `NUM_TOKENS` tokens."""
    chat: str | None = None
    for turn in range(NUM_TURNS):
        text = prose(house.loaded.tokenizer, NUM_TOKENS // NUM_TURNS - 30, salt=turn)
        chat = house.say(text, chat, REPLY).conversation.id
    assert chat is not None
    _settle(house, chat)
    return house.chats.view(OWNER, chat)


def _regenerate(house: House, view: ChatView) -> list[Go]:
    return [_measured(house, view, lambda: house.regenerate(view.messages[-1].id, REPLY)) for _ in _goes()]


def _edit_middle(house: House, view: ChatView) -> list[Go]:
    asked = view.messages[NUM_TURNS // 2 * 2]
    return [
        _measured(house, view, lambda text=f"Tell me number {go} now.": house.edit(asked.id, text, REPLY))
        for go in _goes()
    ]


def _switch_back(house: House, view: ChatView) -> list[Go]:
    """To the long branch, which an edit in the middle had left, and back to the edited one each time."""
    asked = view.messages[NUM_TURNS // 2 * 2]
    goes: list[Go] = []
    for _ in _goes():
        _show(house, view.conversation.id, asked.id)
        last = house.chats.view(OWNER, view.conversation.id).messages[-1]
        goes.append(_measured(house, view, lambda last=last: house.regenerate(last.id, REPLY)))
        other = house.chats.select(OWNER, asked.id, 1).messages[-1]
        house.regenerate(other.id, REPLY)
    return goes


def _show(house: House, chat: str, message_id: str) -> None:
    """Switch versions until this message is the one that is shown."""
    place = next(
        position
        for position, message in enumerate(house.chats.view(OWNER, chat).messages)
        if message_id in house.chats.view(OWNER, chat).siblings[message.id].ids
    )
    while (shown := house.chats.view(OWNER, chat).messages[place]).id != message_id:
        house.chats.select(OWNER, shown.id, 1)


def _goes() -> range:
    """One more than counts: the first one warms up."""
    return range(NUM_GOES + 1)


def _measured(house: House, view: ChatView, verb: Callable[[], ChatView]) -> Go:
    before = bytes_written()
    after = verb()
    _settle(house, view.conversation.id)
    return Go(TurnStats.from_json(after.messages[-1].stats), bytes_written() - before)


def _settle(house: House, chat: str) -> None:
    assert house.saver is not None
    assert house.saver.wait_for(chat, 60), "the disk is too slow for this"


def _medians(goes: list[Go]) -> dict[str, float]:
    counted = goes[1:]
    return {
        "prefilled_tokens": statistics.median(go.stats.num_prefilled_tokens for go in counted),
        "disk_tokens": statistics.median(go.stats.num_disk_tokens for go in counted),
        "ttft_s": statistics.median(go.stats.ttft_s for go in counted),
        "bytes_written": statistics.median(go.num_bytes for go in counted),
    }

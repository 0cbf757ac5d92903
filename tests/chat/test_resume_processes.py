"""Law 3 across processes: a chat whose process ends and starts between every two turns goes on with exactly
the tokens, and from exactly the bytes, of a chat that was never interrupted.

Each turn happens in a process of its own, which opens the folder, sends one message, tells the reply's ids
and a hash over every byte that the next token depends on, closes and ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from chat.model import LoadedModel
from chat.settings import CacheSettings, SamplingSettings
from chat.stats import TurnStats
from tests.fork_server import ForkServer
from tests.house import OWNER, House

PLENTY = 10**9
QUESTIONS = (
    "What is the capital of France?",
    "And of Italy?",
    "Say one word.",
    "Which of the two cities is larger?",
    "Count from 1 to 5.",
    "What was my first question?",
)
GREEDY = {"temperature": 0.0, "max_new_tokens": 10}
SEEDED = {"temperature": 0.9, "top_k": 40, "max_new_tokens": 10, "seed": 11}

Turn = dict[str, Any]
"""What a process tells of one turn."""


def say(loaded: LoadedModel, *, folder: str, start: int, end: int, samplings: Sequence[Turn]) -> list[Turn]:
    """The turns `[start, end)` in this process."""
    told: list[Turn] = []
    with House(Path(folder), loaded, max_disk_bytes=PLENTY, settings=CacheSettings()) as house:
        for number in range(start, end):
            chat = next((each.id for each in house.chats.list(OWNER)), None)
            sampling = SamplingSettings(**samplings[number % len(samplings)])
            view = house.say(QUESTIONS[number], chat, sampling)
            assert view.messages[-1].error is None
            stats = TurnStats.from_json(view.messages[-1].stats)
            told.append(
                {
                    "ids": view.messages[-1].token_ids,
                    "held": rows_hash(house, view.conversation.id),
                    "num_disk_tokens": stats.num_disk_tokens,
                    "num_live_tokens": stats.num_live_tokens,
                    "reasons": dict(stats.reasons),
                }
            )
    return told


def rows_hash(house: House, chat: str) -> str:
    """Over names, shapes, types and bytes of all that the chat's live cache would go on from."""
    digest = hashlib.sha256(repr(house.kept()[chat].cache.token_ids).encode())
    for name, tensor in sorted(house.kept()[chat].cache.rows_out(0).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def straight(server: ForkServer, folder: Path, samplings: Sequence[Turn], num_turns: int) -> list[Turn]:
    return server.run(say, folder=str(folder), start=0, end=num_turns, samplings=samplings).result


def restarted(
    servers: Sequence[ForkServer], folder: Path, samplings: Sequence[Turn], num_turns: int
) -> list[Turn]:
    turns: list[Turn] = []
    for number in range(num_turns):
        server = servers[number % len(servers)]
        turns += server.run(say, folder=str(folder), start=number, end=number + 1, samplings=samplings).result
    return turns


def check_equal(one: list[Turn], other: list[Turn]) -> None:
    """The same tokens from the same bytes; what one had in memory the other had on disk; nothing was read
    again."""
    assert [turn["ids"] for turn in one] == [turn["ids"] for turn in other]
    assert [turn["held"] for turn in one] == [turn["held"] for turn in other]
    assert [turn["num_live_tokens"] for turn in one] == [turn["num_disk_tokens"] for turn in other]
    assert [turn["reasons"] for turn in one] == [turn["reasons"] for turn in other]
    assert {reason for turn in other for reason in turn["reasons"]} == {"new"}
    assert all(turn["num_disk_tokens"] for turn in other[1:])
    assert not any(turn["num_live_tokens"] for turn in other)


def two_folders(tmp_path: Path) -> tuple[Path, Path]:
    folders = tmp_path / "straight", tmp_path / "restarted"
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.fixture(scope="module")
def llamas() -> Generator[list[ForkServer]]:
    """Three interpreters, each with a hash seed of its own."""
    servers = [ForkServer("llama") for _ in range(3)]
    yield servers
    for server in servers:
        server.close()


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_six_turns_in_six_processes_are_six_turns_in_one(
    llamas: list[ForkServer], tmp_path: Path, sampling: Turn
) -> None:
    one, other = two_folders(tmp_path)
    check_equal(
        straight(llamas[0], one, [sampling], len(QUESTIONS)),
        restarted(llamas, other, [sampling], len(QUESTIONS)),
    )


def test_the_default_model_goes_on_in_new_processes_as_in_one(
    default_model_folder: Path, tmp_path: Path
) -> None:
    """Greedy and seeded turns in turn."""
    one, other = two_folders(tmp_path)
    with ForkServer(str(default_model_folder)) as server:
        first = straight(server, one, [GREEDY, SEEDED], len(QUESTIONS))
        check_equal(first, restarted([server], other, [GREEDY, SEEDED], len(QUESTIONS)))

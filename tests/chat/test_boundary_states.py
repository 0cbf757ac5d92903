"""States kept in memory: exact when they come back, stored once where they are the same, within budget."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch

from chat.boundary_states import BoundaryStates, rebuilt
from chat.kv_cache import KVCache
from chat.live_caches import LiveCache, LiveCaches
from chat.model import LoadedModel
from chat.settings import CacheSettings
from tests.house import House
from tests.tiny_models import WINDOW, tiny_model

KINDS = ("mistral", "gemma3_text", "lfm2", "qwen3_next", "falcon_h1", "mamba2", "gemma3n_text")
SETTINGS = CacheSettings(growth_step=16, prefill_chunk=8)


@lru_cache
def model(kind: str) -> LoadedModel:
    return tiny_model(kind)


def empty(kind: str) -> KVCache:
    return KVCache(model(kind).model, SETTINGS)


def ids(num_tokens: int, first: int = 20) -> list[int]:
    return [first + number % 150 for number in range(num_tokens)]


def fed(kind: str, token_ids: list[int]) -> KVCache:
    cache = empty(kind)
    cache.feed(token_ids)
    return cache


@pytest.mark.parametrize("num_tokens", [3, WINDOW - 1, WINDOW, 3 * WINDOW])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_went_back_is_the_cache_that_was_there(kind: str, num_tokens: int) -> None:
    """Byte for byte, and it goes on in the same way; the one that lent its rows is not changed."""
    states, cache = BoundaryStates(), fed(kind, ids(num_tokens))
    then = cache.rows_out(0)
    states.note("chat", "ada", cache)
    for _ in range(WINDOW + 2):
        cache.feed([5])
    now = cache.rows_out(0)
    boundary = states.best("ada", cache.settings, cache.token_ids, len(cache))
    assert boundary is not None
    back = rebuilt(boundary, cache if boundary.needs_rows else None, empty(kind))
    assert back.token_ids == tuple(ids(num_tokens))
    assert_same(back.rows_out(0), then)
    assert_same(cache.rows_out(0), now)
    straight = fed(kind, ids(num_tokens))
    assert torch.equal(back.feed([7]), straight.feed([7]))


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_windows_that_look_back_on_the_same_tokens_share_them(kind: str) -> None:
    """Four boundaries two tokens apart take little more than one window, and each comes back whole."""
    states, cache = BoundaryStates(), fed(kind, ids(2 * WINDOW))
    states.note("chat", "ada", cache)
    alone = states.nbytes
    kept = [cache.rows_out(len(cache))]
    for number in range(3):
        cache.feed([30 + number, 40])
        states.note("chat", "ada", cache)
        kept.append(cache.rows_out(len(cache)))
    assert states.nbytes < 1.5 * alone
    for number, expected in enumerate(kept):
        boundary = states.best("ada", cache.settings, cache.token_ids[: 2 * WINDOW + 2 * number], len(cache))
        assert boundary is not None
        for name, tensor in boundary.tensors().items():
            assert torch.equal(tensor, expected[name]), name


def test_two_answers_to_one_question_share_what_stands_before_them() -> None:
    states, cache = BoundaryStates(), fed("mistral", ids(2 * WINDOW))
    states.note("chat", "ada", cache)
    alone = states.nbytes
    for answer in (50, 60):
        boundary = states.best("ada", cache.settings, ids(2 * WINDOW), 0)
        assert boundary is not None
        other = rebuilt(boundary, None, empty("mistral"))
        other.feed([answer, answer])
        states.note("chat", "ada", other)
    assert states.nbytes < 1.5 * alone


def test_only_the_newest_few_of_a_chat_are_kept() -> None:
    states, cache = BoundaryStates(num_kept=2), fed("mamba2", ids(4))
    for _ in range(3):
        states.note("chat", "ada", cache)
        cache.feed([5])
    found = [states.best("ada", cache.settings, cache.token_ids[:length], 0) for length in (4, 5, 6)]
    lengths = [len(each) for each in found if each]
    assert lengths == [5, 6]


def test_nobody_goes_back_to_another_owner_s_boundary() -> None:
    """Law 6."""
    states, cache = BoundaryStates(), fed("mamba2", ids(4))
    states.note("chat", "ada", cache)
    assert states.best("ben", cache.settings, cache.token_ids, 4) is None


def test_rows_that_are_missing_are_not_guessed() -> None:
    """A state is of no use without the rows of the layers beside it."""
    states, cache = BoundaryStates(), fed("gemma3_text", ids(20))
    states.note("chat", "ada", cache)
    assert states.best("ada", cache.settings, ids(30), 19) is None
    assert states.best("ada", cache.settings, ids(30), 20) is not None


def test_states_count_against_the_budget_and_go_before_it_is_exceeded() -> None:
    cache = fed("mistral", ids(2 * WINDOW))
    live = LiveCaches(3 * cache.nbytes)
    for number in range(20):
        live.note_boundary("chat", "ada", cache)
        assert live.nbytes + cache.nbytes <= live.max_bytes
        cache.feed([number, *ids(WINDOW)])
    assert live.boundary("ada", cache.settings, cache.token_ids) is not None
    live.keep("chat", LiveCache("ada", cache, ""))
    live.make_room(live.max_bytes)
    assert (live.nbytes, len(live)) == (0, 0)


def test_a_deleted_chat_leaves_no_state(tmp_path: Path) -> None:
    with House(tmp_path, model("mamba2")) as house:
        view = house.say("Hi")
        house.live.keep_paths(view.conversation.id, [house.prompt(view, upto=1).token_ids])
        assert house.live.boundary("ada", house.settings, house.prompt(view).token_ids) is not None
        house.chats.delete("ada", view.conversation.id)
        assert house.live.nbytes == 0

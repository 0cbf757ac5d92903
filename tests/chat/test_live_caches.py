"""Live caches stay within their budget, belong to one owner each, and say why they are gone."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat.errors import MemoryLimit
from chat.kv_cache import KVCache
from chat.live_caches import LiveCache, LiveCaches
from chat.settings import CacheSettings
from tests.chat.passes import llama
from tests.tiny_models import tiny_model

STEP = 16
SETTINGS = CacheSettings(growth_step=STEP)
STEP_BYTES = STEP * llama().kv_bytes_per_token


def cache(num_tokens: int = 1, first: int = 20) -> KVCache:
    kept = KVCache(llama().model, SETTINGS)
    kept.feed([*range(first, first + num_tokens)])
    return kept


def live(owner: str = "ada", num_tokens: int = 1, first: int = 20) -> LiveCache:
    return LiveCache(owner, cache(num_tokens, first), "")


def room_for(num_steps: int) -> LiveCaches:
    return LiveCaches(num_steps * STEP_BYTES)


def test_a_cache_is_kept_or_lent_and_never_both() -> None:
    """C45."""
    caches = room_for(4)
    caches.keep("a", live())
    lent = caches.take("a")
    assert lent is not None
    assert caches.take("a") is None
    assert len(caches) == caches.nbytes == 0
    caches.keep("a", lent)
    assert caches.take("a") is lent


def test_the_least_recently_used_goes_first_and_says_why() -> None:
    """C30."""
    caches = room_for(3)
    for name in "abc":
        caches.keep(name, live())
    lent = caches.take("a")
    assert lent is not None
    caches.keep("a", lent)
    caches.keep("d", live())
    assert caches.take("b") is None
    assert caches.why_missing("b") == "evicted"
    assert all(caches.take(name) is not None for name in "acd")
    assert caches.why_missing("a") is None


def test_forty_chats_stay_within_the_budget() -> None:
    """C30."""
    caches = room_for(5)
    for number in range(40):
        caches.keep(f"chat {number}", live(num_tokens=1 + number % 20))
        assert caches.nbytes <= caches.max_bytes
    assert len(caches) >= 2


def test_an_evicted_cache_frees_its_memory() -> None:
    """C30: no list of the past keeps the tensors alive."""
    caches = room_for(1)
    first = live()
    ref = weakref.ref(first.cache)
    caches.keep("a", first)
    del first
    caches.keep("b", live())
    gc.collect()
    assert ref() is None


def test_a_cache_larger_than_the_whole_budget_is_not_kept_and_harms_no_other() -> None:
    caches = room_for(2)
    caches.keep("small", live())
    caches.keep("large", live(num_tokens=3 * STEP))
    assert caches.why_missing("large") == "evicted"
    assert caches.take("large") is None
    assert caches.take("small") is not None


def test_what_would_not_fit_even_alone_is_refused_before_anything_is_evicted() -> None:
    caches = room_for(2)
    caches.keep("a", live())
    caches.keep("b", live())
    with pytest.raises(MemoryLimit, match="max-live-memory") as refused:
        caches.make_room(2 * STEP_BYTES + 1)
    assert "kept" in str(refused.value)
    assert len(caches) == 2


def test_room_is_made_for_exactly_what_is_asked() -> None:
    caches = room_for(3)
    for name in "abc":
        caches.keep(name, live())
    caches.make_room(STEP_BYTES)
    assert len(caches) == 2
    caches.make_room(STEP_BYTES)
    assert len(caches) == 2


def test_a_budget_of_nothing_keeps_nothing_and_still_answers() -> None:
    caches = LiveCaches(0)
    caches.keep("a", live())
    assert len(caches) == 0
    with pytest.raises(MemoryLimit):
        caches.make_room(1)


def test_a_deleted_chat_leaves_neither_a_cache_nor_a_reason() -> None:
    """C30."""
    caches = room_for(2)
    kept = live()
    ref = weakref.ref(kept.cache)
    caches.keep("a", kept)
    caches.forget("a")
    del kept
    gc.collect()
    assert ref() is None
    assert caches.why_missing("a") is None


def test_a_failed_chat_remembers_that_it_failed_until_it_has_a_cache_again() -> None:
    caches = room_for(2)
    caches.keep("a", live())
    caches.forget("a", "failed")
    assert caches.why_missing("a") == "failed"
    caches.keep("a", live())
    assert caches.why_missing("a") is None


def test_prefixes_are_found_within_an_owner_and_never_across_owners() -> None:
    """C45, law 6: not even for exactly the same ids."""
    caches = room_for(9)
    caches.keep("a", live("ada", 10))
    caches.keep("b", live("ben", 30))
    ids = range(20, 60)
    found, length = caches.longest_prefix("ada", SETTINGS, ids)
    assert found is not None
    assert (len(found), length) == (10, 10)
    assert caches.longest_prefix("eve", SETTINGS, ids) == (None, 0)
    assert caches.longest_prefix("", SETTINGS, ids) == (None, 0)


def test_the_longest_common_beginning_wins_and_none_is_none() -> None:
    caches = room_for(9)
    caches.keep("short", live(num_tokens=5))
    caches.keep("long", live(num_tokens=25))
    caches.keep("other", live(num_tokens=30, first=100))
    assert caches.longest_prefix("ada", SETTINGS, range(20, 40))[1] == 20
    assert caches.longest_prefix("ada", SETTINGS, range(70, 90)) == (None, 0)
    assert caches.longest_prefix("ada", SETTINGS, []) == (None, 0)


def test_a_cache_whose_rows_cannot_be_copied_is_not_offered() -> None:
    loaded = tiny_model("lfm2")
    hybrid = KVCache(loaded.model, CacheSettings())
    hybrid.feed(range(20, 40))
    caches = LiveCaches(10**9)
    caches.keep("a", LiveCache("ada", hybrid, ""))
    assert caches.longest_prefix("ada", hybrid.settings, range(20, 40)) == (None, 0)


def test_a_cache_of_another_kind_is_not_offered() -> None:
    packed = KVCache(llama().model, CacheSettings(growth_step=STEP, kind="native8"))
    packed.feed(range(20, 40))
    caches = room_for(9)
    caches.keep("packed", LiveCache("ada", packed, ""))
    caches.keep("dense", live(num_tokens=5))
    assert caches.longest_prefix("ada", SETTINGS, range(20, 40))[1] == 5
    assert caches.longest_prefix("ada", packed.settings, range(20, 40))[1] == 20


NAMES = st.sampled_from("abcd")
ACTIONS = st.one_of(
    st.tuples(st.just("keep"), NAMES, st.integers(1, 5)),
    st.tuples(st.just("take"), NAMES, st.just(0)),
    st.tuples(st.just("forget"), NAMES, st.just(0)),
    st.tuples(st.just("room"), NAMES, st.integers(0, 6)),
)
SIZES = {steps: cache(steps * STEP) for steps in range(1, 6)}


@given(st.lists(ACTIONS, max_size=30))
@settings(max_examples=80)
def test_whatever_happens_the_budget_holds_and_only_the_oldest_go(
    actions: list[tuple[str, str, int]],
) -> None:
    """C30, against a plain list, oldest first."""
    caches, model = room_for(5), list[tuple[str, int]]()

    def evict(steps: int) -> bool:
        if steps > 5:
            return False
        while sum(size for _, size in model) + steps > 5:
            model.pop(0)
        return True

    for verb, name, steps in actions:
        if verb == "room":
            if evict(steps):
                caches.make_room(steps * STEP_BYTES)
            continue
        model[:] = [kept for kept in model if kept[0] != name]
        if verb == "keep":
            caches.keep(name, LiveCache("ada", SIZES[steps], ""))
            evict(steps)
            model.append((name, steps))
        elif verb == "take":
            caches.take(name)
        else:
            caches.forget(name)
        assert caches.nbytes == sum(size for _, size in model) * STEP_BYTES <= caches.max_bytes
        assert len(caches) == len(model)
    assert [name for name in "abcd" if caches.take(name)] == sorted(name for name, _ in model)

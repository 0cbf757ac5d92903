"""Chats with offloaded caches and caches of fixed size: rows are shared with the default kind, and room ends.

On the CPU, where people are not offered these kinds; what keeps them from it is switched off here.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from chat.chats import ChatView
from chat.errors import KindUnavailable
from chat.kind_ladder import next_smaller
from chat.kv_cache import KVCache
from chat.layers import kinds as kinds_module
from chat.settings import CacheKind, CacheSettings, SamplingSettings
from chat.stats import TurnStats
from tests.chat.passes import Passes, dictated, llama
from tests.chat.test_cache_tree import nodes_of, only_chat
from tests.house import OWNER, House, end_view
from tests.tiny_models import tiny_model

DISK = 10**9
SHORT = SamplingSettings(temperature=0, max_new_tokens=6)
ORDER: tuple[CacheKind, ...] = ("offloaded", "static", "offloaded_static", "dynamic")
ROOM = 512


def settings(kind: CacheKind = "dynamic", room: int = ROOM) -> CacheSettings:
    return CacheSettings(growth_step=16, prefill_chunk=16, kind=kind, static_tokens=room)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds that need CUDA can be chosen here."""
    monkeypatch.setattr(kinds_module, "NEEDS_CUDA", {})


@pytest.fixture
def house(tmp_path: Path, anywhere: None) -> Generator[House]:
    with House(tmp_path, llama(), max_disk_bytes=DISK, settings=settings()) as house:
        yield house


def stats(view: ChatView) -> TurnStats:
    return TurnStats.from_json(cast("Any", view.messages[-1].stats))


def go_on(house: House, chat: str, text: str = "And now?") -> TurnStats:
    """ORACLE too: dense is dense."""
    view = house.say(text, chat)
    house.check(chat)
    return stats(view)


def num_saved_rows(house: House) -> int:
    assert house.saver is not None
    assert house.segments is not None
    house.saver.wait_for(next(iter(house.kept())), 60)
    return sum(node.segment.num_tokens for node in house.segments.list(OWNER))


# rows are shared


def test_between_dense_kinds_nothing_is_read_again_nor_loaded_nor_saved_twice(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 1, law 5: a change moves rows in memory, and that is all."""
    chat = house.say("Hello, a dog and you").conversation.id
    rows_out, starts = KVCache.rows_out, list[int]()

    def noted(cache: KVCache, start: int) -> dict[str, torch.Tensor]:
        starts.append(start)
        return rows_out(cache, start)

    monkeypatch.setattr(KVCache, "rows_out", noted)
    for kind in ORDER:
        held = len(house.kept()[chat].cache)
        starts.clear()
        house.chats.set_cache_kind(OWNER, chat, kind)
        told = go_on(house, chat)
        assert (told.num_live_tokens, told.num_disk_tokens, told.num_read_again) == (held, 0, 0)
        assert (told.cache_kind, told.changed_setting) == (kind, "")
        assert house.kept()[chat].cache.settings.kind == kind
        assert min(starts) == held, "only what is new goes to the disk"
    assert num_saved_rows(house) == len(house.kept()[chat].cache), "every token once"


def test_after_a_restart_each_dense_kind_goes_on_with_what_another_saved(house: House) -> None:
    """Law 1 and law 3."""
    chat = house.say("Hello, a dog and you").conversation.id
    for kind in ORDER:
        held = house.kept()[chat].cache
        rows = held.rows_out(0)
        house.restart()
        house.chats.set_cache_kind(OWNER, chat, kind)
        house.chats.warm(OWNER, chat)
        assert house.worker.wait_until_idle(60)
        warmed = house.kept()[chat].cache
        assert (warmed.token_ids, warmed.settings.kind) == (held.token_ids, kind)
        for name, part in warmed.rows_out(0).items():
            assert torch.equal(part, rows[name])
        told = go_on(house, chat)
        assert (told.num_disk_tokens, told.num_read_again, told.changed_setting) == (len(held), 0, "")


@pytest.mark.parametrize("name", ["gemma3_text", "lfm2", "falcon_h1"])
def test_models_with_states_go_back_to_boundaries_of_any_dense_kind(
    tmp_path: Path, name: str, anywhere: None
) -> None:
    """The states that were kept under one kind belong to the rows of the next one too."""
    whole_characters = dictated(*[40] * 999)
    with House(tmp_path, tiny_model(name), settings=settings()) as house, whole_characters:
        chat = house.say("Hello, a dog and you").conversation.id
        view = house.say("And more of it", chat)
        for kind in ORDER:
            house.chats.set_cache_kind(OWNER, chat, kind)
            view = house.regenerate(view.messages[-1].id)
            assert dict(stats(view).reasons) == {"boundary": 1}
            house.check_invariant(chat)


def test_a_beginning_is_copied_from_a_chat_of_any_dense_kind(house: House) -> None:
    text = "The same long beginning of several chats, word for word"
    first = house.say(text)
    num_shared = len(house.prompt(first, upto=1)) - 10
    for kind in ORDER:
        chat = house.chats.create(OWNER).id
        house.chats.set_cache_kind(OWNER, chat, kind)
        told = go_on(house, chat, text + "!" * (1 + ORDER.index(kind)))
        assert told.num_live_tokens >= num_shared
        assert house.kept()[chat].cache.settings.kind == kind
    packed = house.chats.create(OWNER).id
    house.chats.set_cache_kind(OWNER, packed, "native8")
    assert stats(house.say(text, packed)).num_live_tokens == 0


@pytest.mark.parametrize("kind", ORDER[:3])
def test_dense_rows_are_packed_from_wherever_they_are_and_what_is_lost_stays_lost(
    house: House, kind: CacheKind
) -> None:
    chat = house.chats.create(OWNER).id
    house.chats.set_cache_kind(OWNER, chat, kind)
    house.say("Hello, a dog and you", chat)
    house.chats.set_cache_kind(OWNER, chat, "native8")
    assert stats(house.say("And more", chat)).num_read_again == 0
    house.chats.set_cache_kind(OWNER, chat, kind)
    told = stats(house.say("And back", chat))
    assert told.num_disk_tokens > 0, "the dense rows are still there"
    assert told.reasons["fingerprint"] > 0
    assert told.changed_setting == f"cache kind was native8, is {kind}"


def test_what_was_evicted_is_not_blamed_on_a_change_that_loses_nothing(
    tmp_path: Path, anywhere: None
) -> None:
    """Law 4: the reason is the true one."""
    with House(tmp_path, llama(), settings=settings()) as house:
        chat = house.say("Hello").conversation.id
        house.restart()
        house.chats.set_cache_kind(OWNER, chat, "static")
        told = go_on(house, chat)
        assert set(told.reasons) == {"off", "new"}
        assert told.changed_setting == ""


def test_the_menu_tells_no_cost_and_measures_nothing_of_dense_kinds(house: House) -> None:
    chat = house.say("Hello, a dog and you").conversation.id
    menu = house.chats.kind_menu(OWNER, chat)
    assert menu is not None
    found = {each.kind: each for each in menu.kinds}
    for kind in ORDER[:3]:
        cost = found[kind].cost
        assert cost is not None
        assert (cost.num_tokens, found[kind].is_exact) == (0, True)
    assert not found["native8"].is_exact
    house.chats.measure_kinds()
    assert house.worker.wait_until_idle(120)
    menu = house.chats.kind_menu(OWNER, chat)
    assert menu is not None
    assert {each.kind for each in menu.kinds if each.is_exact} == set(ORDER)
    assert all(
        (each.quality is None) == each.is_exact for each in menu.kinds if each.availability.is_available
    )


def test_saved_rows_are_shown_as_in_memory_whichever_dense_kind_holds_them(house: House) -> None:
    chat = house.say("Hello there").conversation.id
    house.chats.set_cache_kind(OWNER, chat, "offloaded")
    house.say("And more", chat)
    num_saved = num_saved_rows(house)
    nodes = nodes_of(only_chat(house))
    assert {node.kind for node in nodes} == {"dynamic"}
    assert sum(node.num_live_tokens for node in nodes) == sum(node.num_tokens for node in nodes) == num_saved


def test_bytes_in_the_computers_memory_are_told_apart(house: House) -> None:
    chat = house.say("Hello there").conversation.id
    assert house.live.host_bytes == 0 < house.live.nbytes
    house.chats.set_cache_kind(OWNER, chat, "offloaded")
    house.say("And more", chat)
    assert house.live.host_bytes == house.live.nbytes


# where there is no such device


def test_a_chat_that_was_offloaded_elsewhere_goes_on_without_and_reads_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C34: a setting from another machine costs a sentence."""
    with House(tmp_path, llama(), max_disk_bytes=DISK, settings=settings("offloaded")) as house:
        chat = house.say("Hello, a dog and you").conversation.id
        house.store.set_cache_kind(OWNER, chat, "offloaded")
    with House(tmp_path, llama(), max_disk_bytes=DISK) as house:
        told = go_on(house, chat)
        assert (told.cache_kind, told.num_read_again) == ("dynamic", 0)
        assert "CUDA" in told.note
        with pytest.raises(KindUnavailable, match="nothing was changed"):
            house.chats.set_cache_kind(OWNER, chat, "static")


# room of a fixed size


@pytest.mark.parametrize("kind", ["static", "offloaded_static"])
def test_a_chat_that_fills_its_room_stops_there_and_goes_on_in_another_kind(
    tmp_path: Path, kind: CacheKind, anywhere: None
) -> None:
    """C35: stopped at the last token there is room for, told in one sentence, with nothing lost."""
    with House(tmp_path, llama(), max_disk_bytes=DISK, settings=settings(kind, room=70)) as house:
        view = house.say("Hi", sampling=SamplingSettings(temperature=0, max_new_tokens=200))
        chat, reply = view.conversation.id, view.messages[-1]
        assert (reply.status, reply.finish_reason) == ("stopped", "memory")
        assert len(house.kept()[chat].cache) == 70
        house.check(chat)
        again = house.regenerate(reply.id, SamplingSettings(temperature=0, max_new_tokens=200))
        assert again.messages[-1].token_ids == reply.token_ids
        ended = end_view(house.start("More of it", chat, SHORT))
        assert ended.state == "failed"
        assert "--static-tokens" in str(ended.error)
        assert "kept" in str(ended.error)
        house.check_invariant(chat)
        house.chats.set_cache_kind(OWNER, chat, "dynamic")
        assert go_on(house, chat).num_read_again == 0


def test_more_saved_rows_than_there_is_room_for_are_left_where_they_are(
    tmp_path: Path, anywhere: None
) -> None:
    """C35: a saved cache of 100 tokens and room for 60."""
    with House(tmp_path, llama(), max_disk_bytes=DISK, settings=settings()) as house:
        chat = house.say("word " * 20).conversation.id
        assert len(house.kept()[chat].cache) > 60
    with House(tmp_path, llama(), max_disk_bytes=DISK, settings=settings("static", room=60)) as house:
        house.chats.warm(OWNER, chat)
        assert house.worker.wait_until_idle(60)
        assert chat not in house.kept()
        ended = end_view(house.start("More?", chat, SHORT))
        assert "room for 60" in str(ended.error)
        assert go_on(house, house.say("Hi").conversation.id).num_read_again == 0
        house.chats.set_cache_kind(OWNER, chat, "dynamic")
        assert go_on(house, chat).num_read_again == 0


def test_a_chat_too_long_for_a_fixed_room_keeps_the_beginning_that_an_edit_needs(
    tmp_path: Path, anywhere: None
) -> None:
    """Law 1: nothing is on disk, so what is given up would be read again; and what is told before holds."""
    with House(tmp_path, llama(), settings=settings(room=70)) as house:
        chat = house.say("Hello, a dog and you").conversation.id
        view = house.say("word " * 40, chat)
        edited = view.messages[2].id
        assert len(house.kept()[chat].cache) > 70
        house.chats.set_cache_kind(OWNER, chat, "static")
        cost = house.chats.cost_of(OWNER, "edit", edited, "Hi")
        view = house.edit(edited, "Hi", SHORT)
        house.check(chat)
        told = stats(view)
        assert cost is not None
        assert (told.num_prefilled_tokens, dict(told.reasons)) == (
            cost.num_tokens,
            {"edited": cost.num_tokens},
        )
        assert (told.cache_kind, house.kept()[chat].cache.settings.kind) == ("static", "static")


def test_a_budget_too_small_for_the_room_is_told_before_anything_is_allocated(
    tmp_path: Path, anywhere: None
) -> None:
    budget = 100 * llama().kv_bytes_per_token
    with House(tmp_path, llama(), max_live_bytes=budget, settings=settings("static", room=101)) as house:
        ended = end_view(house.start("Hi", None, SHORT))
        assert "--max-live-memory" in str(ended.error)
        assert house.live.nbytes == 0


# the ladder


@pytest.mark.parametrize(
    ("kind", "may_offload", "expected"),
    [
        ("dynamic", True, "native8"),
        ("native8", True, "native4"),
        ("native4", True, "offloaded"),
        ("native4", False, None),
        ("hqq2", True, "offloaded"),
        ("offloaded", True, None),
        ("static", False, "dynamic"),
        ("offloaded_static", False, "offloaded"),
    ],
)
def test_every_step_of_the_ladder_goes_down(
    kind: CacheKind, may_offload: bool, expected: CacheKind | None
) -> None:
    sizes = dict.fromkeys(kinds_module.DENSE, 32) | {"native8": 17, "native4": 9, "hqq2": 5}
    assert next_smaller(kind, cast("Any", sizes), may_offload=may_offload) == expected


def test_memory_of_the_device_that_runs_out_at_the_foot_ends_in_the_computers(house: House) -> None:
    house.chats.allow_smaller_caches(OWNER, allowed=True)
    chat = house.chats.create(OWNER).id
    house.chats.set_cache_kind(OWNER, chat, "native4")
    with Passes(house.loaded.model) as passes:
        passes.fail(torch.OutOfMemoryError("CUDA out of memory"), 2)
        view = house.say("word " * 8, chat, SHORT)
    told = stats(view)
    assert view.messages[-1].error is None
    assert told.cache_kind == view.conversation.cache_kind == "offloaded"
    assert "the computer's memory" in told.note
    house.check_invariant(chat)


def test_a_budget_that_runs_out_does_not_because_that_takes_more_of_it(
    tmp_path: Path, anywhere: None
) -> None:
    budget = 32 * llama().kv_bytes_per_token
    with House(tmp_path, llama(), max_live_bytes=budget, settings=settings("native4")) as house:
        house.chats.allow_smaller_caches(OWNER, allowed=True)
        long = SamplingSettings(temperature=0, max_new_tokens=400)
        view = house.say("Hi", None, long)
        assert (view.messages[-1].status, view.messages[-1].finish_reason) == ("stopped", "memory")
        assert view.conversation.cache_kind is None


def test_room_that_is_too_large_for_the_budget_is_taken_step_by_step(tmp_path: Path, anywhere: None) -> None:
    budget = 100 * llama().kv_bytes_per_token
    with House(tmp_path, llama(), max_live_bytes=budget, settings=settings("static", room=101)) as house:
        house.chats.allow_smaller_caches(OWNER, allowed=True)
        view = house.say("Hi", None, SHORT)
        assert stats(view).cache_kind == "dynamic"
        house.check(view.conversation.id)

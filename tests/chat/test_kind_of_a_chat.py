"""A chat's kind of cache is chosen, changed in the middle, survives restarts, and shrinks where it may.

INVARIANT and stats that account for every token after every turn. ORACLE for dense caches that were never
anything else: what a packed cache answers may differ from what a dense one answers.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any, cast, get_args
from unittest.mock import ANY

import pytest
import torch

from cache_store.errors import NotFound
from chat.chat_view import Cost
from chat.chats import ChatView
from chat.conversion import converted
from chat.errors import KindUnavailable
from chat.layers import kinds as kinds_module
from chat.live_caches import LiveCache
from chat.model import LoadedModel
from chat.settings import CacheKind, CacheSettings, SamplingSettings
from chat.stats import TurnStats
from tests.chat.passes import Passes, dictated, llama
from tests.house import OWNER, House, end_view
from tests.tiny_models import tiny_model

HERE: tuple[CacheKind, ...] = ("dynamic", "native8", "native4", "fp8")
"""One of each family that needs no more packages."""

DISK = 10**9
SHORT = SamplingSettings(temperature=0, max_new_tokens=6)


@pytest.fixture
def house(tmp_path: Path) -> Generator[House]:
    with House(tmp_path, llama(), max_disk_bytes=DISK) as house:
        yield house


def stats(view: ChatView) -> TurnStats:
    """Building it checks that every prompt token is accounted for exactly once."""
    return TurnStats.from_json(cast("Any", view.messages[-1].stats))


def talk(house: House, num_turns: int = 2, kind: CacheKind | None = None) -> str:
    """A chat of a few turns; its kind is chosen before it begins."""
    chat = house.chats.create(OWNER).id
    if kind:
        house.chats.set_cache_kind(OWNER, chat, kind)
    for number in range(num_turns):
        assert stats(house.say(f"Turn {number}: a dog and you", chat)).num_read_again == 0
    return chat


def kind_of(house: House, chat: str) -> str:
    live = house.cache_of(chat)
    assert live is not None
    return live.cache.settings.kind


def go_on(house: House, chat: str, text: str = "And now?") -> TurnStats:
    view = house.say(text, chat)
    assert view.messages[-1].error is None
    house.check_invariant(chat)
    return stats(view)


# changing the kind


@pytest.mark.parametrize("kind", HERE[1:])
def test_dense_rows_are_converted_and_nothing_is_read_again(house: House, kind: CacheKind) -> None:
    chat = talk(house)
    held = len(house.kept()[chat].cache)
    house.chats.set_cache_kind(OWNER, chat, kind)
    told = go_on(house, chat)
    assert (told.num_live_tokens, told.num_read_again, told.cache_kind) == (held, 0, kind)
    assert kind_of(house, chat) == kind
    house.restart()
    again = go_on(house, chat)
    assert again.num_read_again == 0
    assert again.num_disk_tokens > held
    assert kind_of(house, chat) == kind


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_dense_rows_on_disk_are_converted_when_nobody_warmed_the_chat(tmp_path: Path, name: str) -> None:
    """Law 1, also behind what was said in the other kind before; and what the menu says is what happens."""
    whole_characters = dictated(*[40] * 999)
    with House(tmp_path, tiny_model(name), max_disk_bytes=DISK) as house, whole_characters:
        chat = talk(house)
        held = len(house.kept()[chat].cache)
        house.restart()
        house.chats.set_cache_kind(OWNER, chat, "native4")
        menu = house.chats.kind_menu(OWNER, chat)
        assert menu is not None
        cost = next(each.cost for each in menu.kinds if each.kind == "native8")
        assert cost is not None
        assert cost.num_tokens == 0
        house.chats.set_cache_kind(OWNER, chat, "native8")
        told = go_on(house, chat)
        assert (told.num_disk_tokens, told.num_live_tokens, told.num_read_again) == (held, 0, 0)
        rows = house.kept()[chat].cache.rows_out(0)
        house.restart()
        house.chats.warm(OWNER, chat)
        assert house.worker.wait_until_idle(60)
        for each, tensor in house.kept()[chat].cache.rows_out(0).items():
            assert torch.equal(tensor, rows[each]), each
        assert go_on(house, chat).num_read_again == 0


def test_dense_rows_on_disk_are_converted_also_while_another_branch_is_in_memory(house: House) -> None:
    """Law 3: what a restart would find is found without one, and costs what was told."""
    view = house.say("a dog and you " * 3)
    chat = view.conversation.id
    edited = house.edit(view.messages[0].id, "Hi")
    house.chats.select(OWNER, edited.messages[0].id, 1)
    house.chats.set_cache_kind(OWNER, chat, "native8")
    assert house.chats.cost_of(OWNER, "regenerate", view.messages[1].id) == Cost(1, ANY)
    told = go_on(house, chat)
    assert (told.num_disk_tokens, told.num_read_again) == (stats(view).num_cached_tokens, 0)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "falcon_h1"])
def test_a_regenerated_reply_after_a_change_reads_nothing_again_whatever_the_model_is_made_of(
    tmp_path: Path, name: str
) -> None:
    """A state at the end of the old reply is of no use for it; the disk has the one before."""
    with House(tmp_path, tiny_model(name), max_disk_bytes=DISK) as house, dictated(*[40] * 99):
        view = house.say("Hello, a dog and you", None, SHORT)
        house.chats.set_cache_kind(OWNER, view.conversation.id, "native8")
        told = stats(house.regenerate(view.messages[1].id, SHORT))
        assert (told.num_prefilled_tokens, dict(told.reasons)) == (1, {"boundary": 1})


def test_without_room_for_dense_rows_from_the_disk_the_text_is_read_again(house: House) -> None:
    chat = talk(house, num_turns=3)
    house.restart()
    house.live.max_bytes = 100 * house.loaded.kv_bytes_per_token
    house.chats.set_cache_kind(OWNER, chat, "native4")
    told = go_on(house, chat)
    assert told.num_disk_tokens == 0
    assert told.reasons["fingerprint"] > 0


@pytest.mark.parametrize("old", HERE[1:])
@pytest.mark.parametrize("new", HERE)
def test_any_other_change_reads_what_the_disk_does_not_have_and_says_why(
    house: House, old: CacheKind, new: CacheKind
) -> None:
    if old == new:
        return
    chat = talk(house, kind=old)
    held = len(house.kept()[chat].cache)
    house.chats.set_cache_kind(OWNER, chat, new)
    told = go_on(house, chat)
    assert (told.num_live_tokens, told.num_disk_tokens, told.reasons["fingerprint"]) == (0, 0, held)
    assert told.changed_setting == f"cache kind was {old}, is {new}"
    house.chats.set_cache_kind(OWNER, chat, old)
    back = go_on(house, chat)
    if new == "dynamic":
        assert back.num_read_again == 0
        assert back.num_live_tokens + back.num_disk_tokens > held
    else:
        assert back.num_disk_tokens == held, "its rows stayed on disk"
        assert back.reasons["fingerprint"] > 0


@pytest.mark.parametrize("restarted", [False, True])
def test_back_at_an_earlier_kind_its_rows_come_from_the_disk(house: House, restarted: bool) -> None:
    """Dense, packed, dense again: only what was said in between is read again."""
    chat = talk(house)
    num_dense = len(house.kept()[chat].cache)
    house.chats.set_cache_kind(OWNER, chat, "native8")
    go_on(house, chat)
    held = len(house.kept()[chat].cache)
    house.chats.set_cache_kind(OWNER, chat, "dynamic")
    if restarted:
        house.restart()
    told = go_on(house, chat)
    assert (told.num_disk_tokens, told.num_live_tokens) == (num_dense, 0)
    assert dict(told.reasons)["fingerprint"] == held - num_dense
    assert told.changed_setting == "cache kind was native8, is dynamic"
    house.check(chat)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2", "falcon_h1"])
def test_converted_rows_go_on_where_the_disk_ends_so_that_a_restart_changes_nothing(
    tmp_path: Path, name: str
) -> None:
    """Law 3: packed, dense, packed again; the live cache holds byte for byte what is on disk."""
    whole_characters = dictated(*[40] * 999)
    with House(tmp_path, tiny_model(name), max_disk_bytes=DISK) as house, whole_characters:
        _change_there_and_back(house)


def _change_there_and_back(house: House) -> None:
    chat = talk(house, kind="native8")
    house.chats.set_cache_kind(OWNER, chat, "dynamic")
    go_on(house, chat)
    house.chats.set_cache_kind(OWNER, chat, "native8")
    told = go_on(house, chat)
    assert told.num_disk_tokens > 0
    assert told.num_read_again == 0
    before = house.kept()[chat].cache
    rows, ids = before.rows_out(0), before.token_ids
    house.restart()
    house.chats.warm(OWNER, chat)
    assert house.worker.wait_until_idle(60)
    after = house.kept()[chat].cache
    assert after.token_ids == ids
    for name, tensor in after.rows_out(0).items():
        assert torch.equal(tensor, rows[name]), name


def test_a_conversion_takes_little_more_than_the_larger_cache(house: House) -> None:
    """Law 5: a budget with room for the dense cache and not for both."""
    chat = talk(house, num_turns=3)
    house.live.max_bytes = house.kept()[chat].cache.nbytes * 6 // 5
    house.chats.set_cache_kind(OWNER, chat, "native8")
    assert go_on(house, chat).num_read_again == 0


def test_without_room_for_a_conversion_the_text_is_read_again(house: House) -> None:
    chat = talk(house, num_turns=3)
    house.live.max_bytes = house.kept()[chat].cache.nbytes
    house.chats.set_cache_kind(OWNER, chat, "native8")
    told = go_on(house, chat)
    assert told.reasons["fingerprint"] > 0
    assert kind_of(house, chat) == "native8"


@pytest.mark.parametrize("name", ["gemma3_text", "lfm2", "falcon_h1"])
def test_layers_beside_the_rows_move_along(tmp_path: Path, name: str) -> None:
    """Windows, convolutions and recurrences have no packed form; past the window, too."""
    whole_characters = dictated(*[40] * 999)  # so that no reply has to be shortened at its end
    with House(tmp_path, tiny_model(name), max_disk_bytes=DISK) as house, whole_characters:
        chat = talk(house, num_turns=3)
        house.chats.set_cache_kind(OWNER, chat, "native8")
        assert go_on(house, chat).num_read_again == 0
        view = house.chats.view(OWNER, chat)
        assert stats(house.regenerate(view.messages[-1].id)).num_read_again == 0
        house.restart()
        assert go_on(house, chat).num_read_again == 0


@pytest.mark.parametrize("name", ["gemma3_text", "falcon_h1"])
def test_packed_rows_on_disk_that_go_on_behind_a_dense_cache_get_its_states(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has all rows of what is packed anew, but a state only at an end further on."""
    found = dict[str, torch.Tensor]()

    def noted(*args: Any) -> LiveCache | None:
        live = converted(*args)
        assert live is not None
        found.update(live.cache.rows_out(len(live.cache)))
        return live

    with House(tmp_path, tiny_model(name), max_disk_bytes=DISK) as house, dictated(*[40] * 99):
        view = house.say("Hello, a dog and you", None, SHORT)
        chat, first = view.conversation.id, view.messages[1].id
        house.chats.set_cache_kind(OWNER, chat, "native8")
        go_on(house, chat, "More")
        house.chats.set_cache_kind(OWNER, chat, "dynamic")
        house.regenerate(first, SHORT)
        held = house.kept()[chat].cache
        states = {key: part for key, part in held.rows_out(0).items() if key.startswith("state")}
        house.chats.set_cache_kind(OWNER, chat, "native8")
        monkeypatch.setattr("chat.lending.converted", noted)
        assert go_on(house, chat).num_read_again == 0
        assert states
        assert all(torch.equal(found[key], state) for key, state in states.items())


def test_beginnings_are_shared_between_chats_of_one_kind_only(house: House) -> None:
    text = "The same long beginning of several chats, word for word"
    house.say(text)
    packed = house.chats.create(OWNER).id
    house.chats.set_cache_kind(OWNER, packed, "native8")
    assert stats(house.say(text, packed)).num_live_tokens == 0
    other = house.chats.create(OWNER).id
    house.chats.set_cache_kind(OWNER, other, "native8")
    assert stats(house.say(text + "!", other)).num_live_tokens > 10
    assert stats(house.say(text + "?")).num_live_tokens > 10


def test_a_fork_keeps_the_kind_and_a_new_chat_has_the_hosts(tmp_path: Path) -> None:
    settings = CacheSettings(growth_step=16, prefill_chunk=16, kind="native4")
    with House(tmp_path, llama(), settings=settings, max_disk_bytes=DISK) as house:
        chat = talk(house)
        assert kind_of(house, chat) == "native4"
        house.chats.set_cache_kind(OWNER, chat, "native8")
        go_on(house, chat)
        fork = house.chats.fork(OWNER, house.chats.view(OWNER, chat).messages[-1].id).id
        told = go_on(house, fork)
        assert (told.num_read_again, kind_of(house, fork)) == (0, "native8")
        menu = house.chats.kind_menu(OWNER, None)
        assert menu is not None
        assert menu.in_use == "native4"


def test_a_branch_that_is_deleted_takes_its_rows_of_every_kind_along_and_no_others(house: House) -> None:
    view = house.say("Which bird is that?")
    chat = view.conversation.id
    house.chats.set_cache_kind(OWNER, chat, "native8")
    house.say("And the other one?", chat)
    house.edit(view.messages[0].id, "Which tree is that?")
    house.chats.delete_branch(OWNER, view.messages[0].id)
    assert house.saver is not None
    assert house.segments is not None
    words = [house.worker.session.wording.words(ids) for ids in all_ids(house)]  # pyright: ignore[reportOptionalMemberAccess]
    assert not any("bird" in text or "other one" in text for text in words)
    assert any("tree" in text for text in words)
    assert go_on(house, chat).num_read_again == 0


def all_ids(house: House) -> list[tuple[int, ...]]:
    assert house.segments is not None
    nodes = house.segments.list(OWNER)
    return list(house.segments.token_ids(OWNER, {node.segment.id for node in nodes}).values())


# what can be chosen


def test_nobody_chooses_for_somebody_elses_chat_nor_a_kind_that_is_not_there(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = talk(house, 1)
    with pytest.raises(NotFound):
        house.chats.set_cache_kind("eve", chat, "native8")
    with pytest.raises(NotFound):
        house.chats.kind_menu("eve", chat)
    with pytest.raises(KindUnavailable, match="no cache kind"):
        house.chats.set_cache_kind(OWNER, chat, "native9")
    monkeypatch.setattr(kinds_module, "_is_installed", lambda backend: False)
    with pytest.raises(KindUnavailable, match="not installed; nothing was changed"):
        house.chats.set_cache_kind(OWNER, chat, "hqq4")
    assert house.chats.view(OWNER, chat).conversation.cache_kind is None


@pytest.mark.parametrize("stored", ["hqq4", "a kind of next year"])
def test_a_chat_from_a_machine_with_other_kinds_goes_on_with_the_hosts_and_says_so(
    house: House, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds_module, "_is_installed", lambda backend: False)
    chat = talk(house)
    house.store.set_cache_kind(OWNER, chat, stored)
    house.restart()
    told = go_on(house, chat)
    assert (told.cache_kind, told.num_read_again) == ("dynamic", 0)
    assert stored in told.note
    assert "nothing of it was lost" in told.note
    menu = house.chats.kind_menu(OWNER, chat)
    assert menu is not None
    assert (menu.in_use, menu.notice) == ("dynamic", told.note)
    house.check(chat)


def test_a_library_that_is_there_but_does_not_load_is_not_offered(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise OSError("built for another torch")

    monkeypatch.setattr(kinds_module, "quanto_fit", broken)
    monkeypatch.setattr(kinds_module, "_is_installed", lambda backend: True)
    chat = talk(house, 1)
    with pytest.raises(KindUnavailable, match="built for another torch"):
        house.chats.set_cache_kind(OWNER, chat, "quanto4")


@pytest.mark.parametrize("first", ["dynamic", "native8"])
@pytest.mark.parametrize("kind", get_args(CacheKind))
def test_what_a_change_costs_is_known_before(house: House, first: CacheKind, kind: CacheKind) -> None:
    """What the menu says is what the next turn reads again."""
    if not kinds_module.availability(kind, "cpu").is_available:
        pytest.skip("it cannot be had here")
    chat = talk(house, kind=first)
    menu = house.chats.kind_menu(OWNER, chat)
    assert menu is not None
    cost = next(each.cost for each in menu.kinds if each.kind == kind)
    if kind == first:
        assert cost is None
        return
    assert cost is not None
    house.chats.set_cache_kind(OWNER, chat, kind)
    assert go_on(house, chat).num_read_again == cost.num_tokens
    assert (cost.num_tokens == 0) == (first == "dynamic")
    assert cost.seconds is not None


# running out of memory


@pytest.mark.parametrize("allowed", [False, True])
def test_a_chat_that_outgrows_the_budget_shrinks_only_where_that_is_allowed(
    tmp_path: Path, allowed: bool
) -> None:
    budget = 112 * llama().kv_bytes_per_token
    with House(tmp_path, llama(), max_live_bytes=budget, max_disk_bytes=DISK) as house:
        house.chats.allow_smaller_caches(OWNER, allowed=allowed)
        chat = talk(house, 1)
        job = house.start("word " * 24, chat, SHORT)
        ended = end_view(job)
        conversation = house.chats.view(OWNER, chat).conversation
        if not allowed:
            assert ended.state == "failed"
            assert "max-live-memory" in str(ended.error)
            assert conversation.cache_kind is None
            return
        assert ended.state == "stopped"
        assert ended.stats is not None
        assert (ended.stats.cache_kind, conversation.cache_kind) == ("native8", "native8")
        assert "8 bit" in ended.stats.note
        assert ended.stats.num_read_again == 0
        assert ended.stats.num_live_tokens > 0, "what was dense was converted"
        assert house.live.nbytes <= budget
        house.check_invariant(chat)
        assert go_on(house, chat, "ok").note == ""


def test_a_reply_that_fills_the_budget_goes_on_in_a_smaller_cache(tmp_path: Path) -> None:
    """Nothing that was shown is lost or written twice, and the limit on new tokens is kept."""
    budget = 64 * llama().kv_bytes_per_token
    wanted = SamplingSettings(temperature=0, max_new_tokens=90)
    with House(tmp_path, llama(), max_live_bytes=budget) as house:
        dense = house.say("Hi", sampling=wanted).messages[-1]
        assert dense.finish_reason == "memory"
        house.chats.allow_smaller_caches(OWNER, allowed=True)
        view = house.say("Hi", sampling=wanted)
        reply = view.messages[-1]
        assert (reply.status, reply.finish_reason) == ("stopped", "length")
        assert 88 <= len(reply.token_ids) <= 90
        assert reply.token_ids[:20] == dense.token_ids[:20]
        assert view.conversation.cache_kind == "native8"
        assert stats(view).note
        house.check_invariant(view.conversation.id)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_memory_that_runs_out_in_a_pass_is_survived_with_a_smaller_cache(house: House, number: int) -> None:
    """While reading, at the first token, while writing."""
    house.chats.allow_smaller_caches(OWNER, allowed=True)
    chat = talk(house, 1)
    with Passes(house.loaded.model) as passes:
        passes.fail(torch.OutOfMemoryError("CUDA out of memory"), number)
        with dictated(*[40] * 99):
            view = house.say("word " * 8, chat, SHORT)
    reply = view.messages[-1]
    assert (reply.finish_reason, reply.error, reply.token_ids) == ("length", None, (40,) * 6)
    told = stats(view)
    assert (told.cache_kind, told.num_read_again) == ("native8", 0)
    assert told.note
    house.check_invariant(chat)


def test_words_that_were_given_do_not_shorten_a_reply_that_goes_on_in_a_smaller_cache(house: House) -> None:
    house.chats.allow_smaller_caches(OWNER, allowed=True)
    begun, chat = "Sure, the dog and you: ", talk(house, 1)
    leaf_id = house.chats.view(OWNER, chat).leaf_id
    with Passes(house.loaded.model) as passes, dictated(*[40] * 99):
        passes.fail(torch.OutOfMemoryError("CUDA out of memory"), 5)
        job = house.chats.send(
            *(OWNER, "Hi"), conversation_id=chat, leaf_id=leaf_id, sampling=SHORT, begin_with=begun
        )
        view = house.finish(job)
    reply = view.messages[-1]
    begun_ids = tuple(house.renderer.encode_text(begun))
    assert (reply.finish_reason, reply.token_ids) == ("length", begun_ids + (40,) * 6)
    assert stats(view).cache_kind == "native8"


def test_at_the_foot_of_the_ladder_the_old_sentence_stands(house: House) -> None:
    house.chats.allow_smaller_caches(OWNER, allowed=True)
    chat = talk(house, 1, kind="native4")
    with Passes(house.loaded.model) as passes:
        passes.fail(MemoryError())
        ended = end_view(house.start("word " * 8, chat, SHORT))
    assert ended.state == "failed"
    assert "not enough memory" in str(ended.error)
    assert go_on(house, chat).cache_kind == "native4"


def test_what_one_person_allows_holds_for_their_chats_only(house: House) -> None:
    house.chats.allow_smaller_caches("ben", allowed=True)
    with Passes(house.loaded.model) as passes:
        passes.fail(MemoryError())
        ended = end_view(house.start("Hello", None, SHORT))
    assert ended.state == "failed"


# on the real model


@pytest.mark.parametrize("kind", ["native8", "native4"])
def test_packed_chats_do_everything_on_the_default_model(
    default_model: LoadedModel, tmp_path: Path, kind: CacheKind
) -> None:
    """Edit, regenerate, stop and restart; nothing is ever read again."""
    settings = CacheSettings(kind=kind)
    short = SamplingSettings(temperature=0, max_new_tokens=8)
    with House(tmp_path, default_model, settings=settings, max_disk_bytes=DISK) as house:
        view = house.say("What is the capital of France?", sampling=short)
        chat = view.conversation.id
        assert stats(house.regenerate(view.messages[-1].id, short)).num_prefilled_tokens == 1
        house.check_invariant(chat)
        with Passes(default_model.model) as passes:
            hold = passes.hold(3)
            job = house.start("And of Italy?", chat, short)
            hold.wait_until_reached()
            job.request_stop()
            hold.release()
            house.finish(job)
        house.check_invariant(chat)
        edited = house.edit(house.chats.view(OWNER, chat).messages[2].id, "And of Spain?", short)
        assert stats(edited).num_read_again == 0
        house.restart()
        told = stats(house.say("And its river?", chat, short))
        assert told.num_read_again == 0
        assert told.num_disk_tokens > 20
        house.check_invariant(chat)

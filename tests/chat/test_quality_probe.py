"""The probe of a kind's answers: nothing differs from itself, more bits differ less, nobody waits for it."""

from __future__ import annotations

import math
from collections.abc import Generator
from pathlib import Path

import pytest

import chat.quality_probe
from cache_store.records import KindQuality
from chat.chats import Chats
from chat.kind_choices import KindMenu, KindView
from chat.kv_cache import KVCache
from chat.layers.kinds import availability
from chat.model import LoadedModel
from chat.prompt import PromptRenderer
from chat.quality_probe import NUM_TOKENS, SAME_KL, SLIGHT_KL, measure, probe_text, verdict
from chat.settings import CacheKind, CacheSettings
from tests.chat.passes import Passes, llama
from tests.house import OWNER, PATIENCE_S, House

IDS = tuple(range(20, 148))


@pytest.fixture
def house(tmp_path: Path) -> Generator[House]:
    with House(tmp_path, llama()) as house:
        yield house


def probe(loaded: LoadedModel, kind: CacheKind, ids: tuple[int, ...] = IDS) -> KindQuality:
    dense, other = (KVCache(loaded.model, CacheSettings(kind=each)) for each in ("dynamic", kind))
    found = measure(dense, other, ids, lambda: True)
    assert found is not None
    return found


def menu_of(chats: Chats) -> KindMenu:
    menu = chats.kind_menu(OWNER, None)
    assert menu is not None
    return menu


def view_of(chats: Chats, kind: CacheKind) -> KindView:
    return next(each for each in menu_of(chats).kinds if each.kind == kind)


def test_a_dense_cache_answers_as_itself() -> None:
    assert probe(llama(), "dynamic") == KindQuality(0.0, 1.0)


def test_more_bits_differ_less() -> None:
    eight, four = probe(llama(), "native8"), probe(llama(), "native4")
    assert 0 < eight.mean_kl < four.mean_kl
    assert eight.top1_agreement >= four.top1_agreement


def test_on_the_default_model_eight_bits_are_the_same_and_two_are_not_recommended(
    default_model: LoadedModel,
) -> None:
    """The thresholds, held against what they are meant for."""
    renderer = PromptRenderer(default_model.tokenizer, default_model.eos_token_ids)
    ids = tuple(renderer.encode_text(probe_text()))
    assert len(ids) >= NUM_TOKENS
    ids = ids[:192]
    eight, four = probe(default_model, "native8", ids), probe(default_model, "native4", ids)
    assert eight.mean_kl < four.mean_kl / 10
    assert (verdict(eight), verdict(four)) == ("same", "slightly different")
    if availability("quanto2", "cpu").is_available:
        assert verdict(probe(default_model, "quanto2", ids)) == "not recommended"


@pytest.mark.parametrize(
    ("mean_kl", "top1_agreement", "expected"),
    [
        (0.0, 1.0, "same"),
        (SAME_KL, 0.97, "same"),
        (SAME_KL * 1.01, 1.0, "slightly different"),
        (SLIGHT_KL, 0.8, "slightly different"),
        (SLIGHT_KL * 1.01, 0.9, "not recommended"),
        (0.01, 0.79, "not recommended"),
        (math.nan, 1.0, "not recommended"),
    ],
)
def test_what_figures_mean(mean_kl: float, top1_agreement: float, expected: str) -> None:
    assert verdict(KindQuality(mean_kl, top1_agreement)) == expected


def test_it_can_be_stopped_between_two_pieces() -> None:
    asked: list[int] = []

    def goes_on() -> bool:
        asked.append(1)
        return len(asked) < 3

    dense, other = (KVCache(llama().model, CacheSettings(kind=kind)) for kind in ("dynamic", "native8"))
    assert measure(dense, other, tuple(range(20, 220)) * 3, goes_on) is None
    assert len(asked) == 3
    assert len(dense) == len(other) < 200


def test_figures_are_measured_once_when_asked_for_and_outlive_a_restart(house: House) -> None:
    assert view_of(house.chats, "native8").quality is None
    house.chats.measure_kinds()
    assert house.worker.wait_until_idle(PATIENCE_S)
    assert not house.chats.is_measuring()
    measured = {each.kind: each.quality for each in menu_of(house.chats).kinds}
    assert measured["dynamic"] is None
    assert measured["native8"] is not None
    assert measured["native4"] is not None
    house.restart()
    with Passes(house.loaded.model) as passes:
        house.chats.measure_kinds()
        assert house.worker.wait_until_idle(PATIENCE_S)
        assert passes.num_passes == 0
    assert {each.kind: each.quality for each in menu_of(house.chats).kinds} == measured


def test_a_reply_does_not_wait_for_the_probe_which_begins_anew_behind_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat.quality_probe, "PIECE", 8)
    with Passes(house.loaded.model) as passes:
        hold = passes.hold(5)
        house.chats.measure_kinds()
        hold.wait_until_reached()
        assert view_of(house.chats, "native8").is_being_measured
        job = house.start("Hello")
        num_probed = passes.num_passes
        hold.release()
        view = house.finish(job)
        fed = passes.fed_ids
    assert view.messages[-1].error is None
    prompt_ids = list(house.prompt(view, upto=1).token_ids)
    at = next(at for at in range(len(fed)) if fed[at : at + 3] == prompt_ids[:3])
    assert at <= 8 * (num_probed + 1), "at most the pass that was being done, and its twin, came first"
    assert house.worker.wait_until_idle(PATIENCE_S)
    assert view_of(house.chats, "native8").quality is not None
    house.check(view.conversation.id)


def test_a_probe_that_fails_ends_alone(house: House) -> None:
    with Passes(house.loaded.model) as passes:
        passes.fail(MemoryError())
        house.chats.measure_kinds()
        assert house.worker.wait_until_idle(PATIENCE_S)
    assert view_of(house.chats, "native8").quality is None
    assert view_of(house.chats, "native4").quality is not None
    assert house.say("Hello").messages[-1].error is None

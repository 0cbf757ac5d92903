"""What fits is foretold to the token, without allocating; and the best kind that fits is recommended."""

from __future__ import annotations

from typing import get_args

import psutil
import pytest
import torch

import chat.memory_forecast
from chat.kv_cache import KVCache
from chat.memory_forecast import QUALITY_ORDER, KindForecast, Room, forecast, free_bytes, with_recommended
from chat.model_facts import text_config
from chat.settings import CacheKind, CacheSettings
from tests.tiny_models import tiny_model

KINDS: tuple[CacheKind, ...] = get_args(CacheKind)
PLENTY = 10**12
CONTEXT = 4_096
LLAMA = text_config(tiny_model("llama").model)


def settings_of(kind: CacheKind) -> CacheSettings:
    return CacheSettings(growth_step=16, kind=kind)


def of(kind: CacheKind, room: Room, context: int = CONTEXT) -> KindForecast:
    return forecast(LLAMA, settings_of(kind), torch.float32, room, context)


@pytest.mark.parametrize("kind", ["dynamic", "native8", "native4", "fp8", "offloaded"])
@pytest.mark.parametrize("max_live", [0, 10_000, 123_456, 400_000])
def test_exactly_as_many_tokens_fit_as_a_real_cache_says(kind: CacheKind, max_live: int) -> None:
    cache = KVCache(tiny_model("llama").model, settings_of(kind))
    found = of(kind, Room(PLENTY, max_live), 10**6)
    assert found.num_tokens == 0 or cache.nbytes_for(found.num_tokens) <= max_live
    assert cache.nbytes_for(found.num_tokens + 1) > max_live
    assert not found.fits_context


@pytest.mark.parametrize(
    ("free", "max_live", "kind", "num_tokens"),
    [
        (PLENTY, PLENTY, "dynamic", CONTEXT),
        (512 * 160, PLENTY, "dynamic", 160),  # two layers, keys and values, two heads of 16, float32
        (PLENTY, 512 * 160 + 511, "dynamic", 160),
        (512 * 175, PLENTY, "dynamic", 160),  # steps of 16
        (0, PLENTY, "native4", 0),
        (PLENTY, 512 * 160, "native8", 160 * 512 // (2 * 2 * 2 * 20) // 16 * 16),  # 16 codes and a scale
        (512 * 160, PLENTY, "native8", 512 * 160 // (160 + 288) // 16 * 16),  # one layer's rows, unpacked
    ],
)
def test_the_smaller_of_budget_and_memory_decides(
    free: int, max_live: int, kind: CacheKind, num_tokens: int
) -> None:
    found = of(kind, Room(free, max_live))
    assert (found.num_tokens, found.fits_context) == (num_tokens, num_tokens == CONTEXT)


@pytest.mark.parametrize(
    ("free", "max_live", "free_host", "num_tokens"),
    [
        (PLENTY, PLENTY, 512 * 160, 160),  # rows ask for the computer's memory,
        (PLENTY, 512 * 160, PLENTY, 160),  # within the budget,
        (576 * 160, PLENTY, PLENTY, 160),  # and two layers' rows, with an eighth to spare, for the device's
        (0, PLENTY, PLENTY, 0),
        (512 * 160 + 576 * 160, PLENTY, None, 160),  # where both are one
    ],
)
def test_offloaded_rows_take_the_computers_memory_and_two_layers_of_the_devices(
    free: int, max_live: int, free_host: int | None, num_tokens: int
) -> None:
    found = of("offloaded", Room(free, max_live, free_host), 10**6)
    assert (found.num_tokens, found.bytes_per_token) == (num_tokens, 512)
    dense = of("dynamic", Room(free, max_live, free_host), 10**6)
    assert dense == of("dynamic", Room(free, max_live), 10**6), "the computer's memory is nothing to it"


@pytest.mark.parametrize(
    ("room", "max_live", "num_tokens"),
    [(100, PLENTY, 100), (100, 512 * 100, 100), (100, 512 * 100 - 1, 0), (10_000, PLENTY, CONTEXT)],
)
def test_room_of_a_fixed_size_is_there_as_a_whole_or_not_at_all(
    room: int, max_live: int, num_tokens: int
) -> None:
    config = text_config(tiny_model("llama", max_position_embeddings=CONTEXT).model)
    for kind in ("static", "offloaded_static"):
        settings = CacheSettings(kind=kind, static_tokens=room)
        found = forecast(config, settings, torch.float32, Room(PLENTY, max_live), CONTEXT)
        assert (found.num_tokens, found.fits_context) == (num_tokens, num_tokens == CONTEXT)


def test_a_model_that_keeps_no_rows_has_room_for_everything() -> None:
    config = text_config(tiny_model("mamba2").model)
    found = forecast(config, settings_of("native8"), torch.float32, Room(1, 1), CONTEXT)
    assert (found.bytes_per_token, found.num_tokens, found.fits_context) == (0, CONTEXT, True)


def test_models_that_share_rows_between_layers_unpack_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = LLAMA, settings_of("native8"), torch.float32, Room(200_000, PLENTY), 10**6
    apart = forecast(*arguments)
    monkeypatch.setattr(chat.memory_forecast, "shares_rows", lambda config: True)
    assert forecast(*arguments).num_tokens < apart.num_tokens


def some(**tokens: int) -> list[KindForecast]:
    return [KindForecast(kind, 1, count, count == CONTEXT) for kind, count in tokens.items()]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("forecasts", "flagged", "recommended"),
    [
        (some(native4=CONTEXT, dynamic=CONTEXT, native8=CONTEXT), [], "dynamic"),
        (some(dynamic=100, native8=CONTEXT, native4=CONTEXT), [], "native8"),
        (some(dynamic=100, native8=200, native4=400), [], "native4"),
        (some(dynamic=100, native8=200, native4=400), ["native4"], "native8"),
        (some(native4=400), ["native4"], "native4"),
        (some(dynamic=0, native8=0), [], "dynamic"),
        (some(offloaded=CONTEXT, dynamic=100, native4=CONTEXT), [], "native4"),
        (some(offloaded=CONTEXT, dynamic=100, native4=CONTEXT), ["native4"], "offloaded"),
        (some(offloaded=CONTEXT, dynamic=100, native4=200), [], "offloaded"),
        (some(static=CONTEXT, dynamic=CONTEXT), [], "dynamic"),
    ],
)
def test_the_best_answers_that_fit_are_recommended(
    forecasts: list[KindForecast], flagged: list[CacheKind], recommended: str
) -> None:
    advised = with_recommended(forecasts, flagged)
    assert [each.kind for each in advised] == [each.kind for each in forecasts]
    assert [each.kind for each in advised if each.is_recommended] == [recommended]


def test_every_kind_has_a_place_among_the_others() -> None:
    assert sorted(QUALITY_ORDER) == sorted(KINDS)


def test_free_memory_is_less_than_there_is() -> None:
    assert 0 < free_bytes(torch.device("cpu")) < psutil.virtual_memory().total

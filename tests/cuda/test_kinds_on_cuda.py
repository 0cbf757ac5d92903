"""Kinds of cache on a CUDA device: equal to the dense one where they must be, and lighter on its memory.

`make test-cuda` runs them where there is one. Each body takes the device as an argument and runs on the CPU
for a few kinds with every other test, so that what is wrong with a body is seen without a CUDA device.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor

from chat.kv_cache import KVCache
from chat.layers.kinds import availability, is_exact, is_offloaded
from chat.layers.offloaded import OffloadedLayer
from chat.model import LoadedModel, describe
from chat.settings import CacheKind, CacheSettings, SamplingSettings
from chat.stats import TurnStats
from tests.house import OWNER, House
from tests.tiny_models import tiny_model

IDS = tuple(range(20, 220))
SEEDED = SamplingSettings(temperature=0.8, max_new_tokens=12, seed=7)
EXACT: tuple[CacheKind, ...] = ("offloaded", "static", "offloaded_static")
HERE: tuple[CacheKind, ...] = ("native8", "offloaded_static")
"""What is tried on the CPU."""


def on_cuda(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.cuda)


exact_kinds = pytest.mark.parametrize(
    ("device", "kind"), [("cpu", "offloaded"), *(on_cuda("cuda", kind) for kind in EXACT)]
)
all_kinds = pytest.mark.parametrize(
    ("device", "kind"),
    [*(("cpu", kind) for kind in HERE), *(on_cuda("cuda", kind) for kind in get_args(CacheKind))],
)


@lru_cache
def model(device: str, name: str = "llama", **overrides: Any) -> LoadedModel:
    """A tiny model, on a CUDA device in bfloat16, in which the CPU would be slow."""
    made = tiny_model(name, **overrides)
    cast("Any", made.model).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    return describe(made.name, made.model, made.tokenizer, made.fingerprint["model"])


def settings(kind: CacheKind, room: int = 512) -> CacheSettings:
    reason = availability(kind, "cuda").reason
    if reason:
        pytest.skip(reason)
    return CacheSettings(
        growth_step=16, prefill_chunk=16, kind=kind, group_size=8, chunk_tokens=8, static_tokens=room
    )


def assert_same_rows(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Byte for byte."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        mine, theirs = tensor.contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8)
        assert torch.equal(mine, theirs), name


def greedy(cache: KVCache, first: int, count: int) -> Iterator[int]:
    token_id = first
    for _ in range(count):
        token_id = int(cache.feed([token_id]).argmax())
        yield token_id


# in memory


@all_kinds
def test_a_cache_is_cropped_and_goes_on_in_half_precision(device: str, kind: CacheKind) -> None:
    """Law 3 and law 4."""
    for name in ("llama", "gemma3_text", "falcon_h1") if device == "cuda" else ("llama",):
        loaded = model(device, name)
        straight, back = (KVCache(loaded.model, settings(kind)) for _ in range(2))
        for cache in (straight, back):
            for start, end in ((0, 1), (1, 20), (20, 45)):
                assert cache.feed(IDS[start:end]).isfinite().all()
            cache.rows_out(0)
        if not back.can_crop_to(30):
            continue
        back.feed(IDS[45:70])
        back.crop_to(45)
        for start, end in ((45, 60), (60, 61), (61, 62)):
            assert torch.equal(straight.feed(IDS[start:end]), back.feed(IDS[start:end]))
        assert_same_rows(straight.rows_out(0), back.rows_out(0))


@exact_kinds
def test_dense_kinds_write_the_tokens_of_the_default_one(device: str, kind: CacheKind) -> None:
    count = 40 if device == "cuda" else 4
    for name in ("llama", "gemma3_text", "gemma4_text"):
        loaded = model(device, name)
        ours = KVCache(loaded.model, settings(kind))
        theirs = KVCache(loaded.model, settings("dynamic"))
        for cache in (ours, theirs):
            cache.feed(IDS[:150])
        assert list(greedy(ours, 20, count)) == list(greedy(theirs, 20, count))
        assert ours.token_ids == theirs.token_ids
        assert_same_rows(ours.rows_out(0), theirs.rows_out(0))


@pytest.mark.parametrize(("device", "length"), [("cpu", 30), on_cuda("cuda", 6000)])
def test_copies_beside_the_computing_are_never_used_too_early_or_overwritten(
    device: str, length: int
) -> None:
    """Many layers and long rows, so that copying takes longer than computing; two caches that take turns, and
    steps back in between."""
    loaded = model(
        device,
        num_hidden_layers=6 if device == "cuda" else 3,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=16_384,
    )
    ids = tuple(20 + number % 200 for number in range(length))
    pairs = [
        (KVCache(loaded.model, settings("offloaded")), KVCache(loaded.model, settings("dynamic")))
        for _ in range(2)
    ]
    for number, pair in enumerate(pairs):
        for cache in pair:
            for start in range(0, length, 1500):
                cache.feed(ids[number : number + length][start : start + 1500])
    for step in range(40 if device == "cuda" else 8):
        for ours, theirs in pairs:
            if step % 7 == 3:
                for cache in (ours, theirs):
                    cache.crop_to(len(cache) - 3)
            new = ids[: 1 + 5 * (step % 4 == 1)]
            assert torch.equal(ours.feed(new), theirs.feed(new))
    for ours, theirs in pairs:
        assert_same_rows(ours.rows_out(0), theirs.rows_out(0))


@pytest.mark.parametrize(
    ("device", "new"),
    [("cpu", "native8"), *(on_cuda("cuda", kind) for kind in ("native8", "dynamic", "static", "fp8"))],
)
@pytest.mark.parametrize("old", ["dynamic", "offloaded", "offloaded_static"])
def test_rows_move_from_one_memory_to_the_other(device: str, new: CacheKind, old: CacheKind) -> None:
    loaded = model(device)
    source, target = KVCache(loaded.model, settings(old)), KVCache(loaded.model, settings(new))
    source.feed(IDS[:40])
    straight = KVCache(loaded.model, settings("dynamic"))
    straight.feed(IDS[:40])
    expected = straight.converted_to(settings(new))
    turned = source.turned_into(target, 60)
    assert_same_rows(turned.rows_out(0), expected.rows_out(0))
    assert torch.equal(turned.feed(IDS[40:45]), expected.feed(IDS[40:45]))
    home = turned.converted_to(settings("offloaded")) if is_exact(new) else turned
    assert home.token_ids == IDS[:45]


# memory


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_the_device_holds_two_layers_of_an_offloaded_cache_instead_of_all(kind: CacheKind) -> None:
    loaded = model(
        "cuda",
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=16_384,
    )
    peaks = {each: _peak_bytes(loaded, each, 12_000) for each in ("dynamic", kind)}
    cache_bytes = 12_000 * loaded.kv_bytes_per_token
    assert peaks["dynamic"] > cache_bytes
    assert peaks[kind] < peaks["dynamic"] - cache_bytes // 2, peaks


def _peak_bytes(loaded: LoadedModel, kind: CacheKind, num_tokens: int) -> int:
    """The most that reading and writing a chat takes of the device's memory, beyond what is there before."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cache = KVCache(loaded.model, settings(kind, room=num_tokens + 100))
    cache.reserve(num_tokens + 100)
    for start in range(0, num_tokens, 500):
        cache.feed([20 + number % 200 for number in range(start, start + 500)])
    list(greedy(cache, 20, 20))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("device", ["cpu", on_cuda("cuda")])
def test_offloaded_rows_are_in_the_computers_memory_and_pinned_for_a_cuda_device(device: str) -> None:
    cache = KVCache(model(device).model, settings("offloaded"))
    for start in range(0, 100, 20):  # it grows on the way
        cache.feed(IDS[start : start + 20])
    layers = [layer for layer in cast("Any", cache)._rows if isinstance(layer, OffloadedLayer)]
    buffers = [buffer for layer in layers for buffer in layer.buffers]
    assert len(buffers) == 4
    assert {buffer.device.type for buffer in buffers} == {"cpu"}
    assert {buffer.is_pinned() for buffer in buffers} == {device == "cuda"}


# chats


@all_kinds
def test_a_chat_is_edited_regenerated_and_restored(tmp_path: Path, device: str, kind: CacheKind) -> None:
    """Laws 1, 3 and 4."""
    with House(tmp_path, model(device), max_disk_bytes=10**9, settings=settings(kind)) as house:
        chat = house.say("A question of some length").conversation.id
        view = house.say("Two.", chat, SEEDED)
        for restarting in (False, True):
            if restarting:
                house.restart()
            old = view.messages[-1]
            view = house.regenerate(old.id, SEEDED)
            assert view.messages[-1].error is None
            assert view.messages[-1].token_ids == old.token_ids
            assert _stats(house, chat).num_read_again == 0
            house.check_invariant(chat)
        view = house.edit(view.messages[2].id, "Another two, which is longer.", SEEDED)
        assert _stats(house, chat).num_read_again == 0
        rows = house.kept()[chat].cache.rows_out(0)
        house.restart()
        house.chats.warm(OWNER, chat)
        assert house.worker.wait_until_idle(60)
        assert_same_rows(house.kept()[chat].cache.rows_out(0), rows)
        house.say("Three.", chat)
        assert _stats(house, chat).num_read_again == 0
        house.check_invariant(chat)
        assert is_offloaded(kind) == (house.live.host_bytes == house.live.nbytes)


@pytest.mark.cuda
def test_a_chat_changes_among_dense_kinds_and_reads_nothing_again(tmp_path: Path) -> None:
    """Chosen as people do it: with a CUDA device these kinds are offered."""
    with House(tmp_path, model("cuda"), max_disk_bytes=10**9, settings=settings("dynamic")) as house:
        chat = house.say("A question of some length").conversation.id
        menu = house.chats.kind_menu(OWNER, chat)
        assert menu is not None
        assert all(each.availability.is_available for each in menu.kinds if each.is_exact)
        for kind in (*EXACT, "dynamic"):
            house.chats.set_cache_kind(OWNER, chat, kind)
            assert house.say("And more", chat).messages[-1].error is None
            told = _stats(house, chat)
            assert (told.cache_kind, told.num_read_again, told.num_disk_tokens) == (kind, 0, 0)
            house.check_invariant(chat)


def _stats(house: House, chat: str) -> TurnStats:
    return TurnStats.from_json(cast("Any", house.chats.view(OWNER, chat).messages[-1].stats))

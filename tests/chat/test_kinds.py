"""Every kind of cache edits, regenerates, saves and restores like the dense one, at the size foretold.

Laws 1, 3 and 4 for each kind that can be had here, on models of full attention, of mixed layers, and with a
head size that no group size divides.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor

import chat.layers.packed
from cache_store.errors import SegmentDamaged
from cache_store.file_header import info_of
from chat.chat_view import ChatView
from chat.errors import CacheMismatch, ChatError, KindUnavailable
from chat.kv_cache import KVCache
from chat.layer_state import has_state
from chat.layers.chunked import ChunkedLayer
from chat.layers.contract import RowLayer
from chat.layers.growing import GrowingLayer
from chat.layers.kinds import (
    INSTALL_BACKENDS,
    QUANTIZATIONS,
    availability,
    available_kinds,
    cache_fingerprint,
    codec_for,
    have_same_rows,
    is_exact,
)
from chat.layers.offloaded import OffloadedLayer
from chat.layers.packed import PackedLayer
from chat.layers.sizes import bytes_per_token, cache_cost
from chat.layers.static import FixedCapacity
from chat.model import LoadedModel
from chat.model_facts import shares_rows, text_config
from chat.settings import CacheKind, CacheSettings, SamplingSettings
from chat.stats import TurnStats
from tests.chat.passes import Passes, out_of_memory_in
from tests.house import GREEDY, OWNER, House
from tests.tiny_models import WINDOW, tiny_llama, tiny_model

STEP, CHUNK = 16, 8
IDS = tuple(range(20, 220))
SEEDED = SamplingSettings(temperature=0.8, max_new_tokens=12, seed=7)
KINDS: tuple[CacheKind, ...] = get_args(CacheKind)
QUANTIZED: tuple[CacheKind, ...] = tuple(kind for kind in KINDS if not is_exact(kind))
EXACT: tuple[CacheKind, ...] = ("offloaded", "static", "offloaded_static")
"""Dense, but not the default; here on the CPU, although people get them with CUDA only."""
ROOM = 512
"""Of kinds of fixed size."""
LOSSY: tuple[CacheKind, ...] = ("native8", "native4", "fp8", "hqq4", "quanto4")
"""One of each form that rows have on disk, other than the dense one."""
ROW_MODELS = ("llama", "odd heads")
MIXED_MODELS = ("gemma3_text", "gemma4_text", "lfm2", "falcon_h1", "gpt_oss")


@lru_cache
def model(name: str) -> LoadedModel:
    if name == "gemma4_text":  # heads of another size in every second layer
        return tiny_model(name, global_head_dim=32)
    if name == "odd heads":  # 3 groups of 6, and one head
        return tiny_llama(head_dim=18, num_key_value_heads=1)
    return tiny_model(name)


def settings_of(kind: CacheKind) -> CacheSettings:
    """Small steps, groups and chunks, so that short texts meet their edges. Skips a kind whose library is not
    here."""
    reason = availability(kind, "cuda").reason
    if reason:
        pytest.skip(reason)
    return CacheSettings(
        growth_step=STEP,
        prefill_chunk=STEP,
        kind=kind,
        group_size=8,
        chunk_tokens=CHUNK,
        static_tokens=ROOM,
    )


def holding(num_tokens: int, kind: CacheKind, loaded: LoadedModel) -> KVCache:
    cache = KVCache(loaded.model, settings_of(kind))
    if num_tokens:
        cache.feed(IDS[:num_tokens])
    return cache


def layers(cache: KVCache) -> list[Any]:
    return cast("Any", cache)._cache.layers


def assert_same_rows(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Byte for byte."""
    assert one.keys() == other.keys()
    assert one
    for name, tensor in one.items():
        mine, theirs = tensor.contiguous(), other[name].contiguous()
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), name
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), name


def stats(view: ChatView) -> TurnStats:
    return TurnStats.from_json(cast("Any", view.messages[-1].stats))


kinds = pytest.mark.parametrize("kind", KINDS)
quantized = pytest.mark.parametrize("kind", QUANTIZED)
row_models = pytest.mark.parametrize("name", ROW_MODELS)
mixed_models = pytest.mark.parametrize("name", MIXED_MODELS)
all_models = pytest.mark.parametrize("name", ROW_MODELS + MIXED_MODELS)
exact = pytest.mark.parametrize("kind", EXACT)
saved_lossy = pytest.mark.parametrize("kind", LOSSY)
saved_kinds = pytest.mark.parametrize("kind", [*LOSSY, "offloaded", "offloaded_static"])
saved_models = pytest.mark.parametrize("name", [*ROW_MODELS, "gemma3_text", "falcon_h1"])
"""On disk a kind is the parts of its rows, and a model the layers beside them; `test_resume` has the rest."""


# in memory


@kinds
@all_models
def test_a_text_of_any_length_can_be_fed_in_any_pieces(kind: CacheKind, name: str) -> None:
    """Law 4: one token first, odd lengths, past the window; ids and layers agree at every step."""
    cache, start = holding(0, kind, model(name)), 0
    for count in (1, 1, 13, 33, 1, 7):
        logits = cache.feed(IDS[start : start + count])
        start += count
        assert logits.isfinite().all()
        cache.check()
    assert cache.token_ids == IDS[:start]
    assert start > 2 * WINDOW


@pytest.mark.parametrize(("kind", "tolerance"), [("native8", 0.02), ("fp8", 0.1), ("native4", 0.4)])
@all_models
def test_a_quantized_cache_answers_nearly_as_a_dense_one(
    kind: CacheKind, tolerance: float, name: str
) -> None:
    """Random weights exaggerate every error; what matters here is that none is one of position or place."""
    dense, packed = holding(40, "dynamic", model(name)), holding(40, kind, model(name))
    ours, theirs = packed.feed(IDS[40:45]), dense.feed(IDS[40:45])
    assert (ours - theirs).norm() < tolerance * theirs.norm()


@quantized
@all_models
def test_full_attention_is_packed_and_every_other_layer_stays_as_it_is(kind: CacheKind, name: str) -> None:
    """A model is never refused because some of its layers cannot be quantized."""
    packed, dense = layers(holding(3, kind, model(name))), layers(holding(3, "dynamic", model(name)))
    assert any(isinstance(layer, PackedLayer) for layer in packed)
    for ours, theirs in zip(packed, dense, strict=True):
        if isinstance(theirs, GrowingLayer):
            assert isinstance(ours, PackedLayer)
            assert isinstance(ours, ChunkedLayer) == kind.startswith(("hqq", "quanto"))
            assert has_state(ours) == has_state(theirs)
        else:
            assert type(ours) is type(theirs)


@exact
@pytest.mark.parametrize("name", [*ROW_MODELS, "gemma3_text", "gemma4_text", "lfm2", "falcon_h1"])
def test_dense_kinds_answer_as_the_default_one_bit_for_bit(kind: CacheKind, name: str) -> None:
    """In pieces, past the window, with a step back where the model can; and the layers are those wanted."""
    ours, theirs = holding(0, kind, model(name)), holding(0, "dynamic", model(name))
    for start, end in ((0, 1), (1, 20), (20, 21), (21, 60), (60, 61), (61, 62)):
        assert torch.equal(ours.feed(IDS[start:end]), theirs.feed(IDS[start:end]))
    if ours.can_crop_to(33):
        for cache in (ours, theirs):
            cache.crop_to(33)
        for start, end in ((33, 34), (34, 35), (35, 90), (90, 91)):
            assert torch.equal(ours.feed(IDS[start:end]), theirs.feed(IDS[start:end]))
    assert_same_rows(ours.rows_out(0), theirs.rows_out(0))
    for layer, growing in zip(layers(ours), layers(theirs), strict=True):
        if isinstance(growing, GrowingLayer):
            assert isinstance(layer, OffloadedLayer) == kind.startswith("offloaded")
            assert isinstance(layer, FixedCapacity) == kind.endswith("static")
            assert has_state(layer) == has_state(growing)
        else:
            assert type(layer) is type(growing)


@kinds
@row_models
@pytest.mark.parametrize("num_more", [1, 25])
def test_crop_then_append_equals_append(kind: CacheKind, name: str, num_more: int) -> None:
    """Law 3, bytes and logits, from where a turn ended (which is where its rows were handed out)."""
    straight, back = holding(30, kind, model(name)), holding(30, kind, model(name))
    assert_same_rows(straight.rows_out(0), back.rows_out(0))
    for token_id in range(200, 200 + num_more):
        back.feed([token_id])
    back.crop_to(30)
    assert torch.equal(straight.feed(IDS[30:43]), back.feed(IDS[30:43]))
    for token_id in IDS[43:50]:
        assert torch.equal(straight.feed([token_id]), back.feed([token_id]))
    assert_same_rows(straight.rows_out(0), back.rows_out(0))


@kinds
@row_models
def test_going_back_to_nothing_leaves_no_trace(kind: CacheKind, name: str) -> None:
    """C01."""
    cache = holding(50, kind, model(name))
    cache.crop_to(0)
    fresh = holding(0, kind, model(name))
    assert torch.equal(cache.feed(IDS[100:120]), fresh.feed(IDS[100:120]))
    assert_same_rows(cache.rows_out(0), fresh.rows_out(0))


@kinds
@row_models
@pytest.mark.parametrize("length", [0, 1, 17, 40])
def test_a_copied_beginning_is_byte_equal_and_stands_alone(kind: CacheKind, name: str, length: int) -> None:
    source = holding(40, kind, model(name))
    copy, again = source.copy_prefix(length, room_for=100), source.copy_prefix(length)
    assert copy.token_ids == IDS[:length]
    assert copy.capacity >= 100 or not length
    source.crop_to(0)
    source.feed(IDS[60:100])
    assert torch.equal(copy.feed(IDS[40:45]), again.feed(IDS[40:45]))
    assert_same_rows(copy.rows_out(0), again.rows_out(0))


@kinds
@row_models
def test_a_pass_that_broke_between_layers_can_be_taken_back(kind: CacheKind, name: str) -> None:
    """C31: the first layers then hold more than the last ones."""
    loaded = model(name)
    cache, untouched = holding(20, kind, loaded), holding(20, kind, loaded)
    for each in (cache, untouched):
        each.rows_out(0)
    with Passes(cast("Any", loaded.model).model.layers[1]) as passes:
        passes.fail(ValueError("broken by a test"))
        with pytest.raises(ValueError, match="broken by a test"):
            cache.feed(IDS[20:50])
    assert cache.recover()
    assert torch.equal(cache.feed(IDS[20:30]), untouched.feed(IDS[20:30]))


@quantized
@pytest.mark.parametrize("failing_call", [1, 4])
def test_a_layer_that_had_no_memory_to_grow_can_be_taken_back(kind: CacheKind, failing_call: int) -> None:
    """C31."""
    cache, untouched = holding(STEP, kind, model("llama")), holding(STEP, kind, model("llama"))
    with (
        out_of_memory_in(chat.layers.packed, "grown", failing_call),
        pytest.raises(torch.OutOfMemoryError),
    ):
        cache.feed(IDS[STEP : STEP + 8])
    assert cache.recover()
    assert torch.equal(cache.feed(IDS[STEP : STEP + 4]), untouched.feed(IDS[STEP : STEP + 4]))


# sizes


@kinds
@row_models
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 90])
def test_the_bytes_foretold_are_the_bytes_of_the_buffers(kind: CacheKind, name: str, num_tokens: int) -> None:
    """Law 5: known from the config alone, before anything is allocated."""
    loaded = model(name)
    cost = cache_cost(text_config(loaded.model), settings_of(kind), loaded.dtype)
    cache = holding(0, kind, loaded)
    foretold = cache.nbytes_for(num_tokens)
    cache.feed(IDS[:num_tokens])
    assert cache.nbytes == foretold == cache.capacity * cost.per_token + cost.fixed
    saved = cache.rows_out(0).values()
    assert sum(tensor.nbytes for tensor in saved) == num_tokens * cost.per_token
    assert bytes_per_token(text_config(loaded.model), settings_of(kind), loaded.dtype) == cost.per_token


@kinds
@mixed_models
def test_the_bytes_foretold_are_enough_for_mixed_models(kind: CacheKind, name: str) -> None:
    """Sliding layers are counted as if they grew, states of fixed size are not rows."""
    loaded = model(name)
    cache = holding(100, kind, loaded)
    cost = cache_cost(text_config(loaded.model), settings_of(kind), loaded.dtype)
    row_bytes = sum(layer.nbytes for layer in layers(cache) if isinstance(layer, RowLayer))
    stock = [layer for layer in layers(cache) if not isinstance(layer, RowLayer)]
    if any(getattr(layer, "is_sliding", False) for layer in stock):
        assert row_bytes < cache.capacity * cost.per_token + cost.fixed
    else:
        assert row_bytes == cache.capacity * cost.per_token + cost.fixed


@kinds
def test_growing_never_takes_more_than_was_foretold(kind: CacheKind) -> None:
    cache = holding(20, kind, model("llama"))
    for num_tokens in (40, 90, 200):
        foretold = cache.nbytes_for(num_tokens)
        cache.feed(IDS[len(cache) : num_tokens])
        assert cache.nbytes <= foretold


@pytest.mark.parametrize(("kind", "ratio"), [("native8", 0.54), ("native4", 0.30), ("fp8", 0.54)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_quantized_rows_are_as_small_as_promised(kind: CacheKind, ratio: float, head_dim: int) -> None:
    """Against bfloat16, scales included, for the head sizes that models have."""
    config = text_config(tiny_llama(head_dim=head_dim).model)
    dense = bytes_per_token(config, CacheSettings(), torch.bfloat16)
    assert bytes_per_token(config, CacheSettings(kind=kind), torch.bfloat16) <= ratio * dense


def test_sizes_need_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person sees what a kind would take before installing what it needs."""
    for module in ("hqq", "optimum.quanto"):
        monkeypatch.setitem(sys.modules, module, None)
    config = text_config(model("llama").model)
    assert len({bytes_per_token(config, CacheSettings(kind=kind), torch.float32) for kind in KINDS}) >= 4


# changing the kind


@quantized
@all_models
def test_a_dense_cache_becomes_a_packed_one_without_reading_again(kind: CacheKind, name: str) -> None:
    dense = holding(41, "dynamic", model(name))
    before = {each: tensor.clone() for each, tensor in dense.rows_out(0).items()}
    with Passes(model(name).model) as passes:
        packed = dense.converted_to(settings_of(kind), room_for=60)
        assert passes.num_passes == 0
    assert (packed.token_ids, packed.settings.kind) == (IDS[:41], kind)
    assert packed.capacity >= 60
    rows, codec = packed.rows_out(0), codec_for(settings_of(kind))
    assert codec is not None
    for layer_name in {each.rpartition(".")[0] for each in before if each.startswith("layers.")}:
        if kind.startswith(("hqq", "quanto")):
            continue  # packed in chunks, and hqq's scales depend on what is packed together
        for side in ("keys", "values"):
            parts = codec.pack(before[f"{layer_name}.{side}"])
            assert_same_rows(parts, {part: rows[f"{layer_name}.{side}.{part}"] for part in parts})
    for each, tensor in before.items():
        if each.startswith("state."):
            assert torch.equal(rows[each], tensor)
    assert_same_rows(dense.rows_out(0), before)
    expected = dense.feed(IDS[41:46])
    assert (packed.feed(IDS[41:46]) - expected).norm() < expected.norm()


@kinds
@all_models
def test_a_cache_can_be_converted_to_its_own_kind(kind: CacheKind, name: str) -> None:
    cache = holding(41, kind, model(name))
    other = cache.converted_to(settings_of(kind))
    assert_same_rows(other.rows_out(0), cache.rows_out(0))
    assert torch.equal(other.feed(IDS[41:46]), cache.feed(IDS[41:46]))


def test_packed_rows_do_not_become_dense_or_packed_otherwise() -> None:
    """What is lost is lost: a dense fingerprint on such rows would lie."""
    cache = holding(20, "native4", model("llama"))
    for kind in ("dynamic", "native8"):
        assert not cache.can_convert_to(settings_of(kind))
        with pytest.raises(CacheMismatch):
            cache.converted_to(settings_of(kind))


def test_an_empty_cache_can_be_converted() -> None:
    cache = holding(0, "dynamic", model("llama")).converted_to(settings_of("native8"))
    assert len(cache) == 0
    cache.feed(IDS[:3])


# on disk


def house_of(folder: Path, kind: CacheKind, name: str) -> House:
    folder.mkdir(exist_ok=True)
    return House(folder, model(name), max_disk_bytes=10**9, settings=settings_of(kind))


def four_turns(house: House, sampling: SamplingSettings, *, restarting: bool) -> str:
    chat_id: str | None = None
    for number in range(4):
        view = house.say(f"Turn {number}, please.", chat_id, sampling)
        assert view.messages[-1].error is None
        chat_id = view.conversation.id
        house.check_invariant(chat_id)
        if number:
            # A random model may be cut inside a character: a state then goes back to its last boundary.
            allowed = 0 if house.loaded in map(model, ROW_MODELS) else sampling.max_new_tokens
            assert stats(view).num_read_again <= allowed, stats(view)
        if restarting:
            house.restart()
    assert chat_id is not None
    return chat_id


@saved_kinds
@saved_models
def test_a_chat_with_a_restart_after_every_turn_goes_on_as_if_there_had_been_none(
    tmp_path: Path, kind: CacheKind, name: str
) -> None:
    """Law 3: equal ids, byte-equal rows and states; law 1: nothing is read again."""
    sampling = SEEDED
    with house_of(tmp_path / "a", kind, name) as straight, house_of(tmp_path / "b", kind, name) as restarted:
        one = four_turns(straight, sampling, restarting=False)
        two = four_turns(restarted, sampling, restarting=True)
        ids = [message.token_ids for message in straight.chats.view(OWNER, one).messages]
        assert ids == [message.token_ids for message in restarted.chats.view(OWNER, two).messages]
        straight.say("The last one.", one, sampling)
        restarted.say("The last one.", two, sampling)
        if one in straight.kept():
            assert_same_rows(straight.kept()[one].cache.rows_out(0), restarted.kept()[two].cache.rows_out(0))
        else:
            assert two not in restarted.kept()


@saved_kinds
@saved_models
def test_edits_regenerated_replies_and_restarts_keep_ids_and_rows_together(
    tmp_path: Path, kind: CacheKind, name: str
) -> None:
    """C33: the verbs that break the library's quantized cache. The same seed gives the same reply again."""
    with house_of(tmp_path, kind, name) as house:
        chat_id = house.say("A question of some length, longer than the window.").conversation.id
        view = house.say("Two.", chat_id, SEEDED)
        for restarting in (False, True):
            if restarting:
                house.restart()
            old = view.messages[-1]
            view = house.regenerate(old.id, SEEDED)
            assert view.messages[-1].token_ids == old.token_ids
            assert dict(stats(view).reasons) == {"boundary": 1} or name in MIXED_MODELS
            house.check_invariant(chat_id)
        view = house.edit(view.messages[2].id, "Another two, which is longer.")
        house.check_invariant(chat_id)
        view = house.say("Three.", chat_id)
        assert view.messages[-1].error is None
        house.check_invariant(chat_id)


@saved_kinds
@row_models
def test_a_stopped_reply_and_a_restart_cost_nothing(tmp_path: Path, kind: CacheKind, name: str) -> None:
    with house_of(tmp_path, kind, name) as house:
        view = house.say("One.")
        chat_id = view.conversation.id
        with Passes(house.loaded.model) as passes:
            passes.plan(lambda: house.chats.stop(OWNER, chat_id), 5)
            view = house.say("Two.", chat_id)
        assert view.messages[-1].status == "stopped"
        house.check_invariant(chat_id)
        house.restart()
        view = house.say("Three.", chat_id)
        assert stats(view).num_read_again == 0
        house.check_invariant(chat_id)


@saved_kinds
@row_models
def test_a_new_chat_takes_a_part_of_a_saved_segment_byte_for_byte(
    tmp_path: Path, kind: CacheKind, name: str
) -> None:
    """Segments are split at any token: in the middle of a chunk, of a byte's worth of rows, of a buffer."""
    document = "A pasted document. " * 3
    with house_of(tmp_path, kind, name) as house:
        first = house.say(document + "First question?").conversation.id
        rows = house.kept()[first].cache.rows_out(0)
        house.restart()
        view = house.say(document + "Second question?")
        num_shared = stats(view).num_disk_tokens
        assert num_shared > len(document) // 4
        ours = house.kept()[view.conversation.id].cache.rows_out(0)
        assert_same_rows(
            {each: tensor[:, :num_shared] for each, tensor in ours.items()},
            {each: tensor[:, :num_shared] for each, tensor in rows.items()},
        )
        for _ in range(2):  # both branches of the split segment, from the disk
            house.restart()
            for chat_id in (first, view.conversation.id):
                assert stats(house.say("More?", chat_id)).num_read_again == 0
                house.check_invariant(chat_id)


@saved_lossy
def test_rows_of_another_kind_are_refused_before_anything_is_read(kind: CacheKind) -> None:
    """Law 4, should a fingerprint ever be wrong."""
    rows = holding(20, "dynamic", model("llama")).rows_out(0)
    file: Any = SimpleNamespace(tensors=[info_of(name, tensor) for name, tensor in rows.items()])
    for num_held in (0, 5):
        cache = holding(num_held, kind, model("llama"))
        with pytest.raises(SegmentDamaged, match="another kind"):
            cache.take_rows(file, IDS[num_held : num_held + 20], with_state=True)
        assert len(cache) == num_held
        cache.check()


@saved_lossy
def test_kinds_never_read_each_others_rows_and_both_stay_on_disk(tmp_path: Path, kind: CacheKind) -> None:
    """Law 4: the fingerprint names the kind; law 1: whoever goes back finds everything again."""
    other: CacheKind = "native8" if kind != "native8" else "native4"
    with house_of(tmp_path, other, "llama") as house:
        chat_id = house.say("One.").conversation.id
    with house_of(tmp_path, kind, "llama") as house:
        view = house.say("Two.", chat_id)
        assert stats(view).num_disk_tokens == 0
        assert stats(view).reasons["fingerprint"] > 0
        assert stats(view).changed_setting == f"cache kind was {other}, is {kind}"
        house.restart()
        assert stats(house.say("Three.", chat_id)).num_read_again == 0
    with house_of(tmp_path, other, "llama") as house:
        view = house.say("Four.", chat_id)
        assert stats(view).num_disk_tokens > 0


def test_everything_that_rows_depend_on_is_in_the_fingerprint() -> None:
    fields = model("llama").fingerprint
    variants = [CacheSettings(), *(CacheSettings(kind=kind) for kind in QUANTIZED)]
    variants += [CacheSettings(kind="native4", group_size=32), CacheSettings(kind="hqq4", chunk_tokens=32)]
    prints = [dict(cache_fingerprint(fields, variant)) for variant in variants]
    assert len({each["cache"] for each in prints}) == len(variants)
    assert all({**each, "cache": ""} == {**fields, "cache": ""} for each in prints)
    same = [CacheSettings(kind=kind, static_tokens=77) for kind in EXACT]
    same.append(CacheSettings(growth_step=7, prefill_chunk=9))
    assert all(cache_fingerprint(fields, each) == cache_fingerprint(fields, CacheSettings()) for each in same)
    assert not have_same_rows(same[0], CacheSettings(kind="native8"))


def test_a_tight_budget_holds_more_of_a_quantized_chat(tmp_path: Path) -> None:
    """Budgets are checked with the bytes of the kind, not with those of a dense cache."""
    loaded = model("llama")
    budget = 64 * loaded.kv_bytes_per_token
    lengths: list[int] = []
    for kind in ("dynamic", "native8"):
        (tmp_path / kind).mkdir()
        with House(tmp_path / kind, loaded, max_live_bytes=budget, settings=settings_of(kind)) as house:
            view = house.say("Hi", sampling=SamplingSettings(temperature=0, max_new_tokens=400))
            reply = view.messages[-1]
            assert (reply.status, reply.finish_reason) == ("stopped", "memory")
            assert house.live.nbytes <= budget
            lengths.append(len(reply.token_ids))
    assert lengths[1] > 2 * lengths[0]


@saved_kinds
def test_the_default_model_edits_and_resumes_in_every_kind(
    tmp_path: Path, kind: CacheKind, default_model: LoadedModel
) -> None:
    """Laws 1 and 3 where answers mean something."""
    settings_of(kind)
    straight, restarted = (
        _default_model_chat(tmp_path / name, kind, default_model, restarting=name == "restarted")
        for name in ("straight", "restarted")
    )
    assert straight[0] == restarted[0]
    assert_same_rows(straight[1], restarted[1])


def _default_model_chat(
    folder: Path, kind: CacheKind, loaded: LoadedModel, *, restarting: bool
) -> tuple[list[tuple[int, ...]], Mapping[str, Tensor]]:
    """The ids of all messages after every verb, and the rows held then; nothing was read twice."""
    folder.mkdir()
    greedy = SamplingSettings(temperature=0, max_new_tokens=6)
    with House(
        folder,
        loaded,
        max_disk_bytes=10**9,
        settings=CacheSettings(kind=kind, static_tokens=ROOM),
        default_system_prompt="You are a helpful AI assistant.",
    ) as house:
        view = house.say("What is the capital of France?", None, greedy)
        assert "Paris" in view.messages[-1].text
        chat_id = view.conversation.id
        for verb in ("regenerate", "edit", "say"):
            if restarting:
                house.restart()
            if verb == "say":
                view = house.say("And of Italy? Answer in one sentence.", chat_id, greedy)
            elif verb == "regenerate":
                view = house.regenerate(view.messages[-1].id, greedy)
            else:
                view = house.edit(view.messages[-2].id, "And of Spain?", greedy)
            assert stats(view).num_read_again == 0
            house.check_invariant(chat_id)
        ids = [message.token_ids for message in view.messages]
        return ids, house.kept()[chat_id].cache.rows_out(0)


# what can be had


def test_every_kind_is_listed_and_ours_need_nothing() -> None:
    found = available_kinds("cpu")
    assert tuple(found) == KINDS
    assert all(found[kind].is_available for kind in ("dynamic", "native8", "native4", "fp8"))
    assert not available_kinds("mps")["fp8"].is_available


@exact
def test_kinds_that_are_of_use_with_cuda_only_say_so_elsewhere(kind: CacheKind) -> None:
    """C34: with a reason, and without a command, because none would help."""
    for device in ("cpu", "mps"):
        found = availability(kind, device)
        assert "CUDA" in found.reason
        assert not found.install
    assert availability(kind, "cuda").is_available


@pytest.mark.parametrize("kind", [kind for kind, made_of in QUANTIZATIONS.items() if made_of.backend])
def test_a_kind_whose_library_is_missing_says_so_and_how_to_get_it(
    kind: CacheKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C32, C34: when the toggle is looked at, and in one sentence when it is used all the same."""
    backend = QUANTIZATIONS[kind].backend
    assert backend is not None
    for module in [each for each in sys.modules if each.startswith(f"{backend.module}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, backend.module, None)
    found = availability(kind, "cpu")
    assert (found.is_available, found.install) == (False, INSTALL_BACKENDS)
    assert backend.package in found.reason
    with pytest.raises(KindUnavailable, match=backend.package) as refusal:
        KVCache(model("llama").model, CacheSettings(kind=kind))
    assert isinstance(refusal.value, ChatError)
    assert INSTALL_BACKENDS in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_packages_to_install_are_pinned_in_the_file_that_is_named() -> None:
    file = Path(__file__).parents[2] / INSTALL_BACKENDS.split()[-1]
    lines = [line.split("==")[0] for line in file.read_text().splitlines() if not line.startswith("#")]
    assert sorted(lines) == sorted(
        {made_of.backend.package for made_of in QUANTIZATIONS.values() if made_of.backend}
    )


@pytest.mark.parametrize(
    "wrong",
    [{"kind": "native3"}, {"group_size": 0}, {"chunk_tokens": 0}, {"growth_step": 0}, {"static_tokens": 0}],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"kind|at least 1"):
        CacheSettings(**wrong)


@pytest.mark.parametrize(("name", "num_places"), [("llama", 1), ("gemma4_text", 2)])
@torch.inference_mode()
def test_where_layers_read_each_others_rows_none_unpacks_over_anothers(name: str, num_places: int) -> None:
    """There the working memory is not shared; see `Workspace`."""
    assert shares_rows(text_config(model(name).model)) == (num_places == 2)
    cache = holding(20, "native8", model(name))
    layer = next(each for each in layers(cache) if isinstance(each, PackedLayer))
    shape = 1, layer.buffers[0].shape[0], 1, layer.buffers[0].shape[2]
    seen = [layer.update(torch.zeros(shape), torch.zeros(shape))[0] for _ in range(2)]
    assert len({states.data_ptr() for states in seen}) == num_places


def test_a_greedy_chat_is_written_the_same_again(tmp_path: Path) -> None:
    """Law 3 without a seed."""
    replies: list[tuple[int, ...]] = []
    for name in ("a", "b"):
        with house_of(tmp_path / name, "native4", "llama") as house:
            replies.append(house.say("Once more.", sampling=GREEDY).messages[-1].token_ids)
    assert replies[0] == replies[1]

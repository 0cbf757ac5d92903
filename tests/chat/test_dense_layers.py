"""Offloaded layers and layers of fixed size hold what a growing layer holds, and fetch what comes next.

On the CPU, where the place that attention looks at is a copy in the same memory: everything but the streams
is as on a CUDA device (`tests/cuda` has the rest).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import chat.layers.growing
import chat.layers.prefetch
from chat.errors import MemoryLimit
from chat.kv_cache import KVCache
from chat.layers.growing import GrowingLayer
from chat.layers.offloaded import OffloadedLayer, in_turn
from chat.layers.prefetch import Prefetcher
from chat.layers.static import OffloadedStaticLayer, StaticLayer
from chat.layers.workspace import Workspace
from chat.settings import CacheKind, CacheSettings
from tests.chat.passes import llama, out_of_memory_in
from tests.tiny_models import tiny_llama, tiny_model

HEADS, HEAD_DIM, STEP, ROOM = 2, 4, 16, 600
IDS = tuple(range(20, 220))


def states(num_tokens: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values `[1, HEADS, num_tokens, HEAD_DIM]` in which every number differs."""
    size = HEADS * num_tokens * HEAD_DIM
    keys = torch.arange(first, first + size, dtype=torch.float32).reshape(1, HEADS, num_tokens, HEAD_DIM)
    return keys, keys + 0.5


def prefetcher(*, shared: bool = True) -> Prefetcher:
    return Prefetcher(Workspace(shared=shared))


MAKERS: dict[str, Callable[[], GrowingLayer]] = {
    "offloaded": lambda: OffloadedLayer(STEP, prefetcher()),
    "static": lambda: StaticLayer(ROOM),
    "offloaded static": lambda: OffloadedStaticLayer(ROOM, prefetcher()),
}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


class Copies:
    """How many rows of keys were copied to the places that attention looks at, fetched ahead or at the time
    they were wanted, and from there back to where they are kept."""

    def __init__(self) -> None:
        self.ahead = self.late = 0


@contextmanager
def counted(fetcher: Prefetcher) -> Generator[Copies]:
    """What a prefetcher copies from now on."""
    copies, copy_rows, is_ahead = Copies(), chat.layers.prefetch.copy_rows, False
    fetch_ahead = fetcher.fetch_ahead

    def watched(rows: Any, target: Any, start: int) -> None:
        if is_ahead:
            copies.ahead += rows["keys"].shape[1]
        else:
            copies.late += rows["keys"].shape[1]
        copy_rows(rows, target, start)

    def watched_ahead(*args: Any) -> None:
        nonlocal is_ahead
        is_ahead = True
        fetch_ahead(*args)
        is_ahead = False

    chat.layers.prefetch.copy_rows = watched
    cast("Any", fetcher).fetch_ahead = watched_ahead
    try:
        yield copies
    finally:
        chat.layers.prefetch.copy_rows = copy_rows


class LatePrefetcher(Prefetcher):
    """Copies ahead as late as a stream of its own may: when somebody waits for it."""

    def __init__(self, workspace: Workspace) -> None:
        super().__init__(workspace)
        self._pending: list[tuple[Any, Any, int]] = []

    @contextmanager
    def _beside(self, device: torch.device, place: Any) -> Generator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chat.layers.prefetch, "copy_rows", lambda *args: self._pending.append(args))
            yield

    def _wait_for_copies(self, device: torch.device) -> None:
        while self._pending:
            chat.layers.prefetch.copy_rows(*self._pending.pop(0))


PREFETCHERS: dict[str, Callable[[], Prefetcher]] = {
    "shared": prefetcher,
    "apart": lambda: prefetcher(shared=False),
    "late": lambda: LatePrefetcher(Workspace(shared=True)),
    "late, apart": lambda: LatePrefetcher(Workspace(shared=False)),
}


def chain(number: int, fetcher: Prefetcher) -> list[OffloadedLayer]:
    layers = [OffloadedLayer(STEP, fetcher) for _ in range(number)]
    in_turn(layers)
    return layers


def one_pass(layers: list[OffloadedLayer], num_tokens: int, first: int) -> None:
    """As a model does it; each layer sees its own rows, whatever was fetched before."""
    for number, layer in enumerate(layers):
        held = {side: part.clone() for side, part in layer.rows_out(0).items()}
        new = states(num_tokens, first + 10_000 * number)
        seen = layer.update(*new)
        for side, mine, theirs in zip(("keys", "values"), seen, new, strict=True):
            expected = torch.cat((held[side][None], theirs), -2) if held else theirs
            assert torch.equal(mine, expected)
            assert torch.equal(layer.rows_out(0)[side], expected[0])


# rows


ACTIONS = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 40)),
    st.tuples(st.just("update"), st.integers(1, 40)),
    st.tuples(st.just("crop"), st.integers(0, 40)),
)


@makers
@given(actions=st.lists(ACTIONS, max_size=12))
@settings(max_examples=40, deadline=None)
def test_they_hold_byte_for_byte_what_a_growing_layer_holds(
    make: Callable[[], GrowingLayer], actions: list[tuple[str, int]]
) -> None:
    """Law 3."""
    ours, growing = make(), GrowingLayer(STEP)
    if isinstance(ours, OffloadedLayer):
        in_turn([ours])  # fetches its own rows ahead: what was cropped meanwhile must not be used
    for number, (verb, count) in enumerate(actions):
        if verb == "crop":
            for layer in (ours, growing):
                layer.crop(-count)
        elif verb == "append":
            for layer in (ours, growing):
                layer.append(*states(count, 1000 * number))
        else:
            mine, theirs = (layer.update(*states(count, 1000 * number)) for layer in (ours, growing))
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert ours.num_tokens == growing.num_tokens
        assert ours.get_mask_sizes(3) == growing.get_mask_sizes(3)
        for name, part in growing.rows_out(0).items():
            assert torch.equal(ours.rows_out(0)[name], part)


@makers
def test_rows_from_elsewhere_are_taken_and_copied(make: Callable[[], GrowingLayer]) -> None:
    """As the disk, a copied beginning and a change of kind do it."""
    keys, values = states(50)
    source = make()
    source.append(keys, values)
    copy = make()
    copy.copy_from(source, 33)
    source.crop_to(0)
    copy.take_copies({"keys": keys[0, :, 33:], "values": values[0, :, 33:]}, torch.device("cpu"))
    assert torch.equal(copy.rows_out(0)["keys"], keys[0])
    more = states(2, 900)
    assert torch.equal(copy.update(*more)[1], torch.cat((values, more[1]), -2))


@makers
def test_forgetting_everything_frees_the_memory(make: Callable[[], GrowingLayer]) -> None:
    layer = make()
    layer.update(*states(50))
    layer.reset()
    assert layer.nbytes == layer.num_tokens == layer.capacity == 0
    keys, _ = layer.update(*states(2, 900))
    assert torch.equal(keys, states(2, 900)[0])


@makers
def test_the_library_sees_a_croppable_layer(make: Callable[[], GrowingLayer]) -> None:
    layer = make()
    layer.update(*states(3))
    assert layer.is_croppable
    assert not layer.is_sliding


@pytest.mark.parametrize("failing_call", [1, 2])
def test_running_out_of_memory_while_growing_leaves_an_offloaded_layer_that_can_still_be_used(
    failing_call: int,
) -> None:
    """C31."""
    layer = OffloadedLayer(STEP, prefetcher())
    layer.update(*states(STEP))
    with out_of_memory_in(chat.layers.growing, "grown", failing_call), pytest.raises(torch.OutOfMemoryError):
        layer.update(*states(1))
    assert torch.equal(layer.rows_out(0)["keys"], states(STEP)[0][0])
    assert torch.equal(layer.update(*states(3, 500))[0], torch.cat([states(STEP)[0], states(3, 500)[0]], -2))


# fetching ahead


@pytest.mark.parametrize("make", PREFETCHERS.values(), ids=PREFETCHERS.keys())
@pytest.mark.parametrize("num_layers", [1, 2, 3, 5])
def test_every_layer_sees_its_own_rows_pass_after_pass(
    num_layers: int, make: Callable[[], Prefetcher]
) -> None:
    """Two places for all layers, used in turn; also when pieces differ, or layers are cropped between."""
    layers = chain(num_layers, make())
    for number, count in enumerate((20, 1, 1, 7, 40, 1)):
        one_pass(layers, count, 100_000 * number)
    for kept in (50, 13):
        for layer in layers:
            layer.crop_to(kept)
        one_pass(layers, 1, 900_000 + kept)
        one_pass(layers, 30, 910_000 + kept)


def test_while_decoding_all_rows_are_there_before_they_are_wanted() -> None:
    """And only what is new goes back: the cost of a token is one copy of the rows, and nothing else."""
    fetcher = prefetcher()
    layers = chain(3, fetcher)
    one_pass(layers, 20, 0)
    one_pass(layers, 1, 1000)
    with counted(fetcher) as copies:
        one_pass(layers, 1, 2000)
    assert (copies.ahead, copies.late) == (21 + 21 + 22, 0)


@pytest.mark.parametrize("make", PREFETCHERS.values(), ids=PREFETCHERS.keys())
def test_what_was_fetched_for_another_cache_is_never_used(make: Callable[[], Prefetcher]) -> None:
    """Two chats take turns with one prefetcher."""
    fetcher = make()
    one, other = chain(2, fetcher), chain(2, fetcher)
    for number in range(4):
        one_pass(one, 5, 1000 * number)
        one_pass(other, 3, 500_000 + 1000 * number)


def test_a_layer_that_gained_rows_from_elsewhere_has_them_added_to_what_was_fetched() -> None:
    fetcher = prefetcher()
    layers = chain(2, fetcher)
    for number in range(2):
        one_pass(layers, 10, 1000 * number)
    for layer in layers:
        layer.crop_to(7)
        keys, values = states(2, 70_000)
        layer.take_copies({"keys": keys[0], "values": values[0]}, torch.device("cpu"))
    with counted(fetcher) as copies:
        one_pass(layers, 1, 80_000)
    assert copies.late == 2, "the first layer's seven were there already"


def test_models_whose_layers_look_at_each_others_rows_get_places_that_nobody_overwrites() -> None:
    fetcher = prefetcher(shared=False)
    layers = chain(4, fetcher)
    one_pass(layers, 20, 0)
    seen = [layer.update(*states(1, 1000 * number))[0] for number, layer in enumerate(layers)]
    whole = [each.clone() for each in seen]
    one_pass(layers, 1, 9000)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(seen, whole, strict=True))


def test_a_thread_that_waits_for_rows_is_not_surprised_by_another_that_has_waited() -> None:
    """Several threads read files into the rows behind: one may forget what the other is about to wait for."""
    layer = OffloadedLayer(STEP, prefetcher())
    layer.update(*states(4))
    written = iter([SimpleNamespace(synchronize=lambda: None)])

    class Hasty(OffloadedLayer):
        """Whoever looks a second time finds that the other thread was faster."""

        @property
        def _written(self) -> Any:
            return next(written, None)

        @_written.setter
        def _written(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
            pass

    layer.__class__ = Hasty
    assert layer.room(0, 4)["keys"].shape == (HEADS, 4, HEAD_DIM)
    assert next(written, None) is None, "it has waited"


def test_a_cache_that_is_let_go_is_not_kept_alive() -> None:
    """C30: neither by what was fetched for it nor by its layers among each other."""
    cache = KVCache(llama().model, CacheSettings(growth_step=STEP, kind="offloaded"))
    cache.feed(IDS[:20])
    buffers = [weakref.ref(buffer) for layer in cast("Any", cache)._rows for buffer in layer.buffers]
    gc.disable()
    try:
        del cache
        assert not any(buffer() is not None for buffer in buffers)
    finally:
        gc.enable()


def test_a_real_model_finds_all_rows_fetched_also_the_first_layers_in_the_next_pass() -> None:
    """Layers that only read others' rows are left out of the turn."""
    cache = KVCache(
        tiny_model("gemma4_text", layer_types=["full_attention"] * 4).model, CacheSettings(kind="offloaded")
    )
    cache.feed(IDS[:20])
    cache.feed(IDS[20:21])
    layers = [layer for layer in cast("Any", cache)._rows if layer.num_tokens]
    assert len(layers) == 2
    with counted(layers[0]._prefetcher) as copies:
        cache.feed(IDS[21:22])
    assert copies.late == 0
    assert copies.ahead == 21 + 22


# fixed size


@pytest.mark.parametrize("make", [MAKERS["static"], MAKERS["offloaded static"]])
def test_room_is_allocated_once_and_nothing_ever_moves(make: Callable[[], GrowingLayer]) -> None:
    """C35."""
    layer = make()
    layer.reserve(10)
    places: set[int] = set()
    for number in range(ROOM // 50):
        layer.update(*states(50, 1000 * number))
        places |= {buffer.data_ptr() for buffer in layer.buffers}
        assert layer.capacity == ROOM
    assert len(places) == 2
    layer.crop_to(3)
    assert layer.capacity == ROOM


@pytest.mark.parametrize("make", [MAKERS["static"], MAKERS["offloaded static"]])
def test_more_than_there_is_room_for_is_refused_before_anything_changes(
    make: Callable[[], GrowingLayer],
) -> None:
    """C35."""
    layer = make()
    layer.update(*states(ROOM - 1))
    for number in (ROOM + 1, 10 * ROOM):
        with pytest.raises(MemoryLimit, match=r"601|6,000"):
            layer.reserve(number)
    with pytest.raises(MemoryLimit, match="your text is kept"):
        layer.update(*states(2))
    assert layer.num_tokens == ROOM - 1
    layer.update(*states(1))
    assert layer.num_tokens == ROOM


@pytest.mark.parametrize("kind", ["static", "offloaded_static"])
def test_room_is_what_the_settings_say_or_what_the_model_can_read(kind: CacheKind) -> None:
    for wanted, context, room in ((50, 2048, 50), (5000, 64, 64)):
        loaded = tiny_llama(max_position_embeddings=context)
        cache = KVCache(loaded.model, CacheSettings(kind=kind, static_tokens=wanted))
        assert cache.nbytes_for(1) == cache.nbytes_for(room) == room * loaded.kv_bytes_per_token
        cache.feed(IDS[:3])
        assert cache.nbytes == room * loaded.kv_bytes_per_token
        assert cache.capacity == room
        with pytest.raises(MemoryLimit):
            cache.nbytes_for(room + 1)


# changing among dense kinds


DENSE: tuple[CacheKind, ...] = ("dynamic", "offloaded", "static", "offloaded_static")


@pytest.mark.parametrize("old", DENSE)
@pytest.mark.parametrize("new", DENSE)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "falcon_h1"])
def test_a_dense_cache_becomes_any_other_byte_for_byte(old: CacheKind, new: CacheKind, name: str) -> None:
    model = tiny_model(name).model
    source, straight = (KVCache(model, CacheSettings(growth_step=STEP, kind=old)) for _ in range(2))
    target = KVCache(model, CacheSettings(growth_step=STEP, kind=new))
    for cache in (source, straight):
        cache.feed(IDS[:41])
    assert source.can_convert_to(target.settings)
    if source.has_rows():
        copy = source.copy_prefix(30, 60, target.settings)
        assert copy.settings.kind == new
        assert torch.equal(copy.feed(IDS[30:33]), source.copy_prefix(30).feed(IDS[30:33]))
    target = source.turned_into(target, 60)
    assert target.token_ids == IDS[:41]
    assert torch.equal(target.feed(IDS[41:44]), straight.feed(IDS[41:44]))
    rows = straight.rows_out(0)
    assert all(torch.equal(part, rows[each]) for each, part in target.rows_out(0).items())

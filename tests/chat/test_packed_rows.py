"""Packed rows stand for themselves: how they come, go and return changes no byte of any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import chat.layers.packed
from chat.layers.affine import (
    AffineCodec,
    between_extremes,
    least_error,
    pack_bits,
    rotate,
    rotate_back,
    unpack_bits,
)
from chat.layers.chunked import ChunkedLayer
from chat.layers.contract import RowLayer, layer_nbytes
from chat.layers.fp8 import Fp8Codec
from chat.layers.packed import PackedLayer, RowCodec
from chat.layers.workspace import Workspace
from tests.chat.passes import out_of_memory_in

HEADS, STEP, CHUNK = 2, 16, 8

CODECS: Mapping[str, RowCodec] = {
    "8 bit": AffineCodec(8, 8, between_extremes),
    "4 bit rotated": AffineCodec(4, 8, least_error, rotated=True),
    "2 bit": AffineCodec(2, 8, between_extremes),
    "fp8": Fp8Codec(),
}
WIDTHS = (1, 2, 3, 7, 8, 9, 16, 20, 24, 31, 80)

codecs = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
widths = pytest.mark.parametrize("width", WIDTHS)


def noise(num_tokens: int, width: int, seed: int = 0) -> Tensor:
    """Rows `[HEADS, num_tokens, width]`, one element in each of which is far larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(HEADS, num_tokens, width, generator=generator)
    rows[..., 0] *= 20
    return rows


def unpacked(codec: RowCodec, parts: Mapping[str, Tensor], width: int) -> Tensor:
    num_tokens = next(iter(parts.values())).shape[1]
    out = torch.full((HEADS, num_tokens, width), torch.nan)
    codec.unpack(parts, out, Workspace(shared=True))
    return out


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Byte for byte; what is compared are codes, of which some types have no equality."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        mine, theirs = tensor.contiguous(), other[name].contiguous()
        assert mine.shape == theirs.shape, name
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), name


# codecs


@codecs
@widths
def test_a_row_is_packed_alike_whatever_is_packed_with_it(codec: RowCodec, width: int) -> None:
    """Else a cropped or restored chat would depend on how its text had been cut into passes."""
    rows = noise(300, width)
    together = codec.pack(rows)
    for start, end in ((0, 1), (1, 3), (3, 40), (40, 299), (299, 300)):
        alone = codec.pack(rows[:, start:end])
        assert_same(alone, {name: part[:, start:end] for name, part in together.items()})


@codecs
@widths
def test_parts_have_the_types_and_widths_that_were_foretold(codec: RowCodec, width: int) -> None:
    parts = codec.pack(noise(5, width))
    assert {name: (part.dtype, part.shape[-1]) for name, part in parts.items()} == codec.parts(width)
    assert all(part.shape[:2] == (HEADS, 5) for part in parts.values())


@widths
def test_eight_bits_are_off_by_half_a_step_at_most(width: int) -> None:
    rows, codec = noise(40, width), CODECS["8 bit"]
    parts = codec.pack(rows)
    step = (parts["high"].float() - parts["low"].float()).amax(-1, keepdim=True) / 255
    rounding = rows.abs().amax(-1, keepdim=True) / 2**11  # of the scale's ends, in half precision
    assert ((unpacked(codec, parts, width) - rows).abs() <= step * 0.501 + rounding).all()


def test_every_number_of_eight_bit_floating_point_is_unpacked_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()]
    parts = {"codes": codes.expand(HEADS, 1, -1), "peak": torch.full((HEADS, 1, 1), 448.0).half()}
    assert torch.equal(unpacked(CODECS["fp8"], parts, len(codes))[0, 0], codes.float())


@pytest.mark.parametrize("width", [16, 64, 80, 128])
def test_a_rotation_spares_a_row_the_cost_of_its_largest_element(width: int) -> None:
    """What it is for: without it the small elements drown in the steps that the large one needs."""
    rows = noise(200, width)
    errors = [
        (unpacked(codec, codec.pack(rows), width) - rows)[..., 1:].square().mean()
        for codec in (AffineCodec(4, 64, least_error), AffineCodec(4, 64, least_error, rotated=True))
    ]
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("bits", [2, 4])
def test_the_scale_with_the_least_error_is_no_worse_than_the_one_that_spans_all(bits: int) -> None:
    rows = noise(300, 64)
    errors = [
        (unpacked(codec, codec.pack(rows), 64) - rows).square().sum(-1)
        for codec in (AffineCodec(bits, 64, between_extremes), AffineCodec(bits, 64, least_error))
    ]
    assert (errors[1] <= errors[0] * 1.0001).all()
    assert errors[1].sum() < 0.95 * errors[0].sum()


@codecs
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-12, 1e-4, 1e4, 6e4, 1e9, -1e30])
def test_a_row_of_equal_elements_comes_back_finite_and_near(codec: RowCodec, value: float) -> None:
    """Nothing to scale by; values beyond half precision are cut off there, never infinite."""
    rows = torch.full((HEADS, 3, 16), value)
    back = unpacked(codec, codec.pack(rows), 16)
    assert back.isfinite().all()
    if abs(value) < 65504 / 4:  # a rotation of 16 equal elements makes one four times as large
        torch.testing.assert_close(back, rows, rtol=2**-10, atol=1e-7)


@codecs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_come_back_in_the_precision_that_is_asked_for(codec: RowCodec, dtype: torch.dtype) -> None:
    rows = noise(20, 16).to(dtype)
    parts = codec.pack(rows)
    out = torch.empty(HEADS, 20, 16, dtype=dtype)
    codec.unpack(parts, out, Workspace(shared=True))
    torch.testing.assert_close(out.float(), unpacked(codec, parts, 16), rtol=2**-6, atol=0.2)


@given(st.integers(1, 40), st.sampled_from([2, 4, 8]), st.integers(0, 2**32))
@settings(max_examples=60)
def test_packed_bits_are_unpacked(width: int, bits: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (2, 3, width), dtype=torch.uint8, generator=generator)
    packed = pack_bits(codes, bits)
    assert packed.shape[-1] == -(-width // (8 // bits))
    out = torch.full((2, 3, width), -1.0)
    unpack_bits(packed, bits, out)
    assert torch.equal(out, codes.float())


@widths
def test_a_rotation_keeps_lengths_and_can_be_taken_back(width: int) -> None:
    rows = noise(10, width)
    rotated, back = rotate(rows), torch.empty_like(rows)
    torch.testing.assert_close(rotated.norm(dim=-1), rows.norm(dim=-1))
    rotate_back(rotated, back)
    torch.testing.assert_close(back, rows, rtol=1e-4, atol=1e-4)


# layers


@dataclass(frozen=True)
class Rows:
    """States in which every row is another one, to be appended from any of them on."""

    keys: Tensor
    values: Tensor

    @classmethod
    def random(cls, num_tokens: int, seed: int = 0, key_width: int = 16, value_width: int = 16) -> Rows:
        return cls(noise(num_tokens, key_width, seed)[None], noise(num_tokens, value_width, seed + 1)[None])

    def between(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        return self.keys[:, :, start:end], self.values[:, :, start:end]


def packed_layer(codec: RowCodec = CODECS["4 bit rotated"]) -> PackedLayer:
    return PackedLayer(STEP, codec, Workspace(shared=True))


def chunked_layer(codec: RowCodec = CODECS["8 bit"]) -> ChunkedLayer:
    return ChunkedLayer(STEP, codec, Workspace(shared=True), CHUNK)


MAKERS: Mapping[str, Callable[[], RowLayer]] = {
    **{name: lambda codec=codec: packed_layer(codec) for name, codec in CODECS.items()},
    "chunked": chunked_layer,
}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 40)),
        st.tuples(st.just("crop"), st.integers(0, 60)),
    ),
    max_size=10,
)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
@given(actions=ACTIONS)
@settings(max_examples=25)
def test_whatever_was_appended_and_cropped_the_rows_are_those_of_one_append(
    codec: RowCodec, actions: list[tuple[str, int]]
) -> None:
    """Law 3: crop and append are exact; nothing is packed twice, whatever the passes were."""
    layer, kept = packed_layer(codec), Rows.random(0)
    for number, (verb, count) in enumerate(actions):
        if verb == "append":
            new = Rows.random(count, seed=number)
            layer.update(*new.between(0, count))
            kept = Rows(torch.cat((kept.keys, new.keys), 2), torch.cat((kept.values, new.values), 2))
        else:
            num_left = max(0, layer.num_tokens - count)
            layer.crop_to(num_left)
            kept = Rows(*kept.between(0, num_left))
        assert layer.num_tokens == layer.get_seq_length() == kept.keys.shape[2]
    if layer.num_tokens:
        straight = packed_layer(codec)
        straight.append(kept.keys, kept.values)
        assert_same(layer.rows_out(0), straight.rows_out(0))


@makers
def test_a_pass_sees_its_own_rows_as_they_are_and_earlier_ones_nearly(make: Callable[[], RowLayer]) -> None:
    layer, rows = make(), Rows.random(60)
    layer.update(*rows.between(0, 30))
    seen = layer.update(*rows.between(30, 60))
    for states, new in zip(seen, rows.between(30, 60), strict=True):
        assert states.shape == (1, HEADS, 60, 16)
        assert torch.equal(states[:, :, 30:], new)
    error = (seen[0][:, :, :30] - rows.keys[:, :, :30]).norm() / rows.keys[:, :, :30].norm()
    assert 0 < error < 0.3


@makers
def test_keys_and_values_may_differ_in_width(make: Callable[[], RowLayer]) -> None:
    """As with latent attention."""
    layer, rows = make(), Rows.random(20, key_width=24, value_width=5)
    layer.update(*rows.between(0, 17))
    keys, values = layer.update(*rows.between(17, 20))
    assert (keys.shape[-1], values.shape[-1]) == (24, 5)
    torch.testing.assert_close(values[:, :, :17], rows.values[:, :, :17], rtol=0.2, atol=8)


@makers
def test_a_copied_beginning_is_byte_equal_and_stands_alone(make: Callable[[], RowLayer]) -> None:
    layer, rows = make(), Rows.random(45)
    layer.append(*rows.between(0, 45))
    for length in (0, 1, 7, 8, 40, 41, 45):
        copy = make()
        copy.copy_from(layer, length)
        assert copy.num_tokens == length
        if not length:
            continue
        seen, expected = copy.update(*rows.between(0, 1)), None
        other = make()
        other.copy_from(layer, 45)
        other.crop_to(length)
        expected = other.update(*rows.between(0, 1))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(seen, expected, strict=True))
    layer.crop_to(0)
    layer.append(*Rows.random(45, seed=5).between(0, 45))
    assert_same(copy.room(0, 40), other.room(0, 40))


@makers
def test_rows_that_went_out_and_came_back_are_the_same(make: Callable[[], RowLayer]) -> None:
    """Law 3, as the disk does it: in pieces of any length, behind rows that are already there."""
    layer, rows = make(), Rows.random(50)
    pieces: list[dict[str, Tensor]] = []
    for start, end in ((0, 1), (1, 20), (20, 33), (33, 50)):
        layer.append(*rows.between(start, end))
        pieces.append({name: part.clone() for name, part in layer.rows_out(start).items()})
    back, held = make(), 0
    for piece in pieces:
        num_tokens = held + next(iter(piece.values())).shape[1]
        back.prepare({name: part[:, :0] for name, part in piece.items()}, num_tokens)
        for name, part in back.room(held, num_tokens).items():
            part.copy_(piece[name])
        back.adopt(num_tokens)
        held = num_tokens
    assert back.num_tokens == 50
    assert_same(back.rows_out(0), layer.rows_out(0))
    seen = zip(back.update(*rows.between(0, 3)), layer.update(*rows.between(0, 3)), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in seen)


@makers
@pytest.mark.parametrize("length", [-1, 21])
def test_a_crop_to_a_length_that_is_not_held_is_refused(make: Callable[[], RowLayer], length: int) -> None:
    """C01."""
    layer = make()
    layer.append(*Rows.random(20).between(0, 20))
    with pytest.raises(ValueError, match="crop"):
        layer.crop_to(length)
    with pytest.raises(ValueError, match="negative"):
        layer.crop(1)
    assert layer.num_tokens == 20


@makers
def test_rows_that_do_not_fit_are_not_adopted(make: Callable[[], RowLayer]) -> None:
    layer = make()
    layer.append(*Rows.random(20).between(0, 20))
    for num_tokens in (19, layer.capacity + 1):
        with pytest.raises(ValueError, match="adopt"):
            layer.adopt(num_tokens)
    assert layer.num_tokens == 20


@makers
def test_appending_allocates_nothing_until_the_room_is_used_up(make: Callable[[], RowLayer]) -> None:
    """Law 5: the cost of a token does not depend on how many there are."""
    layer, rows = make(), Rows.random(1)
    layer.append(*rows.between(0, 1))
    places = {buffer.data_ptr() for buffer in layer.buffers}
    while layer.num_tokens < layer.capacity:
        layer.append(*rows.between(0, 1))
    assert layer.num_tokens == STEP
    assert {buffer.data_ptr() for buffer in layer.buffers} == places


@makers
def test_at_most_an_eighth_and_a_step_stand_empty(make: Callable[[], RowLayer]) -> None:
    layer, rows = make(), Rows.random(10)
    for _ in range(60):
        layer.append(*rows.between(0, 10))
        assert layer.num_tokens <= layer.capacity <= layer.num_tokens * 9 / 8 + STEP
    assert layer.nbytes == layer_nbytes(layer) > 0


@makers
def test_room_that_was_asked_for_early_is_there_from_the_first_row_on(make: Callable[[], RowLayer]) -> None:
    layer = make()
    layer.reserve(100)
    assert layer.nbytes == layer.capacity == 0
    layer.append(*Rows.random(1).between(0, 1))
    assert layer.capacity >= 100


@makers
def test_forgetting_everything_frees_the_memory(make: Callable[[], RowLayer]) -> None:
    layer, rows = make(), Rows.random(50)
    layer.append(*rows.between(0, 50))
    layer.reset()
    assert layer.nbytes == layer.num_tokens == layer.capacity == 0
    keys, _ = layer.update(*rows.between(0, 2))
    assert torch.equal(keys, rows.keys[:, :, :2])


@makers
@pytest.mark.parametrize("failing_call", [1, 2, 5])
def test_running_out_of_memory_while_growing_leaves_a_layer_that_can_still_be_used(
    make: Callable[[], RowLayer], failing_call: int
) -> None:
    """C31: one part after the other grows; any of them may be refused."""
    layer, rows = make(), Rows.random(STEP + 3)
    num_parts = len(layer.part_names)
    layer.append(*rows.between(0, STEP))
    before = {name: part.clone() for name, part in layer.rows_out(0).items()}
    if failing_call <= num_parts:
        with (
            out_of_memory_in(chat.layers.packed, "grown", failing_call),
            pytest.raises(torch.OutOfMemoryError),
        ):
            layer.update(*rows.between(STEP, STEP + 3))
    assert layer.num_tokens == STEP
    assert_same(layer.rows_out(0), before)
    layer.update(*rows.between(STEP, STEP + 3))
    straight = make()
    straight.append(*rows.between(0, STEP + 3))
    assert_same(layer.rows_out(0), straight.rows_out(0))


# chunks


def test_rows_wait_as_they_are_until_a_chunk_is_whole() -> None:
    layer, rows = chunked_layer(), Rows.random(CHUNK + 1)
    for number in range(CHUNK - 1):
        layer.append(*rows.between(number, number + 1))
    assert layer.num_packed == 0
    keys, _ = layer.update(*rows.between(CHUNK - 1, CHUNK))
    assert torch.equal(keys, rows.keys[:, :, :CHUNK])
    assert layer.num_packed == CHUNK
    keys, _ = layer.update(*rows.between(CHUNK, CHUNK + 1))
    assert not torch.equal(keys[:, :, :CHUNK], rows.keys[:, :, :CHUNK])


def test_many_rows_at_once_leave_only_what_is_no_whole_chunk_waiting() -> None:
    layer, rows = chunked_layer(), Rows.random(100)
    layer.append(*rows.between(0, 5))
    layer.append(*rows.between(5, 5 * CHUNK + 3))
    assert (layer.num_packed, layer.num_tokens) == (5 * CHUNK, 5 * CHUNK + 3)


@pytest.mark.parametrize("kept", range(3 * CHUNK + 4))
def test_a_crop_changes_nothing_of_what_stays(kept: int) -> None:
    """In the tail, at the edge of a chunk, and within one: packed rows stay packed, waiting ones waiting."""
    layer, rows = chunked_layer(), Rows.random(4 * CHUNK)
    layer.append(*rows.between(0, 3 * CHUNK + 4))
    whole = [states.clone() for states in layer.update(*rows.between(0, 1))]
    layer.crop_to(kept)
    assert layer.num_packed == min(kept, 3 * CHUNK)
    if kept:
        for states, before in zip(layer.update(*rows.between(0, 1)), whole, strict=True):
            assert torch.equal(states[:, :, :kept], before[:, :, :kept])


@pytest.mark.parametrize("kept", [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 3])
def test_crop_then_append_equals_append_where_a_turn_ended(kept: int) -> None:
    """What a turn ends with is saved, and packed by that: regenerating begins there."""
    rows, straight, back = Rows.random(4 * CHUNK), chunked_layer(), chunked_layer()
    for layer in (straight, back):
        layer.append(*rows.between(0, kept))
        layer.rows_out(0)
    back.append(*Rows.random(2 * CHUNK + 5, seed=9).between(0, 2 * CHUNK + 5))
    back.crop_to(kept)
    for layer in (straight, back):
        layer.append(*rows.between(kept, 4 * CHUNK))
    assert straight.num_packed == back.num_packed
    assert_same(straight.rows_out(0), back.rows_out(0))


def test_crop_then_append_equals_append_within_the_tail() -> None:
    rows, straight, back = Rows.random(4 * CHUNK), chunked_layer(), chunked_layer()
    for layer in (straight, back):
        layer.append(*rows.between(0, CHUNK + 2))
    back.append(*Rows.random(5, seed=9).between(0, 5))
    back.crop_to(CHUNK + 2)
    for layer in (straight, back):
        layer.append(*rows.between(CHUNK + 2, 4 * CHUNK))
    assert straight.num_packed == back.num_packed == 4 * CHUNK
    assert_same(straight.rows_out(0), back.rows_out(0))


def test_what_went_out_is_what_is_held_from_then_on() -> None:
    """Else a restart would bring back other rows than those a live chat goes on with."""
    layer, rows = chunked_layer(), Rows.random(CHUNK + 5)
    layer.append(*rows.between(0, CHUNK + 4))
    saved = {name: part.clone() for name, part in layer.rows_out(0).items()}
    assert layer.num_packed == layer.num_tokens == CHUNK + 4
    restored = chunked_layer()
    restored.prepare({name: part[:, :0] for name, part in saved.items()}, CHUNK + 4)
    for name, part in restored.room(0, CHUNK + 4).items():
        part.copy_(saved[name])
    restored.adopt(CHUNK + 4)
    new = rows.between(CHUNK + 4, CHUNK + 5)
    seen = zip(layer.update(*new), restored.update(*new), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in seen)


def test_rows_from_elsewhere_come_behind_rows_that_were_waiting() -> None:
    """Where a live cache goes on with rows from the disk before its own were saved."""
    rows, saved, cache = Rows.random(CHUNK + 5), chunked_layer(), chunked_layer()
    saved.append(*rows.between(0, CHUNK + 5))
    cache.append(*rows.between(0, 3))
    new = saved.rows_out(3)
    cache.prepare({name: part[:, :0] for name, part in new.items()}, CHUNK + 5)
    for name, part in cache.room(3, CHUNK + 5).items():
        part.copy_(new[name])
    cache.adopt(CHUNK + 5)
    assert_same(cache.rows_out(0), saved.rows_out(0))


# working memory


def test_layers_unpack_into_the_same_memory_unless_one_looks_at_anothers() -> None:
    rows = Rows.random(20)
    shared, apart = Workspace(shared=True), Workspace(shared=False)
    for workspace, num_places in ((shared, 1), (apart, 2)):
        layers = [PackedLayer(STEP, CODECS["8 bit"], workspace) for _ in range(2)]
        for layer in layers:
            layer.append(*rows.between(0, 10))
        seen = [layer.update(*rows.between(10, 20))[0] for layer in layers]
        assert len({states.data_ptr() for states in seen}) == num_places


def test_working_memory_moves_rarely_while_a_chat_grows() -> None:
    workspace, row = Workspace(shared=True), torch.empty(1, HEADS, 1, 16)
    places = {workspace.take("keys", row, num_tokens).data_ptr() for num_tokens in range(1, 3000)}
    assert len(places) < 15

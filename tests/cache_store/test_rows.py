"""Text, ids and settings come back from the tables as they went in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.errors import DatabaseDamaged
from cache_store.records import Json
from cache_store.rows import message_from_row, pack_ids, pack_json, storable, unpack_ids


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_come_back_exactly(token_ids: list[int]) -> None:
    assert list(unpack_ids(pack_ids(token_ids))) == token_ids


def test_token_ids_take_four_little_endian_bytes_each() -> None:
    assert pack_ids([1, 2**32 - 1]) == b"\x01\x00\x00\x00\xff\xff\xff\xff"


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_an_impossible_token_id_is_refused(token_id: int) -> None:
    with pytest.raises(ValueError, match="token ids must lie in"):
        pack_ids([token_id])


def test_half_a_token_id_is_damage() -> None:
    with pytest.raises(DatabaseDamaged):
        unpack_ids(b"\x01\x00\x00")


@given(st.text())
def test_text_without_surrogates_is_left_alone(text: str) -> None:
    assert storable(text) == text


@given(st.text(st.characters(codec=None)))
def test_any_text_becomes_storable(text: str) -> None:
    kept = storable(text)
    kept.encode()
    assert storable(kept) == kept


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("a\ud83d", "a\ufffd"),
        ("\ude00b", "\ufffdb"),
        ("\ud83dx\ude00", "\ufffdx\ufffd"),
        ("\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        ("\ud83d\ude00", "\U0001f600"),
    ],
)
def test_half_a_surrogate_pair_becomes_a_replacement_mark_and_a_whole_pair_its_character(
    sent: str, kept: str
) -> None:
    assert storable(sent) == kept


def test_json_holds_even_what_utf8_cannot() -> None:
    stops: dict[str, Json] = {"stop_strings": ["\ud83d", "\x00", "é"]}
    packed = pack_json(stops)
    assert packed.isascii()
    assert json.loads(packed) == stops


@pytest.mark.parametrize(
    "spoiled", [{"token_ids": b"\x01"}, {"token_ids": None}, {"sampling": "{"}, {"stats": b"\xff"}]
)
def test_a_row_that_we_did_not_write_is_damage(spoiled: dict[str, object]) -> None:
    row: dict[str, object] = {
        "id": "m",
        "conversation_id": "c",
        "parent_id": None,
        "role": "user",
        "text": "Hello",
        "status": "done",
        "created_at": 1.0,
        "token_ids": b"",
        "finish_reason": None,
        "error": None,
        "sampling": "{}",
        "seed": None,
        "stats": "{}",
    }
    assert message_from_row(row).text == "Hello"
    with pytest.raises(DatabaseDamaged, match="cannot be read"):
        message_from_row({**row, **spoiled})

"""What a chat's remaining paths do not need goes, file and ids; everything else stays readable."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_store.rows import pack_ids
from tests.cache_store.kv_rows import Shelf, rows
from tests.cache_store.test_segments import PATHS, Path_, common, longest

SEVERAL = st.lists(PATHS, max_size=6)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mine=SEVERAL, others=SEVERAL, kept=SEVERAL, asked=SEVERAL)
def test_exactly_the_beginnings_of_what_remains_stay(
    tmp_path_factory: pytest.TempPathFactory,
    mine: list[Path_],
    others: list[Path_],
    kept: list[Path_],
    asked: list[Path_],
) -> None:
    """Against plain lists; another chat's rows stay whatever this one needs."""
    shelf = Shelf(tmp_path_factory.mktemp("shelf"), quick=True)
    one, other = shelf.chat(), shelf.chat()
    for path in mine:
        shelf.say(one, path)
    for path in others:
        shelf.say(other, path)
    shelf.segments.keep_paths(one.id, [shelf.fingerprint], kept)
    left = [*others, *(path[: longest(path, kept)] for path in mine)]
    for path in (*mine, *others, *kept, *asked):
        assert shelf.check_read(path) == longest(path, left)
    shelf.check()
    shelf.segments.keep_paths(one.id, [shelf.fingerprint], [])
    for path in (*mine, *others):
        assert shelf.check_read(path) == longest(path, others)
    shelf.check()
    shelf.close()


def test_ids_of_a_branch_that_went_are_in_no_file(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    chat = shelf.chat()
    kept, gone = (1, 2, 3, 4), (1, 2, 77777777, 88888888, 99999999)
    shelf.say(chat, kept)
    shelf.say(chat, gone)
    shelf.segments.keep_paths(chat.id, [shelf.fingerprint], [kept])
    assert common(kept, gone) == shelf.check_read(gone) == 2
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or pack_ids([77777777]) not in file.read_bytes()
    shelf.close()


def test_rows_of_another_model_go_because_nobody_can_tell_whose_they_are(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    chat = shelf.chat()
    old = shelf.segments.fingerprint_id({"model": "another"})
    shelf.say(chat, (1, 2), fingerprint=old)
    shelf.say(chat, (1, 2))
    shelf.segments.keep_paths(chat.id, [shelf.fingerprint], [(1, 2, 3)])
    assert shelf.check_read((1, 2)) == 2
    assert shelf.find((1, 2), fingerprint=old).num_tokens == 0
    shelf.segments.keep_paths(chat.id, [], [(1, 2)])
    assert shelf.find((1, 2)).num_tokens == 0
    shelf.close()


def test_rows_of_several_kinds_of_cache_are_drawn_back_alike(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    chat = shelf.chat()
    packed = shelf.segments.fingerprint_id({"cache": "packed"})
    shelf.say(chat, (1, 2, 3), fingerprint=packed)
    shelf.say(chat, (1, 2, 3, 4))
    shelf.segments.keep_paths(chat.id, [shelf.fingerprint, packed], [(1, 2, 9)])
    assert shelf.find((1, 2, 3)).num_tokens == shelf.find((1, 2, 3), fingerprint=packed).num_tokens == 2
    shelf.close()


def test_what_was_evicted_is_still_known_to_have_been_read(tmp_path: Path) -> None:
    """So that the next turn says why it reads it again."""
    shelf = Shelf(tmp_path)
    chat = shelf.chat()
    shelf.say(chat, (1, 2, 3))
    shelf.segments.prune(0)
    shelf.segments.keep_paths(chat.id, [shelf.fingerprint], [(1, 2)])
    assert shelf.find((1, 2)).evicted
    assert shelf.segments.last_path(chat.id, shelf.fingerprint) == (1, 2)
    shelf.close()


def test_rows_of_another_chat_that_were_never_used_by_name_stay_as_far_as_they_are_needed(
    tmp_path: Path,
) -> None:
    """A chat that went on from rows in memory hangs its own below segments that only another one had used."""
    shelf = Shelf(tmp_path)
    source, fork = shelf.chat(), shelf.chat()
    shared = shelf.say(source, (1, 2, 3))
    shelf.segments.append(
        *("ann", shelf.fingerprint, fork.id),
        parent_id=shared.segment.id,
        start=3,
        token_ids=(4, 5),
        tensors=rows((1, 2, 3, 4, 5), 3),
        seconds=1.0,
    )
    shelf.chats.delete("ann", source.id)
    shelf.segments.keep_paths(fork.id, {shelf.fingerprint}, [(1, 2, 9)])
    assert shelf.check_read((1, 2, 3, 4, 5)) == 2
    shelf.check()
    shelf.close()

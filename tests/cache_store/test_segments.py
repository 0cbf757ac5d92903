"""The tree of segments against plain lists of tokens: nothing is found that was not stored, nothing is lost
that was, and what a deleted chat had alone is gone. (C19, C20, C22, C24)"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Generator, Sequence
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache_store.errors import DiskRefused, NotFound, SegmentDamaged, SegmentGone
from cache_store.records import Chain, Conversation, Link
from cache_store.rows import pack_ids, unpack_ids
from cache_store.segment_tree import num_common
from tests.cache_store.kv_rows import FIELDS, PLENTY, Shelf, rows

Path_ = tuple[int, ...]

PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)


@pytest.fixture
def shelf(tmp_path: Path) -> Generator[Shelf]:
    shelf = Shelf(tmp_path)
    yield shelf
    shelf.close()


@pytest.fixture
def chat(shelf: Shelf) -> Conversation:
    return shelf.chat()


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def longest(path: Path_, stored: Sequence[Path_]) -> int:
    return max((common(path, other) for other in stored), default=0)


# Finding what was stored


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(paths=st.lists(PATHS, min_size=1, max_size=10), asked=st.lists(PATHS, max_size=5))
def test_the_longest_stored_beginning_is_found_whatever_was_stored_in_whatever_order(
    tmp_path_factory: pytest.TempPathFactory, paths: list[Path_], asked: list[Path_]
) -> None:
    shelf = Shelf(tmp_path_factory.mktemp("shelf"), quick=True)
    chat = shelf.chat()
    for number, path in enumerate(paths):
        link = shelf.say(chat, path)
        assert link.end == len(path)
        for other in (*paths, *asked):
            assert shelf.check_read(other) == longest(other, paths[: number + 1])
    shelf.check()
    shelf.close()


@given(one=PATHS, other=PATHS)
def test_common_tokens_are_counted_as_in_lists(one: Path_, other: Path_) -> None:
    assert num_common(pack_ids(one), pack_ids(other)) == common(one, other)


def test_token_ids_of_any_size_are_told_apart(shelf: Shelf, chat: Conversation) -> None:
    """Ids that share bytes, so that a comparison of bytes at a wrong place would be seen."""
    paths = [(256, 1), (256, 256), (65536, 0), (0, 65536), (2**32 - 1, 0), (1, 256)]
    for path in paths:
        shelf.say(chat, path)
    for path in paths:
        assert shelf.check_read(path) == 2
    assert shelf.check_read((0, 256)) == 1


def test_the_limit_cuts_the_path(shelf: Shelf, chat: Conversation) -> None:
    shelf.say(chat, range(10))
    chain = shelf.segments.find("ann", shelf.fingerprint, range(10), limit=4)
    assert (chain.num_tokens, chain.evicted) == (4, False)
    assert shelf.segments.find("ann", shelf.fingerprint, range(10), limit=0) == Chain((), False)


def test_an_empty_path_has_an_empty_chain(shelf: Shelf) -> None:
    assert shelf.find(()) == Chain((), False)
    assert shelf.read(Chain((), False))["layers.0.keys"].shape == (2, 0, 2)


def test_a_look_up_takes_as_many_queries_for_a_long_chat_as_for_a_short_one(
    shelf: Shelf, chat: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def num_queries(path: Sequence[int]) -> int:
        calls: list[str] = []
        real = shelf.database.rows
        with monkeypatch.context() as patch:
            patch.setattr(
                shelf.database, "rows", lambda sql, values=(): (calls.append(sql), real(sql, values))[1]
            )
            assert shelf.find(path).num_tokens == len(path)
        return len(calls)

    for turn in range(1, 41):
        shelf.say(chat, range(2 * turn))
    assert len(shelf.find(range(80)).links) == 40
    assert num_queries(range(80)) == num_queries(range(2))


def test_a_branch_in_the_middle_of_a_segment_neither_splits_nor_copies_it(
    shelf: Shelf, chat: Conversation
) -> None:
    first = shelf.say(chat, (1, 2, 3, 4))
    before = shelf.file_of(first).read_bytes()
    branch = shelf.say(chat, (1, 2, 9))
    assert (branch.segment.parent_id, branch.segment.start) == (first.segment.id, 2)
    assert shelf.file_of(first).read_bytes() == before
    assert branch.segment.num_tokens == 1


def test_appending_twice_writes_once(shelf: Shelf, chat: Conversation) -> None:
    first, files = append(shelf, chat, None, 0, (1, 2, 3)), shelf.files()
    again = append(shelf, chat, None, 0, (1, 2, 3))
    assert again.segment.id == first.segment.id
    assert shelf.files() == files


def test_appending_what_is_stored_in_part_writes_the_rest_only(shelf: Shelf) -> None:
    """Two chats read the same beginning at the same time; the second one to store it adds its own end."""
    ann, too = shelf.chat(), shelf.chat()
    first = append(shelf, ann, None, 0, (1, 2, 3, 4))
    second = append(shelf, too, None, 0, (1, 2, 3, 8, 9))
    assert (second.segment.parent_id, second.segment.start, second.end) == (first.segment.id, 3, 5)
    within = append(shelf, too, None, 0, (1, 2))
    assert (within.segment.id, within.num_rows) == (first.segment.id, 2)
    inside_parent = append(shelf, too, first.segment.id, 1, (2, 3, 4, 5), path=(1, 2, 3, 4, 5))
    assert (inside_parent.segment.parent_id, inside_parent.segment.start) == (first.segment.id, 4)
    shelf.check()
    assert shelf.check_read((1, 2, 3, 4, 5)) == 5


def test_seconds_are_shared_out_by_tokens(shelf: Shelf, chat: Conversation) -> None:
    append(shelf, chat, None, 0, (1, 2))
    link = append(shelf, chat, None, 0, (1, 2, 3, 4, 5, 6, 7, 8), seconds=8.0)
    assert link.segment.seconds == pytest.approx(6.0)


def append(
    shelf: Shelf,
    chat: Conversation,
    parent_id: str | None,
    start: int,
    token_ids: Path_,
    *,
    path: Path_ | None = None,
    seconds: float = 1.0,
    fingerprint: int | None = None,
    owner: str | None = None,
) -> Link:
    return shelf.segments.append(
        owner or chat.owner,
        fingerprint or shelf.fingerprint,
        chat.id,
        parent_id=parent_id,
        start=start,
        token_ids=token_ids,
        tensors=rows(path or token_ids, start),
        seconds=seconds,
    )


# States at the end of a segment


def test_a_state_belongs_to_the_end_of_its_segment_and_is_read_whole(
    shelf: Shelf, chat: Conversation
) -> None:
    link = shelf.segments.append(
        "ann",
        shelf.fingerprint,
        chat.id,
        parent_id=None,
        start=0,
        token_ids=(1, 2, 3),
        tensors={**rows((1, 2, 3)), "state.0.conv": torch.arange(6.0).reshape(1, 3, 2)},
        seconds=1.0,
    )
    with shelf.segments.open(link.segment) as file:
        state = torch.zeros(1, 3, 2)
        for info in file.tensors:
            if info.is_state:
                file.read_into(info, state)
            else:
                file.skip(info)
        file.verify()
    assert torch.equal(state, torch.arange(6.0).reshape(1, 3, 2))


def test_a_state_stays_with_the_last_piece_when_the_first_is_stored_already(
    shelf: Shelf, chat: Conversation
) -> None:
    append(shelf, chat, None, 0, (1, 2))
    link = shelf.segments.append(
        "ann",
        shelf.fingerprint,
        chat.id,
        parent_id=None,
        start=0,
        token_ids=(1, 2, 3),
        tensors={**rows((1, 2, 3)), "state.0": torch.ones(2)},
        seconds=1.0,
    )
    with shelf.segments.open(link.segment) as file:
        assert {info.name: info.shape for info in file.tensors} == {
            "layers.0.keys": (2, 1, 2),
            "layers.0.values": (2, 1, 1),
            "state.0": (2,),
        }


# Who may see what


def test_owners_never_share_whatever_they_have_in_common(shelf: Shelf) -> None:
    ann, bob = shelf.chat("ann"), shelf.chat("bob")
    mine = shelf.say(ann, (1, 2, 3))
    assert shelf.find((1, 2, 3), owner="bob") == Chain((), False)
    theirs = shelf.say(bob, (1, 2, 3))
    assert theirs.segment.id != mine.segment.id
    shelf.say(bob, (5, 6))
    assert shelf.find((5, 6), owner="ann") == shelf.find((5, 6), owner="eve") == Chain((), False)
    with pytest.raises(SegmentGone):
        append(shelf, bob, mine.segment.id, 3, (4,), path=(1, 2, 3, 4))
    with pytest.raises(NotFound):
        append(shelf, bob, mine.segment.id, 3, (4,), path=(1, 2, 3, 4), owner="ann")
    with pytest.raises(NotFound):
        shelf.segments.use(bob.id, mine)
    shelf.segments.prune(0)
    assert not shelf.find((1, 2, 3), owner="eve").evicted
    shelf.check()


def test_fingerprints_never_share(shelf: Shelf, chat: Conversation) -> None:
    """C22: same shapes, other weights."""
    other = shelf.segments.fingerprint_id({**FIELDS, "dtype": "bfloat16"})
    link = shelf.say(chat, (1, 2, 3))
    assert shelf.find((1, 2, 3), fingerprint=other) == Chain((), False)
    with pytest.raises(SegmentGone):
        append(shelf, chat, link.segment.id, 3, (4,), path=(1, 2, 3, 4), fingerprint=other)
    shelf.say(chat, (1, 2, 3, 4), fingerprint=other)
    assert shelf.check_read((1, 2, 3, 4)) == 3
    shelf.check()


def test_a_chat_s_other_fingerprints_can_be_told_field_by_field(shelf: Shelf, chat: Conversation) -> None:
    other = shelf.segments.fingerprint_id({**FIELDS, "dtype": "bfloat16"})
    shelf.say(chat, (1, 2), fingerprint=other)
    shelf.say(chat, (1, 2))
    assert shelf.segments.fingerprints_of(chat.id) == [shelf.fingerprint, other]
    assert shelf.segments.fields_of(other) == {**FIELDS, "dtype": "bfloat16"}
    assert shelf.segments.fingerprints_of(shelf.chat().id) == []
    with pytest.raises(NotFound):
        shelf.segments.fields_of(99)


def test_a_fingerprint_is_known_by_its_fields_in_any_order(shelf: Shelf) -> None:
    assert shelf.segments.fingerprint_id(dict(reversed(FIELDS.items()))) == shelf.fingerprint


def test_the_path_that_a_chat_used_last_can_be_compared_with_the_next_one(shelf: Shelf) -> None:
    chat, other = shelf.chat(), shelf.chat()
    shelf.say(chat, (1, 2, 3, 4, 5))
    shelf.say(chat, (1, 2, 3, 9))
    assert shelf.segments.last_path(chat.id, shelf.fingerprint) == (1, 2, 3, 9)
    shelf.say(other, (1, 2))
    assert shelf.segments.last_path(other.id, shelf.fingerprint) == (1, 2)
    shelf.segments.prune(0)
    assert shelf.segments.last_path(chat.id, shelf.fingerprint) == (1, 2, 3, 9)
    assert shelf.segments.last_path(chat.id, 99) == ()


# What does not fit together


def test_arguments_that_do_not_fit_are_refused_and_nothing_is_written(
    shelf: Shelf, chat: Conversation
) -> None:
    link, files = shelf.say(chat, (1, 2, 3)), shelf.files()
    with pytest.raises(ValueError, match="starts at 0"):
        append(shelf, chat, None, 2, (3,), path=(1, 2, 3))
    with pytest.raises(ValueError, match="behind the start"):
        append(shelf, chat, link.segment.id, 0, (9,))
    with pytest.raises(SegmentGone):
        append(shelf, chat, link.segment.id, 5, (9,), path=(1, 2, 3, 4, 5, 9))
    with pytest.raises(SegmentGone):
        append(shelf, chat, "nobody", 5, (9,), path=(1, 2, 3, 4, 5, 9))
    with pytest.raises(ValueError, match="at least one token"):
        append(shelf, chat, link.segment.id, 3, ())
    with pytest.raises(ValueError, match="rows for"):
        append(shelf, chat, link.segment.id, 3, (4, 5), path=(1, 2, 3, 4))
    with pytest.raises(ValueError, match="seconds"):
        append(shelf, chat, link.segment.id, 3, (4,), path=(1, 2, 3, 4), seconds=float("nan"))
    with pytest.raises(ValueError, match="token ids"):
        append(shelf, chat, link.segment.id, 3, (-1,))
    assert shelf.files() == files
    shelf.check()


def test_rows_of_a_chat_that_was_deleted_meanwhile_are_not_kept(
    shelf: Shelf, chat: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shelf.segments._folder.write

    def write_slowly(content: object) -> object:
        written = real(content)  # type: ignore[arg-type]
        shelf.chats.delete("ann", chat.id)
        return written

    monkeypatch.setattr(shelf.segments._folder, "write", write_slowly)
    with pytest.raises(NotFound):
        shelf.say(chat, (1, 2, 3))
    shelf.check()
    assert shelf.files() == set()


def test_a_parent_that_was_evicted_meanwhile_is_told(shelf: Shelf, chat: Conversation) -> None:
    link = shelf.say(chat, (1, 2, 3))
    shelf.segments.prune(0)
    with pytest.raises(SegmentGone):
        append(shelf, chat, link.segment.id, 3, (4,), path=(1, 2, 3, 4))
    with pytest.raises(SegmentGone):
        shelf.segments.open(link.segment)
    shelf.segments.use(chat.id, link)  # the row is there; only its file is not


def test_what_was_deleted_meanwhile_is_told(shelf: Shelf, chat: Conversation) -> None:
    link, other = shelf.say(chat, (1, 2, 3)), shelf.chat()
    shelf.chats.delete("ann", chat.id)
    shelf.segments.forget_unused()
    with pytest.raises(SegmentGone):
        shelf.segments.use(other.id, link)
    with pytest.raises(SegmentGone):
        shelf.segments.open(link.segment)
    with pytest.raises(NotFound):
        shelf.segments.use(chat.id, link)


# Evicted and stored again


def test_an_evicted_path_says_so_and_comes_back_with_the_same_segments(
    shelf: Shelf, chat: Conversation
) -> None:
    shelf.say(chat, (1, 2))
    last = shelf.say(chat, (1, 2, 3, 4))
    shelf.segments.prune(0)
    assert shelf.find((1, 2, 3, 4)) == Chain((), True)
    assert shelf.find((7,)) == Chain((), False)
    again = append(shelf, chat, None, 0, (1, 2, 3, 4, 5))
    assert again.segment.parent_id == last.segment.id
    assert shelf.check_read((1, 2, 3, 4, 5)) == 5
    shelf.check()


def test_a_new_path_through_an_evicted_segment_parts_it_without_losing_what_the_old_one_was(
    shelf: Shelf,
) -> None:
    old, new, reader = shelf.chat(), shelf.chat(), shelf.chat()
    shelf.say(old, (1, 2, 3, 4, 5, 6))
    shelf.say(reader, (1, 2))
    shelf.say(old, (1, 2, 8))
    shelf.say(old, (1, 2, 3, 4, 9))
    shelf.segments.prune(0)
    shelf.say(new, (1, 2, 3, 7))
    shelf.check()
    assert shelf.check_read((1, 2, 3, 7)) == 4
    assert set(shelf.paths().values()) == {
        (1, 2, 3),
        (1, 2, 3, 7),
        (1, 2, 3, 4, 5, 6),
        (1, 2, 8),
        (1, 2, 3, 4, 9),
    }
    assert shelf.find((1, 2, 3, 4, 9)).evicted
    shelf.say(old, (1, 2, 3, 4, 9))
    assert shelf.check_read((1, 2, 3, 4, 9)) == 5
    shelf.check()
    delete(shelf, new)
    assert (1, 2, 3, 4, 5, 6) in shelf.paths().values()
    delete(shelf, old)
    assert set(shelf.paths().values()) == {(1, 2)}


# Deleting chats


def delete(shelf: Shelf, chat: Conversation) -> None:
    shelf.chats.delete(chat.owner, chat.id)
    shelf.segments.forget_unused()


def test_deleting_a_chat_deletes_what_only_it_used(shelf: Shelf) -> None:
    chat, other = shelf.chat(), shelf.chat()
    shelf.say(chat, (1, 2, 3))
    shelf.say(chat, (1, 2, 3, 4))
    shelf.say(other, (7, 8))
    delete(shelf, chat)
    assert set(shelf.paths().values()) == {(7, 8)}
    assert len(shelf.files()) == 1
    delete(shelf, other)
    assert shelf.files() == set()
    assert shelf.segments.size().kv_bytes == shelf.nbytes() == 0


def test_a_shared_beginning_is_shortened_to_what_the_other_chat_needs(shelf: Shelf) -> None:
    chat, other = shelf.chat(), shelf.chat()
    first = shelf.say(chat, (1, 2, 3, 4, 5))
    shelf.say(other, (1, 2, 3, 9))
    delete(shelf, chat)
    assert set(shelf.paths().values()) == {(1, 2, 3), (1, 2, 3, 9)}
    assert shelf.check_read((1, 2, 3, 4, 5)) == 3
    assert shelf.check_read((1, 2, 3, 9)) == 4
    with pytest.raises(SegmentGone):
        shelf.segments.open(first.segment)
    shelf.check()


def test_a_chat_that_only_read_a_beginning_keeps_just_that(shelf: Shelf) -> None:
    chat, other = shelf.chat(), shelf.chat()
    shelf.say(chat, (1, 2, 3, 4, 5))
    shelf.say(other, (1, 2))
    delete(shelf, chat)
    assert set(shelf.paths().values()) == {(1, 2)}
    assert shelf.check_read((1, 2, 3)) == 2
    shelf.check()


def test_an_evicted_path_vanishes_with_its_chat(shelf: Shelf) -> None:
    chat, other = shelf.chat(), shelf.chat()
    shelf.say(chat, (1, 2, 3, 4))
    shelf.say(other, (1, 2, 9))
    shelf.segments.prune(0)
    delete(shelf, chat)
    assert set(shelf.paths().values()) == {(1, 2), (1, 2, 9)}
    delete(shelf, other)
    assert shelf.paths() == {}


def test_a_state_does_not_outlive_the_tokens_that_it_summed_up(shelf: Shelf) -> None:
    chat, other = shelf.chat(), shelf.chat()
    shelf.segments.append(
        "ann",
        shelf.fingerprint,
        chat.id,
        parent_id=None,
        start=0,
        token_ids=(1, 2, 3),
        tensors={**rows((1, 2, 3)), "state.0": torch.ones(3)},
        seconds=1.0,
    )
    shelf.say(other, (1, 2))
    delete(shelf, chat)
    with shelf.segments.open(shelf.find((1, 2)).links[0].segment) as file:
        assert not any(info.is_state for info in file.tensors)


def test_where_a_beginning_cannot_be_shortened_it_is_evicted(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, other = shelf.chat(), shelf.chat()
    shelf.say(chat, (1, 2, 3, 4))
    shelf.say(other, (1, 2, 9))
    monkeypatch.setattr(shelf.segments._folder, "_disk_free", lambda _: -1)
    delete(shelf, chat)
    assert shelf.files() == set()
    assert set(shelf.paths().values()) == {(1, 2), (1, 2, 9)}
    assert shelf.find((1, 2, 9)) == Chain((), True)
    shelf.check()


def test_a_damaged_file_is_not_shortened_but_removed(shelf: Shelf) -> None:
    chat, other = shelf.chat(), shelf.chat()
    link = shelf.say(chat, (1, 2, 3, 4))
    shelf.say(other, (1, 2, 9))
    damage(shelf.file_of(link))
    delete(shelf, chat)
    assert set(shelf.paths().values()) == {(1, 2), (1, 2, 9)}
    assert shelf.nbytes() == 0
    shelf.check()


SECRET = tuple(range(0xABCD01, 0xABCD11))


def traces(shelf: Shelf, secret: Path_) -> list[str]:
    """The files in which a token id of the secret, or a row of it, is still to be read."""
    needles = [pack_ids([token]) for token in secret]
    keys = rows((1, 2, *secret), 2)["layers.0.keys"][0]
    needles += [keys[i].numpy().tobytes() for i in range(len(keys))]
    return [
        path.name
        for path in shelf.folder.rglob("*")
        if path.is_file() and any(needle in path.read_bytes() for needle in needles)
    ]


@pytest.mark.parametrize("evicted", [False, True])
def test_no_token_and_no_row_of_a_deleted_chat_stays_on_the_disk(shelf: Shelf, evicted: bool) -> None:
    """Also not in the database's free pages or its log, and not because another chat shares the beginning."""
    chat, other = shelf.chat(), shelf.chat()
    shelf.say(chat, (1, 2, *SECRET))
    shelf.say(chat, (1, 2, *SECRET, 5, *SECRET))
    shelf.say(chat, (1, 2, *SECRET[:4], 6, *SECRET))
    shelf.say(other, (1, 2, 3))
    assert traces(shelf, SECRET)
    if evicted:
        shelf.segments.prune(0)
    delete(shelf, chat)
    assert traces(shelf, SECRET) == []
    assert shelf.check_read((1, 2, 3)) == (0 if evicted else 3)


def test_what_was_set_aside_goes_with_a_deleted_chat(shelf: Shelf, chat: Conversation) -> None:
    link = shelf.say(chat, (1, 2, *SECRET))
    shelf.segments.set_aside(link.segment, "as a test")
    assert traces(shelf, SECRET)
    delete(shelf, chat)
    assert traces(shelf, SECRET) == []
    assert shelf.nbytes() == 0


def test_a_chat_deleted_right_before_a_crash_is_forgotten_at_the_next_start(
    shelf: Shelf, tmp_path: Path
) -> None:
    chat = shelf.chat()
    shelf.say(chat, (1, 2, *SECRET))
    shelf.chats.delete("ann", chat.id)
    shelf.close()
    again = Shelf(tmp_path)
    again.segments.sweep()
    assert traces(again, SECRET) == []
    again.close()


def test_forgetting_with_nothing_to_forget_writes_nothing(shelf: Shelf, chat: Conversation) -> None:
    shelf.say(chat, (1, 2))
    files = shelf.files()
    assert shelf.segments.forget_unused() == 0
    assert shelf.files() == files


def test_files_that_cannot_be_removed_are_told_and_go_at_the_next_start(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = shelf.chat()
    shelf.say(chat, (1, 2))
    shelf.say(chat, (3, 4))
    shelf.chats.delete("ann", chat.id)

    def forbid(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", forbid)
        with pytest.raises(DiskRefused, match="started again"):
            shelf.segments.forget_unused()
    assert shelf.paths() == {}
    assert shelf.segments.size().kv_bytes == shelf.nbytes() > 0
    shelf.close()
    again = Shelf(tmp_path)
    assert again.segments.sweep().num_orphans == 2
    again.check()
    again.close()


# Damage


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_bytes(b"x")


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def replace_by_other_file(path: Path) -> None:
    size = path.stat().st_size
    same = [
        other for other in path.parent.glob("*.safetensors") if other != path and other.stat().st_size == size
    ]
    shutil.copy(same[0], path)


KINDS = {
    "flipped": damage,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + bytes(16)),
    "missing": lambda path: path.unlink(),
    "folder": replace_by_folder,
    "link": replace_by_link,
    "another": replace_by_other_file,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("restart", [False, True])
def test_a_damaged_file_is_set_aside_and_the_path_can_be_stored_again(
    shelf: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, restart: bool
) -> None:
    if kind == "link" and os.name == "nt":
        pytest.skip("Windows has no such links")
    chat, other = shelf.chat(), shelf.chat()
    shelf.say(chat, (1, 2))
    middle = shelf.say(chat, (1, 2, 3, 4))
    shelf.say(chat, (1, 2, 3, 4, 5))
    shelf.say(other, (7, 8))
    KINDS[kind](shelf.file_of(middle))
    if restart:
        shelf.segments.sweep()
    noticed_at_the_start = shelf.find((1, 2, 3, 4, 5)).evicted
    assert noticed_at_the_start == (restart and kind not in {"flipped", "another"})
    if not noticed_at_the_start:
        with pytest.raises(SegmentDamaged) as damaged:
            shelf.read(shelf.find((1, 2, 3, 4, 5)))
        with caplog.at_level(logging.WARNING):
            shelf.segments.set_aside(middle.segment, damaged.value.why)
            shelf.segments.set_aside(middle.segment, damaged.value.why)
        (record,) = caplog.records
        assert damaged.value.why in record.getMessage()
    assert shelf.find((1, 2, 3, 4, 5)).evicted
    assert shelf.find((1, 2, 3, 4, 5)).damaged
    assert shelf.check_read((1, 2, 3, 4, 5)) == 2
    assert shelf.check_read((7, 8)) == 2
    shelf.say(chat, (1, 2, 3, 4, 5))
    assert shelf.check_read((1, 2, 3, 4, 5)) == 5
    shelf.segments.prune(0)
    assert not shelf.find((1, 2, 3, 4, 5)).damaged
    (shelf.kv / "elsewhere").unlink(missing_ok=True)
    shelf.check()


def test_a_file_with_another_number_of_rows_is_damaged(shelf: Shelf, chat: Conversation) -> None:
    """A file and its row can both be right and yet not belong together, when a backup mixes them up."""
    one, two = shelf.say(chat, (1, 2)), shelf.say(chat, (7, 8, 9))
    shutil.copy(shelf.file_of(two), shelf.file_of(one))
    shelf.database.execute(
        "UPDATE segments SET nbytes = ?, checksum = ? WHERE id = ?",
        [two.segment.nbytes, two.segment.checksum, one.segment.id],
    )
    with pytest.raises(SegmentDamaged, match="number of tokens"):
        shelf.read(shelf.find((1, 2)))


def test_verify_names_each_damaged_file_and_changes_nothing(shelf: Shelf, chat: Conversation) -> None:
    good, bad, gone = shelf.say(chat, (1, 2)), shelf.say(chat, (3, 4)), shelf.say(chat, (5, 6))
    damage(shelf.file_of(bad))
    shelf.file_of(gone).unlink()
    before = shelf.database.rows("SELECT * FROM segments")
    checks = {check.segment.id: check.damage for check in shelf.segments.verify()}
    assert checks == {
        good.segment.id: None,
        bad.segment.id: "its content is not what was written",
        gone.segment.id: "it is missing",
    }
    assert shelf.database.rows("SELECT * FROM segments") == before


def test_only_the_newest_damaged_files_are_kept(shelf: Shelf, chat: Conversation) -> None:
    links = [shelf.say(chat, (token, 1)) for token in range(5)]
    for link in links:
        shelf.segments.set_aside(link.segment, "as a test")
    kept = sorted(path.name.split("-")[1] for path in (shelf.kv / "quarantine").iterdir())
    assert kept == sorted(shelf.file_of(link).name for link in links[2:])
    assert shelf.segments.size().num_quarantined == 3
    shelf.check()


# Order at the start


def test_the_start_removes_leftovers_and_leaves_everything_else_alone(
    shelf: Shelf, chat: Conversation
) -> None:
    kept = shelf.say(chat, (1, 2))
    missing = shelf.say(chat, (1, 2, 3))
    shelf.say(chat, (1, 2, 3, 4))
    shelf.file_of(missing).unlink()
    name = "0" * 32 + ".safetensors"
    (shelf.kv / name).write_bytes(b"orphan")
    (shelf.kv / (name + ".part")).write_bytes(b"half")
    (shelf.kv / "notes.txt").write_bytes(b"somebody else's")
    report = shelf.segments.sweep()
    assert (report.num_temporary, report.num_orphans, report.num_missing, report.num_damaged) == (1, 1, 1, 0)
    assert shelf.files() == {shelf.file_of(kept).name, "notes.txt"}
    (shelf.kv / "notes.txt").unlink()
    shelf.check()
    assert shelf.find((1, 2, 3, 4)) == Chain((Link(shelf.find((1, 2)).links[0].segment, 2),), True, True)


def test_an_import_into_the_folder_is_not_read(shelf: Shelf, chat: Conversation) -> None:
    """A file that no row speaks of is never opened, whatever is in it."""
    (shelf.kv / ("0" * 32 + ".safetensors")).symlink_to("/dev/zero")
    assert shelf.segments.sweep().num_orphans == 1
    assert shelf.files() == set()


def test_a_smaller_limit_holds_from_the_start(shelf: Shelf, chat: Conversation, tmp_path: Path) -> None:
    for token in range(5):
        shelf.say(chat, (token, 1, 2, 3))
    num_bytes = shelf.nbytes()
    shelf.close()
    again = Shelf(tmp_path, max_bytes=num_bytes // 2)
    assert again.segments.sweep().num_evicted == 3
    assert again.nbytes() <= num_bytes // 2
    again.check()
    again.close()


def test_a_page_can_draw_the_tree(shelf: Shelf) -> None:
    chat, other = shelf.chat(), shelf.chat("bob")
    first = shelf.say(chat, (1, 2, 3))
    branch = shelf.say(chat, (1, 2, 9))
    shelf.say(other, (1,))
    nodes = shelf.segments.list("ann")
    assert [
        (node.segment.id, node.segment.parent_id, node.segment.start, node.segment.end) for node in nodes
    ] == [
        (first.segment.id, None, 0, 3),
        (branch.segment.id, first.segment.id, 2, 3),
    ]
    assert nodes[0].conversation_ids == (chat.id,)
    assert len(shelf.segments.list()) == 3
    assert shelf.segments.list("eve") == []


def test_the_size_says_where_the_bytes_are(shelf: Shelf, chat: Conversation) -> None:
    one, two = shelf.say(chat, (1, 2)), shelf.say(chat, (3, 4, 5))
    shelf.segments.set_aside(two.segment, "as a test")
    size = shelf.segments.size()
    assert (size.num_stored, size.num_evicted, size.num_quarantined) == (1, 1, 1)
    assert size.stored_bytes == one.segment.nbytes
    assert size.quarantined_bytes == two.segment.nbytes
    assert size.kv_bytes == one.segment.nbytes + two.segment.nbytes == shelf.nbytes()
    assert size.max_bytes == PLENTY
    assert size.database_bytes == sum(path.stat().st_size for path in shelf.folder.glob("keepwarm*"))


# From many threads


def test_threads_that_store_look_up_and_evict_agree(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, quick=True)
    chats = [shelf.chat() for _ in range(4)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(1, 12):
                path = (1, 2, 3, *([number] * turn))
                try:
                    shelf.say(chats[number], path)
                    shelf.check_read(path)
                except SegmentGone:
                    continue
                if turn % 4 == number:
                    shelf.segments.prune(shelf.segments.size().kv_bytes // 2)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    shelf.check()
    shelf.close()


# A long random life


class Life(RuleBasedStateMachine):
    """Chats of two owners and two models, said, deleted, evicted, damaged, restarted, in any order."""

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.shelf = Shelf(self.folder, quick=True)
        self.fingerprints = [self.shelf.fingerprint, self.shelf.segments.fingerprint_id({"model": "other"})]
        self.said: dict[str, list[tuple[Conversation, int, Path_]]] = {}
        self.stored: dict[tuple[str, int], list[Path_]] | None = {}
        """None: something was evicted, so that what is stored can only be bounded."""

    @rule(owner=st.sampled_from(["ann", "bob"]))
    def begin(self, owner: str) -> None:
        self.said[self.shelf.chat(owner).id] = []

    @precondition(lambda self: self.said)
    @rule(data=st.data(), path=PATHS, model=st.integers(0, 1))
    def say(self, data: st.DataObject, path: Path_, model: int) -> None:
        chat_id = data.draw(st.sampled_from(sorted(self.said)))
        row = self.shelf.database.row("SELECT owner FROM conversations WHERE id = ?", [chat_id])
        assert row is not None
        chat = self.shelf.chats.get(row["owner"], chat_id)
        fingerprint = self.fingerprints[model]
        self.shelf.say(chat, path, fingerprint=fingerprint)
        self.said[chat_id].append((chat, fingerprint, path))
        if self.stored is not None:
            self.stored.setdefault((chat.owner, fingerprint), []).append(path)
        assert self.shelf.check_read(path, chat.owner, fingerprint) == len(path)

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        chat_id = data.draw(st.sampled_from(sorted(self.said)))
        row = self.shelf.database.row("SELECT owner FROM conversations WHERE id = ?", [chat_id])
        assert row is not None
        self.shelf.chats.delete(row["owner"], chat_id)
        del self.said[chat_id]
        self.shelf.segments.forget_unused()
        if self.stored is not None:
            self.stored = {}
            for chat, fingerprint, path in self.all_said():
                self.stored.setdefault((chat.owner, fingerprint), []).append(path)

    @rule(share=st.floats(0, 1))
    def evict(self, share: float) -> None:
        if self.shelf.segments.prune(int(self.shelf.nbytes() * share)):
            self.stored = None

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        stored = [node.segment for node in self.shelf.segments.list() if node.segment.file]
        if stored:
            segment = data.draw(st.sampled_from(stored))
            assert segment.file
            damage(self.shelf.kv / segment.file)
            (check,) = (check for check in self.shelf.segments.verify() if check.damage)
            self.shelf.segments.set_aside(check.segment, check.damage or "")
            self.stored = None

    @rule()
    def restart(self) -> None:
        self.shelf.close()
        self.shelf = Shelf(self.folder, quick=True)
        self.shelf.segments.sweep()

    def all_said(self) -> list[tuple[Conversation, int, Path_]]:
        return [turn for turns in self.said.values() for turn in turns]

    @invariant()
    def the_tree_is_in_order(self) -> None:
        self.shelf.check()

    @invariant()
    def nothing_is_found_that_was_not_said_and_everything_that_was(self) -> None:
        for chat, fingerprint, path in self.all_said():
            found = self.shelf.check_read(path, chat.owner, fingerprint)
            if self.stored is not None:
                assert found == len(path)

    @invariant()
    def nothing_is_kept_that_no_chat_said(self) -> None:
        owners = {node.segment.id: node.segment for node in self.shelf.segments.list()}
        for segment_id, path in self.shelf.paths().items():
            segment = owners[segment_id]
            assert any(
                said[: len(path)] == path
                and (chat.owner, fingerprint) == (segment.owner, segment.fingerprint_id)
                for chat, fingerprint, said in self.all_said()
            ), "tokens of a deleted chat, or of another owner"

    def teardown(self) -> None:
        self.shelf.close()


def test_a_long_random_life_keeps_the_tree_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    Life.folder = tmp_path / "life"
    run_state_machine_as_test(  # pyright: ignore[reportUnknownMemberType]
        Life, settings=settings(max_examples=20, stateful_step_count=20, deadline=None)
    )


def test_packed_ids_and_unpacked_ids_are_what_the_tree_compares() -> None:
    assert unpack_ids(pack_ids(SECRET)) == SECRET

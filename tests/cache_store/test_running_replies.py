"""A reply in progress: saved piece by piece, ended once, recovered after a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_store.conversations import Conversations
from cache_store.database import Database
from cache_store.errors import NotFound
from cache_store.records import Status
from tests.cache_store.talk import SAMPLING, SEED, begin, dump, finish


def num_pieces(database: Database) -> int:
    return len(database.rows("SELECT 1 FROM reply_pieces"))


def test_finishing_a_reply_stores_it_whole_and_removes_its_pieces(
    store: Conversations, database: Database
) -> None:
    reply = begin(store).reply
    store.save_progress(reply.id, 0, [5, 6], "Hel")
    store.save_progress(reply.id, 2, [7], "lo")
    assert num_pieces(database) == 2
    done = store.finish_reply(
        reply.id,
        token_ids=[5, 6, 7, 2],
        text="Hello",
        status="done",
        finish_reason="stop",
        error=None,
        stats={"ttft_s": 0.25, "reasons": {"new": 3}},
    )
    assert store.message("ann", reply.id) == done
    assert (done.text, done.token_ids, done.status, done.finish_reason) == (
        "Hello",
        (5, 6, 7, 2),
        "done",
        "stop",
    )
    assert done.stats == {"ttft_s": 0.25, "reasons": {"new": 3}}
    assert (done.sampling, done.seed, done.created_at) == (SAMPLING, SEED, reply.created_at)
    assert num_pieces(database) == 0


def test_a_failed_reply_keeps_what_was_written_and_says_why(store: Conversations) -> None:
    reply = begin(store).reply
    store.finish_reply(
        reply.id,
        token_ids=[5],
        text="Hel",
        status="failed",
        finish_reason=None,
        error="The device had no memory left.",
        stats={},
    )
    stored = store.message("ann", reply.id)
    assert (stored.status, stored.text, stored.error) == ("failed", "Hel", "The device had no memory left.")


def test_an_empty_reply_is_a_reply(store: Conversations) -> None:
    """C16: a model that ends at once, or a Stop before the first token."""
    reply = begin(store).reply
    assert finish(store, reply.id, "", ()).token_ids == ()


def test_a_reply_cannot_end_as_running(store: Conversations) -> None:
    reply = begin(store).reply
    status: Status = "running"
    with pytest.raises(ValueError, match="cannot end as running"):
        store.finish_reply(
            reply.id, token_ids=[], text="", status=status, finish_reason=None, error=None, stats={}
        )


def test_a_reply_that_has_ended_is_never_written_again(store: Conversations, database: Database) -> None:
    reply = begin(store).reply
    finish(store, reply.id, "Whole")
    before = dump(database)
    with pytest.raises(NotFound):
        finish(store, reply.id, "")
    with pytest.raises(NotFound):
        store.save_progress(reply.id, 0, [1], "x")
    assert dump(database) == before


def test_a_reply_of_a_deleted_chat_cannot_come_back(store: Conversations, database: Database) -> None:
    """C40: the chat is deleted while its reply is being written."""
    reply = begin(store).reply
    store.save_progress(reply.id, 0, [1], "x")
    store.delete("ann", reply.conversation_id)
    with pytest.raises(NotFound):
        store.save_progress(reply.id, 1, [2], "y")
    with pytest.raises(NotFound):
        finish(store, reply.id)
    assert all(rows == [] for rows in dump(database).values())


@pytest.mark.parametrize("start", [0, 1, 3])
def test_pieces_leave_no_gap_and_do_not_overlap(store: Conversations, database: Database, start: int) -> None:
    reply = begin(store).reply
    store.save_progress(reply.id, 0, [5, 6], "Hel")
    with pytest.raises(ValueError, match="2 tokens of the reply are saved"):
        store.save_progress(reply.id, start, [7], "lo")
    assert num_pieces(database) == 1


def test_an_impossible_token_id_is_refused_before_anything_is_written(
    store: Conversations, database: Database
) -> None:
    reply = begin(store).reply
    before = dump(database)
    with pytest.raises(ValueError, match="token ids"):
        store.save_progress(reply.id, 0, [-1], "x")
    with pytest.raises(ValueError, match="token ids"):
        finish(store, reply.id, "x", (2**32,))
    assert dump(database) == before


def test_a_reply_found_running_at_the_start_becomes_stopped_with_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "keepwarm.sqlite"
    database = Database(path)
    store = Conversations(database)
    cut, untouched, whole = (begin(store).reply for _ in range(3))
    store.save_progress(cut.id, 0, [5, 6], "Hel")
    store.save_progress(cut.id, 2, [], "l")
    store.save_progress(cut.id, 2, [7, 8], "o \U0001f600")
    done = finish(store, whole.id)
    database.close()

    database = Database(path)
    store = Conversations(database)
    assert store.recover() == 2
    assert store.recover() == 0
    stored = store.message("ann", cut.id)
    assert (stored.status, stored.finish_reason, stored.error) == ("stopped", "interrupted", None)
    assert (stored.text, stored.token_ids) == ("Hello \U0001f600", (5, 6, 7, 8))
    assert (stored.sampling, stored.seed) == (SAMPLING, SEED)
    empty = store.message("ann", untouched.id)
    assert (empty.status, empty.text, empty.token_ids) == ("stopped", "", ())
    assert store.message("ann", whole.id) == done
    assert num_pieces(database) == 0
    database.close()


def test_saving_progress_of_a_long_reply_writes_only_what_is_new(
    store: Conversations, tmp_path: Path
) -> None:
    """Law 5: the last hundred tokens of a long reply cost as much as the first hundred."""
    log = tmp_path / "keepwarm.sqlite-wal"
    reply = begin(store, text="A pasted book. " * 10_000).reply
    num_bytes: list[int] = []
    for step in range(20):
        before = log.stat().st_size
        store.save_progress(reply.id, step * 1000, range(1000), "word " * 1000)
        num_bytes.append(log.stat().st_size - before)
    assert max(num_bytes) < 50_000


def test_a_turn_after_a_long_one_does_not_write_the_long_one_again(
    store: Conversations, tmp_path: Path
) -> None:
    """Law 5: showing a new child must not rewrite its parent's row with all that it holds."""
    log = tmp_path / "keepwarm.sqlite-wal"
    turn = begin(store, text="A pasted book. " * 10_000)
    finish(store, turn.reply.id, "A long answer. " * 10_000, tuple(range(30_000)))
    before = log.stat().st_size
    store.add_turn(
        "ann",
        turn.reply.conversation_id,
        parent_id=turn.reply.id,
        leaf_id=turn.reply.id,
        text="Go on",
        sampling={},
        seed=None,
    )
    store.select("ann", turn.question.id)
    assert log.stat().st_size - before < 100_000

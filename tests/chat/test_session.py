"""What a reply shows and stores while it is written, what that costs, and what a seed reproduces."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

import chat.layers
import chat.reply_writer
from chat.job import Job
from chat.reply_writer import Delta, Ended
from chat.reuse import Origin
from chat.settings import CacheSettings, SamplingSettings
from tests.chat.passes import Passes, dictated, llama
from tests.chat.replies import (
    CHUNK,
    END,
    LONG,
    TOKENIZER,
    encode,
    question,
    sampling,
)
from tests.house import OWNER, House


def test_what_is_shown_is_already_stored_and_a_kill_leaves_exactly_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C27: killed after any piece, the chat opens with what a person had seen, ids and text in agreement."""
    monkeypatch.setattr(chat.reply_writer, "SHOW_EVERY_S", 0.0)
    with House(tmp_path, llama()) as house:
        for killed_after in (0, 1, 3, 6):
            conversation, turn = house.store.create_with_turn(
                OWNER,
                title="t",
                system_prompt="",
                text="Hi",
                sampling=sampling(max_new_tokens=50).to_json(),
                seed=1,
            )
            session = house.worker.session
            assert session is not None
            shown, num_shown = "", 0
            with dictated(*encode("Yes 😀 and more")):
                events = session.advance(conversation, turn.reply, origin=Origin(), stop=lambda: False)
                for event in events:
                    if isinstance(event, Delta):
                        shown, num_shown = shown + event.text, num_shown + 1
                        pieces = house.database.rows(
                            "SELECT text FROM reply_pieces WHERE message_id = ? ORDER BY number",
                            [turn.reply.id],
                        )
                        assert "".join(piece["text"] for piece in pieces) == shown
                    assert not isinstance(event, Ended)
                    if num_shown == killed_after:
                        break
            cast("Any", events).close()
            house.restart()
            view = house.chats.view(OWNER, conversation.id)
            reply = view.messages[-1]
            assert (reply.status, reply.text, view.job) == ("stopped", shown, None)
            assert TOKENIZER.decode(reply.token_ids) == shown
            house.say("And?", conversation.id)
            house.check(conversation.id)


def test_a_token_costs_the_store_the_same_however_long_the_reply_is(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C44: each piece holds what is new, and the statements per piece do not grow."""
    monkeypatch.setattr(chat.reply_writer, "SHOW_EVERY_S", 0.0)
    pieces: list[tuple[int, int, int, int]] = []
    num_statements = 0
    save, rows = house.store.save_progress, house.database.rows

    def counting_rows(*args: Any, **options: Any) -> Any:
        nonlocal num_statements
        num_statements += 1
        return rows(*args, **options)

    def counting_save(reply_id: str, start: int, token_ids: list[int], text: str) -> None:
        before = num_statements
        save(reply_id, start, token_ids, text)
        pieces.append((start, len(token_ids), len(text), num_statements - before))

    monkeypatch.setattr(house.store, "save_progress", counting_save)
    monkeypatch.setattr(house.database, "rows", counting_rows)
    text = "All the dogs and you. " * 12
    with dictated(*encode(text), END):
        view = house.say("Go", sampling=sampling(max_new_tokens=1000))
    assert view.messages[-1].text == text
    assert len(pieces) > 100
    assert {count for *_, count in pieces} == {pieces[0][3]}
    assert sum(size for _, _, size, _ in pieces) <= len(text)
    assert all(a[0] + a[1] == b[0] for a, b in pairwise(pieces))


def test_updates_come_at_most_ten_times_a_second(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """C44: with the clock standing still only the first piece is shown before the end."""
    monkeypatch.setattr(chat.reply_writer.time, "perf_counter", lambda: 100.0)
    assert chat.reply_writer.SHOW_EVERY_S >= 0.1
    states: list[str] = []
    monkeypatch.setattr(Job, "publish", _recording(states, Job.publish))
    with dictated(*encode("All the dogs and you."), END):
        house.say("Go", sampling=sampling(max_new_tokens=100))
    assert states.count("decode") == 1


def _recording(states: list[str], publish: Callable[..., None]) -> Callable[..., None]:
    def recorded(job: Job, **changes: Any) -> None:
        states.append(str(changes.get("state")))
        publish(job, **changes)

    return recorded


def test_reading_shows_its_progress_chunk_by_chunk(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 5: a long input is read in chunks, and a page can tell how far it is."""
    progress: list[tuple[int, int]] = []
    publish = Job.publish

    def recorded(job: Job, **changes: Any) -> None:
        if changes.get("state") == "prefill":
            progress.append((changes["num_read"], changes["num_to_read"]))
        publish(job, **changes)

    monkeypatch.setattr(Job, "publish", recorded)
    house.say(LONG)
    total = progress[0][1]
    assert [num_read for num_read, _ in progress] == [*range(0, total, CHUNK), total]
    assert {num_to_read for _, num_to_read in progress} == {total}


# seeds


WARM = SamplingSettings(temperature=1.3, top_p=0.95, top_k=50, repetition_penalty=1.1, max_new_tokens=12)


def test_a_stored_seed_reproduces_its_reply(tmp_path: Path) -> None:
    """Regenerated from the warm cache, and in a new process that reads everything again."""

    with House(tmp_path, llama()) as house:
        house.say("Hi", sampling=WARM)
        chat_id = house.chats.list(OWNER)[0].id
        first = house.say("More", chat_id, WARM).messages[-1]
        assert first.seed is not None
        again = replace(WARM, seed=first.seed)
        assert house.regenerate(first.id, again).messages[-1].token_ids == first.token_ids
        others = {house.regenerate(first.id, WARM).messages[-1].token_ids for _ in range(3)}
        assert len(others | {first.token_ids}) > 1
        house.restart()
        assert house.regenerate(first.id, again).messages[-1].token_ids == first.token_ids
        stored = SamplingSettings.from_json(first.sampling)
        assert replace(stored, seed=None) == WARM


def test_a_seed_that_a_person_chose_is_the_one_that_is_stored(house: House) -> None:
    view = house.say("Hi", sampling=SamplingSettings(temperature=1.0, max_new_tokens=4, seed=11))
    assert view.messages[-1].seed == 11


def test_two_replies_without_a_chosen_seed_get_different_ones(house: House) -> None:
    seeds = {house.say("Hi", sampling=WARM).messages[-1].seed for _ in range(3)}
    assert len(seeds) == 3


# rendering from several threads


def test_counting_tokens_from_handlers_does_not_disturb_a_reply(house: House) -> None:
    """C45: handlers ask the tokenizer while the inference thread decodes and looks for stop strings."""
    session = house.worker.session
    assert session is not None
    errors: list[BaseException] = []
    done = threading.Event()

    def count() -> None:
        number = 0
        while not done.is_set():
            number += 1
            try:
                session.check_fits([question(f"{number} <|im_end|> some words")], "Be brief.")
            except BaseException as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(3):
            stops = (f"never {number}", "\n\n\n\n")
            view = house.say(LONG, sampling=sampling(stop_strings=stops, max_new_tokens=10))
            assert view.messages[-1].error is None
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert errors == []


def test_a_reply_is_prefilled_in_chunks_of_the_size_that_was_set(tmp_path: Path) -> None:
    settings = CacheSettings(growth_step=16, prefill_chunk=7)
    with House(tmp_path, llama(), settings=settings) as house, Passes(house.loaded.model) as passes:
        view = house.say(LONG, sampling=sampling(max_new_tokens=3))
    sizes = list(map(len, passes.fed))
    assert max(sizes) == 7
    assert sizes[-3:] == [1, 1, 1]
    assert sum(sizes) == len(house.prompt(view, upto=-1)) + 2

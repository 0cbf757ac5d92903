"""A chat that is opened comes back into memory before anybody asks, and the stats still tell the truth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_store.errors import NotFound
from chat.chats import ChatView
from chat.disk import DiskCaches
from chat.model import LoadedModel
from chat.stats import TurnStats
from tests.house import OWNER, PATIENCE_S, House
from tests.tiny_models import tiny_llama, tiny_model

DISK = 10**9


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_llama()


@pytest.fixture
def house(tmp_path: Path, model: LoadedModel) -> Iterator[House]:
    with House(tmp_path, model, max_disk_bytes=DISK) as house:
        yield house


def stats(view: ChatView) -> TurnStats:
    return TurnStats.from_json(view.messages[-1].stats)


def warmed(house: House, chat: str) -> None:
    """Open the chat and wait until the inference thread has dealt with it."""
    house.chats.warm(OWNER, chat)
    assert house.worker.wait_until_idle(PATIENCE_S)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3_next"])
def test_an_opened_chat_holds_what_it_held_before_the_restart(tmp_path: Path, kind: str) -> None:
    with House(tmp_path, tiny_model(kind), max_disk_bytes=DISK) as house:
        chat = house.say("One.").conversation.id
        house.say("Two.", chat)
        before = house.kept()[chat].cache
        ids, rows = before.token_ids, before.rows_out(0)
        house.restart()
        warmed(house, chat)
        after = house.kept()[chat].cache
        assert after.token_ids == ids
        for name, tensor in after.rows_out(0).items():
            assert torch.equal(tensor, rows[name]), name
        house.check_invariant(chat)


def test_what_was_warmed_still_counts_as_from_disk_once(house: House) -> None:
    view = house.say("One.")
    chat, known = view.conversation.id, stats(view).num_cached_tokens
    house.restart()
    warmed(house, chat)
    view = house.say("Two.", chat)
    assert (stats(view).num_live_tokens, stats(view).num_disk_tokens) == (0, known)
    assert set(stats(view).reasons) == {"new"}
    house.check(chat)
    view = house.say("Three.", chat)
    assert stats(view).num_disk_tokens == 0


def test_an_edit_after_warming_keeps_what_is_still_true(house: House) -> None:
    chat = house.say("One.").conversation.id
    view = house.say("Two.", chat)
    house.restart()
    warmed(house, chat)
    view = house.edit(view.messages[2].id, "Three.")
    assert stats(view).num_live_tokens == 0
    assert stats(view).num_disk_tokens > 0
    assert stats(view).num_read_again == 0
    house.check(chat)


def test_a_file_found_damaged_while_warming_is_told_with_the_next_reply(house: House, tmp_path: Path) -> None:
    chat = house.say("One.").conversation.id
    house.say("Two.", chat)
    house.close()
    for file in (tmp_path / "kv").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    house.open()
    warmed(house, chat)
    view = house.say("Three.", chat)
    assert stats(view).reasons["damaged"] > 0
    assert stats(view).num_damaged_files == 1
    house.check(chat)


def test_an_evicted_end_is_told_as_evicted_after_warming(house: House) -> None:
    chat = house.say("One.").conversation.id
    house.say("Two.", chat)
    house.close()
    house.open()
    assert house.segments is not None
    house.segments.prune(house.segments.size().stored_bytes - 1)
    warmed(house, chat)
    assert house.kept()[chat].is_warmed
    view = house.say("Three.", chat)
    assert set(stats(view).reasons) == {"new", "evicted"}
    house.check(chat)


def test_a_chat_without_replies_or_without_files_is_left_alone(house: House, model: LoadedModel) -> None:
    chat = house.chats.create(OWNER).id
    warmed(house, chat)
    assert chat not in house.kept()


def test_warming_does_not_push_out_what_would_not_fit_beside_it_anyway(
    tmp_path: Path, model: LoadedModel
) -> None:
    with House(tmp_path, model, max_disk_bytes=DISK) as house:
        chat = house.say("A long message. " * 20).conversation.id
        house.max_live_bytes = 1000
        house.restart()
        warmed(house, chat)
        assert not house.kept()


def test_nobody_warms_another_ones_chat(house: House) -> None:
    chat = house.say("One.").conversation.id
    with pytest.raises(NotFound):
        house.chats.warm("ben", chat)


def test_a_chat_deleted_while_it_is_warmed_leaves_nothing_in_memory(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = house.say("One.").conversation.id
    house.restart()
    session = house.worker.wait_until_loaded(PATIENCE_S)
    keep = house.live.keep

    def delete_and_keep(conversation_id: str, live: object) -> None:
        house.store.delete(OWNER, chat)
        keep(conversation_id, live)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(house.live, "keep", delete_and_keep)
    warmed(house, chat)
    assert session is house.worker.session
    assert chat not in house.kept()


def test_a_chat_that_is_warmed_while_its_branch_is_deleted_keeps_nothing_of_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are still on disk and the messages in the store when the inference thread gets to the chat."""
    chat = house.say("One.").conversation.id
    secret = house.say("My secret word.", chat).messages[2].id
    house.restart()
    keep_paths = DiskCaches.keep_paths

    def warmed_first(disk: DiskCaches, *rest: Any) -> None:
        warmed(house, chat)
        keep_paths(disk, *rest)

    monkeypatch.setattr(DiskCaches, "keep_paths", warmed_first)
    house.chats.delete_branch(OWNER, secret)
    usable = house.kept()[chat].token_ids
    assert usable
    assert "secret" not in house.new_session().wording.decode(usable)

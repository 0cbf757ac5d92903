"""A restart resumes every conversation without reading it again: law 1 and law 3 across processes.

`House.restart` ends every thread, closes the database and opens the same folder anew: what comes back can
only come from the disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

import chat.reply_writer
from chat.model import LoadedModel
from chat.settings import SamplingSettings
from chat.stats import TurnStats
from tests.house import OWNER, House
from tests.tiny_models import tiny_llama, tiny_model

DISK = 10**9
SEEDED = SamplingSettings(temperature=0.8, max_new_tokens=12, seed=7)
ROW_KINDS = ("llama", "qwen3")
STATE_KINDS = ("mistral", "gemma3_text", "lfm2", "qwen3_next", "falcon_h1")


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return tiny_llama()


def house_of(folder: Path, loaded: LoadedModel, **settings: Any) -> House:
    folder.mkdir(exist_ok=True)
    return House(folder, loaded, max_disk_bytes=settings.pop("max_disk_bytes", DISK), **settings)


def stats(view: Any) -> TurnStats:
    return TurnStats.from_json(view.messages[-1].stats)


def rows(house: House, chat: str) -> dict[str, torch.Tensor]:
    """Every byte that the conversation's live cache would go on from."""
    return house.kept()[chat].cache.rows_out(0)


def assert_same_rows(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


def six_turns(house: House, sampling: SamplingSettings, *, restarting: bool) -> str:
    chat: str | None = None
    for number in range(6):
        view = house.say(f"Turn {number}, please.", chat, sampling)
        assert view.messages[-1].error is None
        chat = view.conversation.id
        if number:
            # A random model may be cut inside a character: a state then goes back to its last boundary.
            cut = (
                0 if house.loaded.name in {f"tiny {kind}" for kind in ROW_KINDS} else sampling.max_new_tokens
            )
            assert stats(view).num_read_again <= cut, stats(view)
        if restarting:
            house.restart()
    assert chat is not None
    return chat


@pytest.mark.parametrize("sampling", [SamplingSettings(temperature=0, max_new_tokens=12), SEEDED])
@pytest.mark.parametrize("kind", ROW_KINDS + STATE_KINDS)
def test_a_chat_with_a_restart_after_every_turn_goes_on_as_if_there_had_been_none(
    tmp_path: Path, kind: str, sampling: SamplingSettings
) -> None:
    """Law 3: equal ids, byte-equal rows and states; law 1: nothing is read again."""
    loaded = tiny_model(kind)
    with house_of(tmp_path / "a", loaded) as straight, house_of(tmp_path / "b", loaded) as restarted:
        one = six_turns(straight, sampling, restarting=False)
        two = six_turns(restarted, sampling, restarting=True)
        ids = [m.token_ids for m in straight.chats.view(OWNER, one).messages]
        assert ids == [m.token_ids for m in restarted.chats.view(OWNER, two).messages]
        straight.say("The last one.", one, sampling)
        restarted.say("The last one.", two, sampling)
        if one in straight.kept():
            assert_same_rows(rows(straight, one), rows(restarted, two))
        else:
            assert two not in restarted.kept()


def test_after_a_restart_only_the_new_message_is_read_and_the_rest_comes_from_disk(
    tmp_path: Path, llama: LoadedModel
) -> None:
    with house_of(tmp_path, llama) as house:
        chat = house.say("A first message that is long enough to see.").conversation.id
        held = len(house.kept()[chat].cache)
        house.restart()
        view = house.say("And a second one.", chat)
        assert stats(view).num_disk_tokens == held
        assert stats(view).num_live_tokens == 0
        assert set(stats(view).reasons) == {"new"}
        house.check(chat)


def test_switching_branches_and_restarting_reads_nothing_again(tmp_path: Path, llama: LoadedModel) -> None:
    """Both branches are on disk; the one that was cut from memory comes back from there."""
    with house_of(tmp_path, llama) as house:
        view = house.say("One.")
        chat = view.conversation.id
        house.say("Two.", chat)
        view = house.say("Three.", chat)
        house.edit(view.messages[2].id, "Another two.")
        for number in range(4):
            shown = house.chats.view(OWNER, chat)
            house.chats.select(OWNER, shown.messages[2].id, 1)
            if number % 2:
                house.restart()
            view = house.say(f"More {number}.", chat)
            assert stats(view).num_read_again == 0, stats(view)
            house.check(chat)


def test_regenerating_after_a_restart_reads_one_token(tmp_path: Path, llama: LoadedModel) -> None:
    with house_of(tmp_path, llama) as house:
        view = house.say("A question of some length.", sampling=SEEDED)
        old = view.messages[-1]
        house.restart()
        view = house.regenerate(old.id, SEEDED)
        assert dict(stats(view).reasons) == {"boundary": 1}
        assert view.messages[-1].token_ids == old.token_ids


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_regenerating_on_a_model_that_cannot_step_back_goes_to_the_saved_boundary(
    tmp_path: Path, kind: str
) -> None:
    """The state where decoding began is on disk, so nothing but the boundary token is fed again."""
    with house_of(tmp_path, tiny_model(kind)) as house:
        chat = house.say("A question of some length, longer than the window.").conversation.id
        view = house.say("And another one.", chat)
        for _ in range(2):
            view = house.regenerate(view.messages[-1].id)
            assert dict(stats(view).reasons) == {"boundary": 1}
            house.check(chat)
            house.restart()


def test_a_new_chat_with_the_same_beginning_takes_it_from_disk(tmp_path: Path, llama: LoadedModel) -> None:
    document = "A pasted document. " * 6
    with house_of(tmp_path, llama) as house:
        house.say(document + "First question?")
        house.restart()
        view = house.say(document + "Second question?")
        assert stats(view).num_disk_tokens > len(document) // 4
        house.check(view.conversation.id)
        other = house.say(document + "First question?", owner="ben")
        assert stats(other).num_disk_tokens == 0, "nobody's rows are anybody else's"


@pytest.mark.parametrize("harm", ["truncate", "flip", "delete", "swap"])
def test_a_damaged_file_is_noticed_and_the_text_is_read_again(
    tmp_path: Path, llama: LoadedModel, harm: str
) -> None:
    """Law 2: the answer is that of a fresh run, and the stats say what happened."""
    with house_of(tmp_path, llama) as house:
        chat = house.say("One.").conversation.id
        house.say("Two.", chat)
        house.close()
        files = sorted((tmp_path / "kv").rglob("*.safetensors"), key=lambda file: file.stat().st_mtime)
        assert files
        _damage(files, harm)
        house.open()
        view = house.say("Three.", chat)
        assert view.messages[-1].error is None
        assert stats(view).num_read_again > 0
        assert {"damaged", "evicted"} & set(stats(view).reasons)
        house.check(chat)
        house.restart()
        view = house.say("Four.", chat)
        assert stats(view).num_read_again == 0, "what was read again was saved again"
        house.check(chat)


def _damage(files: list[Path], harm: str) -> None:
    target = files[0]
    data = bytearray(target.read_bytes())
    if harm == "truncate":
        target.write_bytes(data[: len(data) // 2])
    elif harm == "flip":
        data[-9] ^= 1
        target.write_bytes(data)
    elif harm == "delete":
        target.unlink()
    else:
        target.write_bytes(files[-1].read_bytes())


def test_rows_of_another_model_are_never_loaded_and_the_difference_is_named(tmp_path: Path) -> None:
    """Same shapes, other weights."""
    with house_of(tmp_path, tiny_llama(seed=1)) as house:
        chat = house.say("One.").conversation.id
    with house_of(tmp_path, tiny_llama(seed=2)) as house:
        view = house.say("Two.", chat)
        assert stats(view).num_disk_tokens == 0
        assert cast("dict[str, int]", stats(view).reasons)["fingerprint"] > 0
        house.check(chat)


def test_a_deleted_chat_leaves_no_cache_file(tmp_path: Path, llama: LoadedModel) -> None:
    with house_of(tmp_path, llama) as house:
        chat = house.say("A secret.").conversation.id
        house.saver.wait_for(chat, 60)  # pyright: ignore[reportOptionalMemberAccess]
        assert list((tmp_path / "kv").rglob("*.safetensors"))
        house.chats.delete(OWNER, chat)
        assert not list((tmp_path / "kv").rglob("*.safetensors"))


def test_a_budget_too_small_for_anything_says_so_and_the_chat_goes_on(
    tmp_path: Path, llama: LoadedModel
) -> None:
    with house_of(tmp_path, llama, max_disk_bytes=1000) as house:
        chat = house.say("One.").conversation.id
        house.saver.wait_for(chat, 60)  # pyright: ignore[reportOptionalMemberAccess]
        assert house.chats.saving_notice()
        house.say("Two.", chat)
        house.check(chat)


def test_a_live_cache_that_was_evicted_comes_back_from_disk(tmp_path: Path, llama: LoadedModel) -> None:
    budget = 160 * llama.kv_bytes_per_token
    with house_of(tmp_path, llama, max_live_bytes=budget) as house:
        first = house.say("The first chat.").conversation.id
        for number in range(4):
            house.say(f"{number} takes the memory " + "word " * 14)
        assert first not in house.kept()
        view = house.say("And?", first)
        assert stats(view).num_read_again == 0
        assert stats(view).num_disk_tokens > 0
        house.check(first)


def test_a_long_prompt_is_on_disk_before_its_reply_ends(tmp_path: Path, llama: LoadedModel) -> None:
    """What a crash would cost: at most `SAVE_EVERY` tokens, here made small."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chat.reply_writer, "SAVE_EVERY", 32)
        with house_of(tmp_path, llama) as house:
            chat_id = house.say("word " * 60).conversation.id
            house.saver.wait_for(chat_id, 60)  # pyright: ignore[reportOptionalMemberAccess]
            assert len(list((tmp_path / "kv").rglob("*.safetensors"))) > 3
            house.restart()
            view = house.say("And?", chat_id)
            assert stats(view).num_read_again == 0
            house.check(chat_id)

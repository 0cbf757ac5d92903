"""What stands behind the reason of a turn: where the texts part, which setting differs, which files were
damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat.chats import ChatView
from chat.divergence import NUM_AFTER, NUM_BEFORE, divergence_of, num_common
from chat.model import LoadedModel
from chat.stats import Divergence, TurnStats
from tests.chat.passes import dictated, llama
from tests.chat.replies import END, TOKENIZER
from tests.chat.tokenizers import TRIMMING, with_template
from tests.house import House
from tests.tiny_models import tiny_llama

DISK = 10**9
IDS = st.lists(st.integers(0, 3), max_size=40)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_llama()


@pytest.fixture
def house(tmp_path: Path, model: LoadedModel) -> Iterator[House]:
    with House(tmp_path, model, max_disk_bytes=DISK) as house:
        yield house


def stats(view: ChatView) -> TurnStats:
    return TurnStats.from_json(view.messages[-1].stats)


def divergence(view: ChatView) -> Divergence:
    found = stats(view).divergence
    assert found is not None
    return found


@given(IDS, IDS)
def test_two_paths_part_where_their_first_difference_is(old: list[int], new: list[int]) -> None:
    found = divergence_of(old, new, str)
    position = num_common(old, new)
    assert old[:position] == new[:position]
    if found is None:
        assert position in (len(old), len(new))
        return
    assert old[position] != new[position]
    assert found == Divergence(
        position,
        str(new[max(0, position - NUM_BEFORE) : position]),
        str(old[position : position + NUM_AFTER]),
        str(new[position : position + NUM_AFTER]),
    )


@pytest.mark.parametrize("restarting", [False, True])
def test_an_edit_shows_the_old_and_the_new_words(house: House, restarting: bool) -> None:
    view = house.say("My dog is called Pixel.")
    if restarting:
        house.restart()
    view = house.edit(view.messages[0].id, "My dog is called Rover.")
    found = divergence(view)
    assert found.before.endswith(" called ")
    assert (found.old[:5], found.new[:5]) == ("Pixel", "Rover")
    same = house.prompt(view, upto=-1).token_ids[: found.position]
    assert TOKENIZER.decode(list(same)).endswith("dog is called ")


def test_a_changed_system_prompt_is_shown(house: House) -> None:
    view = house.say("Hello.")
    house.chats.set_system_prompt("ada", view.conversation.id, "Be brief.")
    assert "Be brief." in divergence(house.say("And now?", view.conversation.id)).new


def test_a_template_that_rewrites_a_reply_is_shown(tmp_path: Path) -> None:
    with House(tmp_path, with_template(llama(), TRIMMING)) as house:
        with dictated(*TOKENIZER.encode("\nYes  "), END):
            chat = house.say("Is it?").conversation.id
        view = house.say("Sure?", chat)
        assert stats(view).reasons["template"] > 0
        found = divergence(view)
        assert found.old.startswith("\nYes  ")
        assert found.new.startswith("Yes")


def test_a_message_that_only_goes_on_needs_no_explanation(house: House) -> None:
    view = house.say("One.")
    for text in ("Two.", "Three."):
        view = house.say(text, view.conversation.id)
        assert stats(view).divergence is None
    assert stats(house.regenerate(view.messages[-1].id)).divergence is None


def test_a_chat_that_moved_to_its_other_branch_needs_no_explanation(house: House) -> None:
    view = house.say("One.")
    first = view.messages[0].id
    house.edit(first, "Another one.")
    house.chats.select("ada", house.chats.view("ada", view.conversation.id).messages[0].id, 1)
    view = house.say("Two.", view.conversation.id)
    assert stats(view).divergence is None
    assert stats(view).num_read_again == 0


def test_another_model_is_named_with_both_values(tmp_path: Path) -> None:
    one, two = tiny_llama(seed=1), tiny_llama(seed=2)
    with House(tmp_path, one, max_disk_bytes=DISK) as house:
        chat = house.say("One.").conversation.id
    with House(tmp_path, two, max_disk_bytes=DISK) as house:
        again = stats(house.say("Two.", chat))
        assert again.reasons["fingerprint"] > 0
        differing = {name for name in one.fingerprint if one.fingerprint[name] != two.fingerprint[name]}
        (name,) = (name for name in differing if again.changed_setting.startswith(f"{name} was "))
        assert one.fingerprint[name] in again.changed_setting
        assert two.fingerprint[name] in again.changed_setting
        assert stats(house.say("Three.", chat)).changed_setting == ""


def test_a_restart_without_saving_says_that_saving_is_off(tmp_path: Path, model: LoadedModel) -> None:
    with House(tmp_path, model) as house:
        view = house.say("One.")
        house.restart()
        again = stats(house.say("Two.", view.conversation.id))
        assert again.reasons.keys() == {"new", "off"}
        assert again.reasons["off"] == stats(view).num_cached_tokens


def test_damaged_files_are_counted(house: House, tmp_path: Path) -> None:
    chat = house.say("One.").conversation.id
    house.close()
    files = list((tmp_path / "kv").glob("*.safetensors"))
    for file in files:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    house.open()
    again = stats(house.say("Two.", chat))
    assert again.reasons["damaged"] > 0
    assert again.num_damaged_files == 1, "what hangs from a damaged file is out of reach, not damaged"
    assert stats(house.say("Three.", chat)).num_damaged_files == 0


def test_the_details_survive_the_store() -> None:
    turn = TurnStats(
        5, 2, 1, 2, 3, {"edited": 2}, divergence=Divergence(3, "a", "b", "c"), changed_setting="dtype was a"
    )
    assert TurnStats.from_json(turn.to_json()) == turn

"""C07: a template that drops the thinking of past replies, on layers that can be cropped and on layers with
states: whatever a person does, no more is read than the turn whose thinking is gone.

Every turn thinks, so the end of a past reply is never a beginning of what is asked later: people go back to
where decoding began. Full attention has all of that prompt, layers with states all but its last token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import pytest

from chat.chats import ChatView
from chat.divergence import num_common
from chat.model import LoadedModel
from chat.settings import CacheSettings
from chat.stats import TurnStats
from tests.chat.passes import dictated
from tests.chat.replies import END, encode, sampling
from tests.chat.tokenizers import THINKING, with_template
from tests.house import House
from tests.tiny_models import WINDOW, tiny_model

DISK = 10**9
THOUGHT = encode("<think>the dog, the dog, the dog</think>\nYes")
CUT_THOUGHT = encode("<think>the dog, the dog, ")


@lru_cache
def model(kind: str) -> LoadedModel:
    return with_template(tiny_model(kind), THINKING)


@pytest.fixture(params=["in memory", "after a restart"])
def is_restarted(request: pytest.FixtureRequest) -> bool:
    return request.param == "after a restart"


def house_of(folder: Path, kind: str, *, on_disk: bool) -> House:
    settings = CacheSettings(growth_step=16, prefill_chunk=8)
    return House(folder, model(kind), settings=settings, max_disk_bytes=DISK if on_disk else None)


def think(house: House, text: str, chat_id: str | None) -> ChatView:
    with dictated(*THOUGHT, END):
        return house.say(text, chat_id, sampling(max_new_tokens=60))


def stats(view: ChatView) -> TurnStats:
    return TurnStats.from_json(cast("Any", view.messages[-1].stats))


def three_turns(house: House) -> ChatView:
    view = think(house, "A first message of some length", None)
    for number in (1, 2):
        before = house.prompt(view, upto=-1)
        view = think(house, f"Turn {number}", view.conversation.id)
        back = int(house.loaded.name != "tiny llama")
        num_read = len(house.prompt(view, upto=-1)) - len(before) + back
        assert stats(view).num_prefilled_tokens == num_read
        num_stripped = len(encode("\nYes"))
        why = {"template": num_stripped, "new": num_read - num_stripped - back, "not_croppable": back}
        assert dict(stats(view).reasons) == {reason: count for reason, count in why.items() if count}
    return view


VERBS: dict[str, Callable[[House, ChatView], ChatView]] = {
    "next message": lambda house, view: house.say("Next", view.conversation.id),
    "regenerate": lambda house, view: house.regenerate(view.messages[-1].id),
    "regenerate an older reply": lambda house, view: house.regenerate(view.messages[3].id),
    "edit": lambda house, view: house.edit(view.messages[4].id, "Else"),
    "edit an older question": lambda house, view: house.edit(view.messages[2].id, "Else"),
}

STEP_BACK = {"next message": 2, "edit": 1, "edit an older question": 0}
"""The turn where decoding began at or before the place that the verb goes back to."""


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "lfm2"])
@pytest.mark.parametrize("verb", VERBS)
def test_around_stripped_thinking_no_more_than_that_turn_is_read(
    tmp_path: Path, kind: str, verb: str, is_restarted: bool
) -> None:
    with house_of(tmp_path, kind, on_disk=is_restarted) as house:
        before = three_turns(house)
        if is_restarted:
            house.restart()
        view = VERBS[verb](house, before)
        asked = house.prompt(view, upto=-1).token_ids
        prompts = [house.prompt(before, upto=upto).token_ids for upto in (1, 3, 5)]
        assert len(prompts[0]) > WINDOW
        if verb.startswith("regenerate"):
            num_read = 1
        elif kind == "llama":
            num_read = len(asked) - max(num_common(prompt, asked) for prompt in prompts)
        else:
            num_read = len(asked) - len(prompts[STEP_BACK[verb]]) + 1
        assert stats(view).num_prefilled_tokens == num_read
        house.check_oracle(view.conversation.id)
        house.kept()[view.conversation.id].cache.check()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "lfm2"])
def test_a_reply_cut_while_it_thinks_goes_on_and_is_not_stripped(
    tmp_path: Path, kind: str, is_restarted: bool
) -> None:
    """Its thinking block has no end, so the template leaves it alone."""
    with house_of(tmp_path, kind, on_disk=is_restarted) as house:
        view = three_turns(house)
        with dictated(*CUT_THOUGHT):
            view = house.say("Cut", view.conversation.id, sampling(max_new_tokens=len(CUT_THOUGHT)))
        assert view.messages[-1].token_ids == tuple(CUT_THOUGHT)
        if is_restarted:
            house.restart()
        view = house.continue_reply(view.messages[-1].id, sampling(max_new_tokens=2))
        assert dict(stats(view).reasons) == {"new": 1}
        house.check_invariant(view.conversation.id)
        held = house.kept()[view.conversation.id].cache.token_ids
        if is_restarted:
            house.restart()
        view = house.say("Next", view.conversation.id)
        assert stats(view).num_prefilled_tokens == len(house.prompt(view, upto=-1)) - len(held)
        house.check(view.conversation.id)

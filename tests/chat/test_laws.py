"""The laws of the design over whole turns of a two-layer model: what is read, kept and paid for, and why.

1 nothing is read twice · 3 what was kept continues byte for byte · 4 a cache never lies and every turn says
why it read · 5 the cost follows the new tokens.
"""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers.utils import chat_template_utils

from chat.chats import ChatView
from chat.settings import SamplingSettings
from chat.stats import READ_AGAIN, TurnStats
from tests.chat.passes import Passes, dictated, llama
from tests.chat.tokenizers import with_template
from tests.house import GREEDY, OWNER, House, last_stats
from tests.tiny_models import CHATML

TOKENIZER: Any = llama().tokenizer
END = int(TOKENIZER.eos_token_id)
DOCUMENT = "A pasted document, which says that the dog and you are here and that it is late. " * 3
SAMPLED = SamplingSettings(temperature=1.5, max_new_tokens=8, seed=5)


def stats(view: ChatView) -> TurnStats:
    return TurnStats.from_json(cast("Any", last_stats(view)))


def layers(house: House, chat_id: str) -> list[Any]:
    return cast("Any", house.kept()[chat_id].cache)._cache.layers


def rows(house: House, chat_id: str, num_tokens: int | None = None) -> list[torch.Tensor]:
    """Copies of all keys and values, the first `num_tokens` of them."""
    return [
        tensor[:, :, :num_tokens].clone()
        for layer in layers(house, chat_id)
        for tensor in (layer.keys, layer.values)
    ]


def assert_equal_rows(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs) == 4
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def chat_of(house: House, num_turns: int, sampling: SamplingSettings = GREEDY) -> ChatView:
    view = house.say("Turn 0", sampling=sampling)
    for number in range(1, num_turns):
        view = house.say(f"Turn {number}", view.conversation.id, sampling)
    return view


# 1. Nothing is read twice


def test_a_follow_up_reads_exactly_the_new_tokens(house: House, passes: Passes) -> None:
    """Law 1, counted at the model's own input over eight turns."""
    view, num_known = None, 0
    for number in range(8):
        before = len(passes.fed_ids)
        view = house.say(f"Turn {number}", view and view.conversation.id)
        prompt = house.prompt(view, upto=-1)
        num_reply = stats(view).num_reply_tokens
        assert len(passes.fed_ids) - before == len(prompt) - num_known + num_reply - 1
        assert stats(view).num_live_tokens == num_known
        assert stats(view).num_prefilled_tokens == len(prompt) - num_known
        assert dict(stats(view).reasons) == {"new": len(prompt) - num_known}
        house.check(view.conversation.id)
        num_known = len(house.kept()[view.conversation.id].cache)


def test_a_reply_that_ended_by_itself_is_not_read_again(house: House, passes: Passes) -> None:
    """Law 1: fed tokens, end to end, are the last prompt and its reply."""
    view = None
    for number in range(5):
        with dictated(*TOKENIZER.encode("Yes."), END):
            view = house.say(f"Turn {number}", view and view.conversation.id)
    assert view is not None
    prompt = house.prompt(view, upto=-1)
    assert tuple(passes.fed_ids) == (*prompt.token_ids, *TOKENIZER.encode("Yes."))


def test_regenerating_reads_the_one_token_at_the_boundary(house: House, passes: Passes) -> None:
    """Law 1."""
    view = chat_of(house, 3)
    prompt = house.prompt(view, upto=-1)
    before = len(passes.fed)
    view = house.regenerate(view.messages[-1].id)
    assert passes.fed[before] == [prompt.token_ids[-1]]
    assert len(passes.fed) - before == 8
    assert dict(stats(view).reasons) == {"boundary": 1}
    assert stats(view).num_live_tokens == len(prompt) - 1
    house.check(view.conversation.id)


def test_an_edit_reads_from_the_first_changed_token(house: House, passes: Passes) -> None:
    """Law 1: the words before the change, in the same message, are not read again either."""
    view = house.say("one two three four five")
    chat_id, before = view.conversation.id, len(passes.fed_ids)
    view = house.edit(view.messages[0].id, "one two three nine five")
    prompt = house.prompt(view, upto=-1)
    changed = TOKENIZER.decode(prompt.token_ids).index("nine")
    read = passes.fed_ids[before : before + stats(view).num_prefilled_tokens]
    assert TOKENIZER.decode(prompt.token_ids)[changed:] == TOKENIZER.decode(read)
    house.check(chat_id)


def test_going_back_and_forth_between_chats_reads_nothing_again(house: House) -> None:
    """Law 1."""
    ids = [house.say(f"Chat {number} {DOCUMENT}").conversation.id for number in range(3)]
    for number in range(6):
        view = house.say("More", ids[number % 3])
        assert set(stats(view).reasons) == {"new"}
        assert stats(view).num_read_again == 0
        house.check(ids[number % 3])


def test_looking_renaming_and_counting_feed_nothing(house: House, passes: Passes) -> None:
    """Law 1: a reload costs no pass."""
    view = chat_of(house, 2)
    before = passes.num_passes
    house.chats.view(OWNER, view.conversation.id)
    house.chats.list(OWNER, "Turn")
    house.chats.rename(OWNER, view.conversation.id, "x")
    assert passes.num_passes == before


@pytest.mark.parametrize("system", ["", "You are a keeper of dogs and you answer in verse."])
def test_another_chat_with_the_same_beginning_copies_it(tmp_path: Path, system: str) -> None:
    """Law 1 and 3: a system prompt, a pasted document; the rows are the same bytes, and the other chat's
    cache is not touched."""
    with House(tmp_path, llama(), default_system_prompt=system) as house:
        first = house.say(DOCUMENT + "Who is here?").conversation.id
        before = rows(house, first)
        view = house.say(DOCUMENT + "Is it late?")
        second = view.conversation.id
        prompt = house.prompt(view, upto=-1)
        shared = house.kept()[first].cache.num_common(prompt.token_ids)
        assert shared > len(TOKENIZER.encode(DOCUMENT))
        assert stats(view).num_live_tokens == shared
        assert dict(stats(view).reasons) == {"new": len(prompt) - shared}
        assert_equal_rows(rows(house, second, shared), rows(house, first, shared))
        assert_equal_rows(rows(house, first), before)
        house.check(second)
        house.say("And?", first)
        house.check(first)


def test_an_evicted_chat_borrows_from_the_others_what_they_still_have(tmp_path: Path) -> None:
    """Law 1: the longest of all usable beginnings is taken, wherever it is."""
    with House(tmp_path, llama()) as house:
        first = house.say(DOCUMENT).conversation.id
        view = house.say(DOCUMENT + "More.")
        house.live.forget(first, "evicted")
        view = house.say("And?", first)
        assert stats(view).num_live_tokens > len(TOKENIZER.encode(DOCUMENT))
        assert set(stats(view).reasons) == {"evicted", "new"}
        house.check(first)


# 3. What was kept continues byte for byte


def test_a_regenerated_reply_stands_on_the_same_bytes(house: House) -> None:
    """Law 3, live part: the shared rows, and under greedy decoding the reply and its rows too."""
    view = chat_of(house, 3)
    chat_id, shared = view.conversation.id, len(house.prompt(view, upto=-1))
    before, reply = rows(house, chat_id), view.messages[-1]
    view = house.regenerate(reply.id, SAMPLED)
    assert view.messages[-1].token_ids != reply.token_ids
    assert_equal_rows(rows(house, chat_id, shared - 1), [tensor[:, :, : shared - 1] for tensor in before])
    view = house.regenerate(reply.id)
    assert view.messages[-1].token_ids == reply.token_ids
    assert_equal_rows(rows(house, chat_id), before)


def test_an_edit_stands_on_the_same_bytes(house: House) -> None:
    """Law 3."""
    view = chat_of(house, 3)
    before = rows(house, view.conversation.id)
    view = house.edit(view.messages[2].id, "Something else")
    shared = stats(view).num_live_tokens
    assert shared > 0
    kept = rows(house, view.conversation.id, shared)
    assert_equal_rows(kept, [tensor[:, :, :shared] for tensor in before])


def test_a_chat_that_was_edited_back_and_forth_answers_as_one_that_never_was(tmp_path: Path) -> None:
    """Law 3: crop and append, many times, equals append."""
    (tmp_path / "straight").mkdir()
    (tmp_path / "winding").mkdir()
    with House(tmp_path / "straight", llama()) as house:
        straight = chat_of(house, 3)
        bytes_straight = rows(house, straight.conversation.id)
    with House(tmp_path / "winding", llama()) as house:
        view = house.say("Turn 0")
        for number in range(1, 3):
            view = house.say("x" * number, view.conversation.id)
            question = view.messages[-2].id
            view = house.regenerate(view.messages[-1].id, SAMPLED)
            view = house.edit(question, f"Turn {number}")
        assert [m.token_ids for m in view.messages] == [m.token_ids for m in straight.messages]
        for ours, theirs in zip(rows(house, view.conversation.id), bytes_straight, strict=True):
            torch.testing.assert_close(ours, theirs)


# 4. A cache never lies, and every turn says why


def test_a_restart_is_named_and_only_what_is_new_is_called_new(house: House) -> None:
    """Law 4."""
    view = chat_of(house, 3)
    num_known = len(house.kept()[view.conversation.id].cache)
    house.restart()
    view = house.say("And?", view.conversation.id)
    prompt = house.prompt(view, upto=-1)
    assert dict(stats(view).reasons) == {"off": num_known, "new": len(prompt) - num_known}
    house.check(view.conversation.id)


def test_an_eviction_is_named(tmp_path: Path) -> None:
    """Law 4: not a restart, not an error, not new."""
    with House(tmp_path, llama(), max_live_bytes=200 * llama().kv_bytes_per_token) as house:
        first = chat_of(house, 2)
        num_known = len(house.kept()[first.conversation.id].cache)
        for number in range(4):
            house.say(f"{number} " + "word " * 12)
        assert first.conversation.id not in house.kept()
        view = house.say("And?", first.conversation.id)
        prompt = house.prompt(view, upto=-1)
        others = stats(view).num_live_tokens
        assert dict(stats(view).reasons) == {"evicted": num_known - others, "new": len(prompt) - num_known}
        house.check(first.conversation.id)


def test_the_other_branch_is_read_again_and_said_to_be(house: House) -> None:
    """Law 4: its tokens had been computed and were cut for the branch that was shown meanwhile."""
    old = chat_of(house, 3)
    chat_id = old.conversation.id
    num_known = len(house.kept()[chat_id].cache)
    view = house.edit(old.messages[0].id, "Something else entirely")
    house.chats.select(OWNER, view.messages[0].id, -1)
    view = house.say("And?", chat_id)
    prompt = house.prompt(view, upto=-1)
    read_again = num_known - stats(view).num_live_tokens
    assert dict(stats(view).reasons) == {"evicted": read_again, "new": len(prompt) - num_known}
    house.check(chat_id)


def test_the_other_branch_is_said_to_be_read_again_although_the_edit_was_stopped_at_once(
    house: House,
) -> None:
    """Law 4: what is left of the cache is then a plain beginning of the old branch, but the rest of that
    branch had been computed all the same."""
    old = chat_of(house, 3)
    chat_id = old.conversation.id
    num_known = len(house.kept()[chat_id].cache)
    with Passes(house.loaded.model) as passes:
        hold = passes.hold()
        blocker = house.start("Another chat", owner="ben")
        hold.wait_until_reached()
        job = house.chats.edit(OWNER, old.messages[0].id, "Something else entirely", GREEDY)
        job.request_stop()
        hold.release()
        house.finish(blocker)
    view = house.finish(job)
    house.check_invariant(chat_id)
    house.chats.select(OWNER, view.messages[0].id, -1)
    view = house.say("And?", chat_id)
    house.check(chat_id)
    prompt = house.prompt(view, upto=-1)
    read_again = num_known - stats(view).num_live_tokens
    assert stats(view).reasons.get("new") == len(prompt) - num_known
    assert stats(view).num_read_again == read_again


@pytest.mark.parametrize("verb", ["send", "edit", "regenerate"])
@pytest.mark.parametrize("loss", ["system prompt", "eviction", "restart"])
def test_every_token_is_accounted_for_whatever_comes_together(house: House, verb: str, loss: str) -> None:
    """Law 4: two causes in one turn, which may even bear the same name."""
    view = chat_of(house, 3)
    chat_id = view.conversation.id
    if loss == "system prompt":
        house.chats.set_system_prompt(OWNER, chat_id, "Be brief.")
    elif loss == "eviction":
        house.live.forget(chat_id, "evicted")
    else:
        house.restart()
    if verb == "send":
        view = house.say("And?", chat_id)
    elif verb == "edit":
        view = house.edit(view.messages[2].id, "Something else")
    else:
        view = house.regenerate(view.messages[-1].id)
    house.check(chat_id)
    assert stats(view).num_prompt_tokens == len(house.prompt(view, upto=-1))
    assert stats(view).num_prefilled_tokens > 0


def test_nothing_is_called_read_again_in_a_chat_s_first_turn(house: House) -> None:
    """Law 4: whatever other chats there are."""
    house.say(DOCUMENT)
    for text in ("Hi", DOCUMENT, DOCUMENT + "More"):
        view = house.say(text)
        assert not READ_AGAIN & set(stats(view).reasons)


def test_a_regenerated_first_reply_after_a_restart_is_read_again(house: House) -> None:
    """Law 4: the question had been read before; only the boundary token is not a second reading."""
    view = house.say(DOCUMENT)
    prompt = house.prompt(view, upto=-1)
    house.restart()
    view = house.regenerate(view.messages[-1].id)
    assert stats(view).num_read_again == len(prompt) - 1
    assert set(stats(view).reasons) <= {"off", "new", "boundary"}
    house.check(view.conversation.id)


def test_a_template_that_writes_the_date_is_named_when_the_day_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 4: nobody edited anything and nothing was evicted."""

    class Clock(datetime):
        shown_day = 1

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime(2031, 5, cls.shown_day)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    dated = "{{ 'Today is ' + strftime_now('%d %m %Y') + '\n' }}" + CHATML
    with House(tmp_path, with_template(llama(), dated)) as house:
        view = house.say("Hi")
        num_known = len(house.kept()[view.conversation.id].cache)
        Clock.shown_day = 2
        view = house.say("And?", view.conversation.id)
        house.check(view.conversation.id)
        read_again = num_known - stats(view).num_live_tokens
        assert read_again > 10
        assert dict(stats(view).reasons) == {
            "template": read_again,
            "new": stats(view).num_prompt_tokens - num_known,
        }


# 5. The cost follows the new tokens


def test_writing_copies_the_cache_no_more_than_a_few_times(house: House) -> None:
    """Law 5: between two growths the buffers stay where they are."""
    places: list[int] = []
    view = house.say("Hi")
    chat_id = view.conversation.id
    (layer, *_) = layers(house, chat_id)
    update = layer.update

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = update(*args, **kwargs)
        places.append(layer.keys.data_ptr())
        return result

    layer.update = watched
    house.say("Go on", chat_id, SamplingSettings(temperature=0, max_new_tokens=300))
    moves = sum(a != b for a, b in pairwise(places))
    assert len(places) >= 300
    assert moves <= 20  # steps of 16 tokens, and an eighth to spare


def test_each_token_is_one_pass_over_one_token(house: House, passes: Passes) -> None:
    """Law 5."""
    house.say("Hi", sampling=SamplingSettings(temperature=0, max_new_tokens=50))
    assert [len(ids) for ids in passes.fed[-50:]] == [1] * 50


def test_a_turn_stores_as_much_in_a_long_chat_as_in_a_short_one(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 5: bytes handed to the store per turn."""
    num_bytes = 0
    insert, execute = house.database.insert, house.database.execute

    def size(values: Any) -> int:
        return sum(len(value) for value in values if isinstance(value, (str, bytes)))

    def counting_insert(table: str, values: Any) -> None:
        nonlocal num_bytes
        num_bytes += size(values.values())
        insert(table, values)

    def counting_execute(sql: str, parameters: Any = ()) -> int:
        nonlocal num_bytes
        num_bytes += size(parameters)
        return execute(sql, parameters)

    monkeypatch.setattr(house.database, "insert", counting_insert)
    monkeypatch.setattr(house.database, "execute", counting_execute)
    per_turn: list[int] = []
    view = None
    with dictated(*[*TOKENIZER.encode("Yes."), END] * 30):
        for _ in range(30):
            num_bytes = 0
            view = house.say("The same message", view and view.conversation.id)
            per_turn.append(num_bytes)
    assert max(per_turn[2:]) - min(per_turn[2:]) < 100

"""Several people at once: nothing is mixed, seen by a stranger, or kept waiting."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from cache_store.errors import NotFound, StaleView
from chat.chats import ChatView
from chat.errors import NothingToDo
from chat.job import Job
from chat.settings import SamplingSettings
from tests.chat.passes import Passes, llama
from tests.chat.replies import (
    TOKENIZER,
    chat_of,
    texts,
)
from tests.house import GREEDY, OWNER, House, end_view, last_stats


@pytest.mark.parametrize("stranger", ["ben", "", "ADA", "ada "])
def test_an_id_of_another_owner_opens_nothing_and_changes_nothing(house: House, stranger: str) -> None:
    """C45, law 6."""
    view = chat_of(house, 2)
    chat_id, question, reply = view.conversation.id, view.messages[0].id, view.messages[1].id
    verbs: list[Callable[[], object]] = [
        lambda: house.chats.view(stranger, chat_id),
        lambda: house.chats.send(
            stranger, "x", conversation_id=chat_id, leaf_id=view.leaf_id, sampling=GREEDY
        ),
        lambda: house.chats.regenerate(stranger, reply, GREEDY),
        lambda: house.chats.regenerate(stranger, question, GREEDY),
        lambda: house.chats.edit(stranger, question, "x", GREEDY),
        lambda: house.chats.select(stranger, reply, 1),
        lambda: house.chats.stop(stranger, chat_id),
        lambda: house.chats.rename(stranger, chat_id, "x"),
        lambda: house.chats.set_system_prompt(stranger, chat_id, "x"),
        lambda: house.chats.delete(stranger, chat_id),
    ]
    for verb in verbs:
        with pytest.raises(NotFound):
            verb()
    assert house.chats.list(stranger) == []
    assert house.chats.view(OWNER, chat_id).messages == view.messages
    assert chat_id in house.kept()


def test_the_same_text_of_two_owners_is_computed_twice(house: House) -> None:
    """C45, law 6: a reuse would leak by its speed."""
    document = "A pasted document with many words. " * 3
    mine = house.say(document)
    theirs = house.say(document, owner="ben")
    assert last_stats(theirs)["num_live_tokens"] == 0
    assert mine.messages[-1].token_ids == theirs.messages[-1].token_ids
    again = house.say(document)
    assert last_stats(again)["num_live_tokens"] == last_stats(mine)["num_prompt_tokens"] - 1  # pyright: ignore[reportOperatorIssue]


MARKERS = ("quince", "walnut", "osprey", "cobalt", "fjord", "zephyr", "mangle", "tundra")


@pytest.mark.parametrize("num_owners", [2, 8])
def test_owners_who_write_at_once_with_hardly_any_memory_get_what_they_get_alone(
    tmp_path: Path, num_owners: int
) -> None:
    """C45: five rounds; no foreign word in a prompt or a cache, and the same greedy replies as alone."""
    owners = MARKERS[:num_owners]
    short = SamplingSettings(temperature=0, max_new_tokens=4)

    def ask(owner: str, number: int) -> str:
        return f"My word is {owner}. Round {number}."

    def talk(house: House, owner: str) -> ChatView:
        view = house.say(ask(owner, 0), None, short, owner)
        for number in range(1, 5):
            view = house.say(ask(owner, number), view.conversation.id, short, owner)
        return view

    (tmp_path / "alone").mkdir()
    (tmp_path / "together").mkdir()
    with House(tmp_path / "alone", llama()) as house:
        alone = {owner: talk(house, owner) for owner in owners}
    budget = 300 * llama().kv_bytes_per_token
    with House(tmp_path / "together", llama(), max_live_bytes=budget) as house:
        with ThreadPoolExecutor(num_owners) as pool:
            together = dict(zip(owners, pool.map(lambda owner: talk(house, owner), owners), strict=True))
        assert house.live.nbytes <= budget
        for live in house.kept().values():
            held = TOKENIZER.decode(live.cache.token_ids)
            assert [word for word in MARKERS if word in held] == [live.owner]
        for owner in owners:
            assert [m.token_ids for m in together[owner].messages] == [
                m.token_ids for m in alone[owner].messages
            ]
            (chat,) = house.chats.list(owner)
            shown = "".join(texts(house.chats.view(owner, chat.id))) + chat.title
            assert [word for word in MARKERS if word in shown] == [owner]
            house.check(chat.id, owner)


BRIEF = SamplingSettings(temperature=0, max_new_tokens=3)


def act(house: House, owner: str, random: Random, number: int) -> Job | None:
    """Do something at random, whatever is being written at the moment; what cannot be done is refused."""
    chats = house.chats.list(owner)
    if not chats or random.random() < 0.15:
        return house.start(f"{owner} {number}", owner=owner)
    view = house.chats.view(owner, random.choice(chats).id)
    chat_id, message_id = view.conversation.id, random.choice(view.messages).id
    if len(chats) > 2 and random.random() < 0.15:
        return house.chats.delete(owner, chat_id)
    verbs: list[Callable[[], object]] = [
        lambda: house.start(f"{owner} {number}", chat_id, BRIEF, owner),
        lambda: house.chats.edit(owner, message_id, f"{owner} edits {number}", BRIEF),
        lambda: house.chats.regenerate(owner, message_id, BRIEF),
        lambda: house.chats.select(owner, message_id, 1),
        lambda: house.chats.stop(owner, chat_id),
    ]
    with suppress(NothingToDo, StaleView):
        done = random.choice(verbs)()
        return done if isinstance(done, Job) else None
    return None


def test_many_hands_at_once_leave_every_chat_whole(tmp_path: Path) -> None:
    """C45: four people send, stop, edit, regenerate, select, delete and look without waiting for anything."""
    budget, owners = 300 * llama().kv_bytes_per_token, MARKERS[:4]

    def live_on(owner: str) -> list[Job | None]:
        random = Random(owner)
        return [act(house, owner, random, number) for number in range(25)]

    with House(tmp_path, llama(), max_live_bytes=budget) as house:
        with ThreadPoolExecutor(len(owners)) as pool:
            jobs = [job for done in pool.map(live_on, owners) for job in done if job is not None]
        for job in jobs:
            end_view(job)
        left = {chat.id: owner for owner in owners for chat in house.chats.list(owner)}
        assert set(house.kept()) <= set(left)
        assert house.live.nbytes <= budget
        for chat_id, owner in left.items():
            view = house.chats.view(owner, chat_id)
            assert view.job is None
            assert all(message.status in ("done", "stopped") for message in view.messages)
            view = house.say("And now?", chat_id, owner=owner)
            house.check(chat_id, owner)
            held = TOKENIZER.decode(house.prompt(view).token_ids)
            assert not [word for word in owners if word != owner and word in held]


def test_short_actions_do_not_wait_for_a_long_reply(house: House) -> None:
    """C45: they all return while a pass of the model is held, which never ends by itself."""
    other = chat_of(house, 2, "ben")
    with Passes(house.loaded.model) as passes:
        hold = passes.hold(2)
        job = house.start("Go")
        hold.wait_until_reached()
        created = house.chats.create("ben")
        assert {chat.id for chat in house.chats.list("ben")} == {created.id, other.conversation.id}
        assert house.chats.view("ben", other.conversation.id).messages == other.messages
        house.chats.rename("ben", created.id, "x")
        house.chats.select("ben", other.messages[1].id, 1)
        house.chats.stop("ben", other.conversation.id)
        house.chats.delete("ben", created.id)
        waiting = house.start("Wait", other.conversation.id, owner="ben")
        house.chats.stop("ben", other.conversation.id)
        assert end_view(waiting).state == "stopped"
        house.chats.stop(OWNER, job.conversation_id)
        assert not job.view.ended
        hold.release()
        assert end_view(job).state == "stopped"


def test_stopping_and_sending_again_at_once_gives_one_answer_each(house: House) -> None:
    """C45: cancel and resend within milliseconds, twenty times."""
    chat_id = house.say("Hi").conversation.id
    jobs: list[Job] = []
    for number in range(20):
        jobs.append(house.start(f"Again {number}", chat_id))
        house.chats.stop(OWNER, chat_id)
        end_view(jobs[-1])
    view = house.chats.view(OWNER, chat_id)
    assert len(view.messages) == 2 + 40
    assert [m.text for m in view.messages[2::2]] == [f"Again {number}" for number in range(20)]
    house.say("And?", chat_id)
    house.check(chat_id)

"""One inference thread, a fair queue, and nothing that goes wrong in a reply ends either."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import chat.worker
from cache_store.records import Conversation, Message
from chat.errors import ChatError, ModelError, ModelUnusable, QueueFull
from chat.job import Job
from chat.reuse import Origin
from chat.session import ChatSession
from chat.worker import FairQueue, Task
from tests.chat.passes import PATIENCE_S, Passes, llama
from tests.house import GREEDY, House, end_view


def task(owner: str, name: str = "") -> Task:
    conversation = Conversation(name, owner, "", "", 0.0, 0.0)
    reply = Message(name, name, None, "assistant", "", "running", 0.0)
    return Task(Job(owner, name, name), conversation, reply, Origin())


def names(tasks: list[Task]) -> list[str]:
    return [task.job.reply_id for task in tasks]


# the queue alone


def test_ten_messages_of_one_person_delay_another_by_one_reply() -> None:
    queue = FairQueue()
    for number in range(10):
        queue.push(task("ada", f"a{number}"))
    queue.push(task("ben", "b0"))
    assert [queue.pop().job.reply_id for _ in range(3)] == ["a0", "b0", "a1"]


def test_each_owner_s_own_messages_keep_their_order() -> None:
    queue = FairQueue()
    for number in range(4):
        queue.push(task("ada", f"a{number}"))
        queue.push(task("ben", f"b{number}"))
    assert [queue.pop().job.reply_id for _ in range(8)] == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]


def test_an_empty_queue_has_nothing_to_give() -> None:
    queue = FairQueue()
    assert len(queue) == 0
    assert queue.in_order() == []
    with pytest.raises(IndexError):
        queue.pop()


@given(
    st.lists(
        st.one_of(st.sampled_from(["ada", "ben", "eve"]), st.just("pop"), st.just("remove")), max_size=25
    )
)
def test_the_order_foretold_is_the_order_of_service(steps: list[str]) -> None:
    """The position that a waiting person sees is true as long as nobody else comes or goes."""
    queue, waiting = FairQueue(), list[Task]()
    for number, step in enumerate(steps):
        if step == "pop":
            if waiting:
                waiting.remove(queue.pop())
        elif step == "remove":
            if waiting:
                gone = waiting.pop(number % len(waiting))
                assert queue.remove(gone.job) is gone
                assert queue.remove(gone.job) is None
        else:
            waiting.append(task(step, str(number)))
            queue.push(waiting[-1])
        assert len(queue) == len(waiting)
    foretold = names(queue.in_order())
    assert foretold == names([queue.pop() for _ in range(len(queue))])
    assert sorted(foretold) == sorted(names(waiting))


@given(st.lists(st.sampled_from(["ada", "ben", "eve"]), min_size=1, max_size=20))
def test_nobody_is_served_twice_while_another_waits(owners: list[str]) -> None:
    queue = FairQueue()
    for number, owner in enumerate(owners):
        queue.push(task(owner, str(number)))
    served: list[str] = []
    while len(queue):
        waiting = {task.job.owner for task in queue.in_order()}
        owner = queue.pop().job.owner
        if waiting - {owner} and served:
            assert served[-1] != owner
        served.append(owner)


# waiting in line


def recorded(house: House, served: list[str]) -> None:
    """Note the text of the question of each reply in the order in which the session gets them."""
    session: Any = house.worker.session
    advance: Callable[..., Iterator[Any]] = session.advance

    def noting(conversation: Conversation, reply: Message, **options: Any) -> Iterator[Any]:
        served.append(house.store.path_to(conversation.owner, reply.id)[-2].text)
        return advance(conversation, reply, **options)

    session.advance = noting


def test_owners_take_turns_and_see_their_place(house: House, passes: Passes) -> None:
    served: list[str] = []
    recorded(house, served)
    hold = passes.hold()
    jobs = [house.start("a1")]
    hold.wait_until_reached()
    jobs += [house.start("a2"), house.start("a3"), house.start("b1", owner="ben")]
    assert [job.view.state for job in jobs[1:]] == ["queued"] * 3
    positions = {job.view.position: name for job, name in zip(jobs[1:], ("a2", "a3", "b1"), strict=True)}
    assert sorted(positions) == [1, 2, 3]
    foretold = [positions[place] for place in (1, 2, 3)]
    hold.release()
    assert all(end_view(job).position == 0 for job in jobs)
    assert served == ["a1", *foretold]
    assert served.index("b1") <= 2


def test_a_place_in_line_moves_up_when_one_before_it_is_done(house: House, passes: Passes) -> None:
    first = passes.hold()
    running = house.start("one")
    first.wait_until_reached()
    waiting = [house.start("two", owner="ben"), house.start("three", owner="eve")]
    assert [job.view.position for job in waiting] == [1, 2]
    before = waiting[1].view.version
    second = passes.hold(
        number=9
    )  # one pass is held, seven more follow, then the next reply reads its prompt
    first.release()
    end_view(running)
    second.wait_until_reached()
    assert waiting[1].wait(before, PATIENCE_S).position == 1
    second.release()
    assert [end_view(job).state for job in waiting] == ["stopped", "stopped"]  # at their length


def test_stopping_a_waiting_reply_ends_it_at_once_and_no_other(house: House, passes: Passes) -> None:
    """C37: while another reply is being written."""
    hold = passes.hold()
    running = house.start("one")
    hold.wait_until_reached()
    waiting, last = house.start("two", owner="ben"), house.start("three", owner="eve")
    house.chats.stop("ben", waiting.conversation_id)
    assert end_view(waiting).state == "stopped"
    view = house.chats.view("ben", waiting.conversation_id)
    assert (view.job, view.messages[-1].status, view.messages[-1].text) == (None, "stopped", "")
    assert last.view.position == 1
    assert not running.view.ended
    hold.release()
    assert (end_view(running).error, end_view(last).error) == (None, None)
    house.say("again", waiting.conversation_id, owner="ben")
    house.check(waiting.conversation_id, "ben")


def test_deleting_a_waiting_chat_ends_its_job(house: House, passes: Passes) -> None:
    hold = passes.hold()
    running = house.start("one")
    hold.wait_until_reached()
    waiting = house.start("two")
    house.chats.delete("ada", waiting.conversation_id)
    assert end_view(waiting).state == "stopped"
    hold.release()
    assert end_view(running).error is None


def test_a_full_queue_refuses_before_anything_is_stored(
    house: House, passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat.worker, "MAX_WAITING", 2)
    chat_id = house.say("before").conversation.id
    question, reply = (message.id for message in house.chats.view("ada", chat_id).messages)
    hold = passes.hold()
    jobs = [house.start("one")]
    hold.wait_until_reached()
    jobs += [house.start("two"), house.start("three")]
    rows = house.num_rows()
    verbs: list[Callable[[], object]] = [
        lambda: house.start("four"),
        lambda: house.start("four", chat_id),
        lambda: house.chats.regenerate("ada", reply, GREEDY),
        lambda: house.chats.edit("ada", question, "other", GREEDY),
    ]
    for verb in verbs:
        with pytest.raises(QueueFull, match="kept"):
            verb()
    assert house.num_rows() == rows
    hold.release()
    for job in jobs:
        end_view(job)
    house.say("four", chat_id)


# loading


class Loading:
    """A `load` that waits to be told how it ends."""

    def __init__(self) -> None:
        self.house: House | None = None
        self.error: BaseException | None = None
        self.go_on = threading.Event()

    def __call__(self) -> ChatSession:
        assert self.go_on.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        assert self.house is not None
        return self.house.new_session()


@pytest.fixture
def loading(tmp_path: Path) -> Generator[Loading]:
    loading = Loading()
    with House(tmp_path, llama(), load=loading) as house:
        loading.house = house
        try:
            yield loading
        finally:
            loading.go_on.set()


def house_of(loading: Loading) -> House:
    assert loading.house is not None
    return loading.house


def test_messages_sent_while_the_model_loads_are_stored_and_answered_in_turn(loading: Loading) -> None:
    house = house_of(loading)
    first, second = house.start("one"), house.start("two")
    assert house.chats.model_status().state == "loading"
    assert (first.view.state, second.view.state, second.view.position) == ("loading", "queued", 1)
    assert house.chats.view("ada", first.conversation_id).messages[0].text == "one"
    loading.go_on.set()
    for job in (first, second):
        assert end_view(job).error is None
        house.check(job.conversation_id)
    assert house.chats.model_status().state == "ready"


@pytest.mark.parametrize(
    "error",
    [
        ModelUnusable("It cannot chat."),
        RuntimeError("no kernel"),
        MemoryError(),
        SystemExit(1),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_model_that_does_not_load_fails_every_reply_with_the_reason_and_leaves_the_app(
    loading: Loading, error: BaseException
) -> None:
    house = house_of(loading)
    waiting = [house.start("one"), house.start("two", owner="ben")]
    loading.error = error
    loading.go_on.set()
    for job in waiting:
        ended = end_view(job)
        assert ended.state == "failed"
        assert ended.error
        reply = house.chats.view(job.owner, job.conversation_id).messages[-1]
        assert (reply.status, reply.error) == ("failed", ended.error)
    rows = house.num_rows()
    with pytest.raises(ModelError):
        house.start("three")
    with pytest.raises(ModelError):
        house.start("three", waiting[0].conversation_id)
    assert house.num_rows() == rows
    status = house.chats.model_status()
    assert (status.state, bool(status.detail)) == ("failed", True)
    assert [chat.title for chat in house.chats.list("ada")] == ["one"]
    house.chats.rename("ada", waiting[0].conversation_id, "still here")
    house.chats.delete("ada", waiting[0].conversation_id)
    assert house.chats.list("ada") == []


# what must not end the thread


@pytest.mark.parametrize("error", [ValueError("odd"), KeyboardInterrupt(), SystemExit(1)], ids=repr)
def test_a_session_that_breaks_its_promise_fails_one_job_only(house: House, error: BaseException) -> None:
    """C31: whatever leaves `advance`, nobody waits for ever and the next message is answered."""
    session: Any = house.worker.session
    advance = session.advance

    def broken(*_: Any, **__: Any) -> Iterator[Any]:
        session.advance = advance
        raise error
        yield

    session.advance = broken
    job = house.start("one")
    ended = end_view(job)
    assert ended.state == "failed"
    assert ended.error
    view = house.chats.view("ada", job.conversation_id)
    assert view.job is None
    stored = house.store.message("ada", job.reply_id)
    assert (stored.status, stored.error) == ("failed", ended.error)
    house.say("two", job.conversation_id)
    house.check_oracle(job.conversation_id)


def test_closing_stores_what_was_written_and_what_waited_and_ends_the_thread(tmp_path: Path) -> None:
    with Passes(llama().model) as passes:
        house = House(tmp_path, llama())
        hold = passes.hold(number=5)
        running, waiting = house.start("one"), house.start("two")
        hold.wait_until_reached()
        closing = threading.Thread(target=house.worker.close)
        closing.start()
        assert end_view(waiting).state == "stopped"
        hold.release()
        closing.join(PATIENCE_S)
        assert end_view(running).state == "stopped"
        stored = [house.store.path("ada", job.conversation_id)[-1] for job in (running, waiting)]
        assert [reply.status for reply in stored] == ["stopped", "stopped"]
        assert len(stored[0].token_ids) > 0
        assert not [thread for thread in threading.enumerate() if thread is house.worker._thread]  # pyright: ignore[reportPrivateUsage]
        house.close()


def test_a_message_that_comes_while_the_app_closes_is_refused_or_ended_and_never_left_waiting(
    tmp_path: Path,
) -> None:
    """C31: nobody waits for a reply that nobody will write."""
    house = House(tmp_path, llama())
    chat_id = house.say("one").conversation.id
    house.worker.close()
    try:
        with suppress(ChatError):
            assert house.start("two", chat_id).wait_until_ended(1.0).ended
    finally:
        house.close()

"""What people can do with their chats, and that each deed is done whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_store import tree
from cache_store.conversations import Conversations
from cache_store.database import Database
from cache_store.errors import DatabaseDamaged, DiskRefused, NotFound, StaleView, StoreError
from cache_store.records import Message
from tests.cache_store.talk import SAMPLING, SEED, begin, dump, edit, finish, say

# Conversations


def test_a_new_conversation_is_empty_and_can_be_read_back(store: Conversations) -> None:
    created = store.create("ann", title="Plants", system_prompt="Be brief.")
    assert store.get("ann", created.id) == created
    assert (created.title, created.system_prompt) == ("Plants", "Be brief.")
    assert len(created.id) == 32
    assert store.path("ann", created.id) == []
    assert store.siblings("ann", created.id) == {}


def test_a_kind_of_cache_belongs_to_a_chat_and_its_forks_until_it_is_taken_back(store: Conversations) -> None:
    turn = begin(store)
    chat_id = turn.question.conversation_id
    assert store.get("ann", chat_id).cache_kind is None
    assert store.set_cache_kind("ann", chat_id, "native8").cache_kind == "native8"
    assert store.fork("ann", turn.question.id, title="Fork").cache_kind == "native8"
    assert store.set_cache_kind("ann", chat_id, None) == replace(store.get("ann", chat_id), cache_kind=None)


def test_a_person_allows_smaller_caches_for_their_own_chats_only(store: Conversations) -> None:
    assert not store.may_shrink_caches("ann")
    for allowed in (True, False, True):
        store.allow_shrinking_caches("ann", allowed)
        assert store.may_shrink_caches("ann") is allowed
    assert not store.may_shrink_caches("ben")


def test_a_first_turn_brings_its_conversation_with_it(store: Conversations) -> None:
    conversation, turn = store.create_with_turn(
        "ann", title="Hi", system_prompt="", text="Hello", sampling=SAMPLING, seed=SEED
    )
    assert store.list("ann") == [conversation]
    assert store.path("ann", conversation.id) == [turn.question, turn.reply]
    assert conversation.updated_at == turn.reply.created_at


def test_a_turn_is_a_finished_question_and_a_running_reply(store: Conversations) -> None:
    turn = begin(store, text="Hello")
    assert (turn.question.role, turn.question.status, turn.question.text) == ("user", "done", "Hello")
    assert (turn.reply.role, turn.reply.status, turn.reply.text) == ("assistant", "running", "")
    assert (turn.reply.sampling, turn.reply.seed) == (SAMPLING, SEED)
    assert (turn.question.parent_id, turn.reply.parent_id) == (None, turn.question.id)


def test_renaming_and_a_new_system_prompt_are_stored_and_leave_the_order_alone(store: Conversations) -> None:
    first, second = store.create("ann", title="one"), store.create("ann", title="two")
    assert store.rename("ann", first.id, "1") == store.get("ann", first.id)
    assert store.set_system_prompt("ann", first.id, "Rhyme.") == store.get("ann", first.id)
    assert [(c.title, c.system_prompt) for c in store.list("ann")] == [("two", ""), ("1", "Rhyme.")]
    assert store.get("ann", second.id) == second


def test_the_list_shows_the_last_used_first(store: Conversations) -> None:
    turns = [begin(store, text=str(number)) for number in range(3)]
    finish(store, turns[0].reply.id)
    say(store, turns[0].question.conversation_id)
    store.add_reply("ann", turns[1].question.id, sampling={}, seed=None)
    ids = [conversation.id for conversation in store.list("ann")]
    assert ids == [turns[number].question.conversation_id for number in (1, 0, 2)]
    assert [conversation.id for conversation in store.list("ann", limit=2)] == ids[:2]


def test_conversations_of_the_same_second_are_listed_newest_first(database: Database) -> None:
    store = Conversations(database, clock=lambda: 1.0)
    created = [store.create("ann", title=str(number)) for number in range(3)]
    assert store.list("ann") == created[::-1]


@pytest.mark.parametrize(
    ("search", "found"),
    [
        ("", "abc"),
        ("ÄPFEL", "a"),
        ("groß", "b"),
        ("GROSS", "b"),
        ("100%", "b"),
        ("%", "b"),
        ("_", "c"),
        ("snake_case", "c"),
        ("after nul", "c"),
        ("\\", ""),
        ("nowhere", ""),
        ("\ud83d", ""),
    ],
)
def test_search_looks_in_titles_and_texts_whatever_the_case(
    store: Conversations, search: str, found: str
) -> None:
    for title, text in [("a", "Süße Äpfel"), ("b", "Groß, 100% sure"), ("c", "snake_case\x00After NUL")]:
        store.create_with_turn("ann", title=title, system_prompt="", text=text, sampling={}, seed=None)
    assert {conversation.title for conversation in store.list("ann", search)} == set(found)


def test_search_also_finds_titles_and_replies_on_hidden_branches(store: Conversations) -> None:
    turn = begin(store)
    finish(store, turn.reply.id, "A needle")
    edit(store, turn.question, "Something else")
    assert len(store.list("ann", "needle")) == 1
    assert len(store.list("ann", "TALK")) == 1


# Deleting


def test_deleting_takes_everything_of_that_conversation_and_nothing_else(
    store: Conversations, database: Database
) -> None:
    kept = begin(store, text="kept")
    before = dump(database)
    doomed = begin(store, text="doomed")
    store.save_progress(doomed.reply.id, 0, [1], "x")
    edit(store, doomed.question, "other branch")
    store.delete("ann", doomed.question.conversation_id)
    assert dump(database) == before
    assert store.path("ann", kept.question.conversation_id)
    with pytest.raises(NotFound):
        store.path("ann", doomed.question.conversation_id)


def test_deleted_text_is_not_in_any_file_any_more(store: Conversations, tmp_path: Path) -> None:
    turn = begin(store, text="Marzipan" + " and more" * 3000)
    store.save_progress(turn.reply.id, 0, range(2000), "Marzipan is sweet. " * 500)
    finish(store, turn.reply.id, "Marzipan is sweet. " * 500, tuple(range(2000)))
    store.rename("ann", turn.question.conversation_id, "Marzipan")
    store.set_system_prompt("ann", turn.question.conversation_id, "Marzipan" * 1000)
    begin(store, text="Another chat")

    def left() -> bytes:
        return b"".join(path.read_bytes() for path in tmp_path.iterdir())

    assert b"Marzipan" in left()
    store.delete("ann", turn.question.conversation_id)
    assert b"Marzipan" not in left()
    assert b"Another chat" in left()


def test_a_disk_error_while_wiping_says_that_the_chat_is_deleted(
    store: Conversations, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> bool:
        raise DiskRefused("full")

    monkeypatch.setattr(database, "truncate_log", refuse)
    turn = begin(store)
    with pytest.raises(DiskRefused, match="The chat is deleted"):
        store.delete("ann", turn.question.conversation_id)
    assert store.list("ann") == []


# Text


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(),
    token_ids=st.lists(st.integers(0, 2**32 - 1)).map(tuple),
    seed=st.none() | st.integers(0, 2**63 - 1),
    sampling=st.dictionaries(
        st.text(), st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    ),
)
def test_text_ids_seed_and_settings_come_back_exactly(
    store: Conversations, text: str, token_ids: tuple[int, ...], seed: int | None, sampling: dict[str, object]
) -> None:
    conversation, turn = store.create_with_turn(
        "ann",
        title=text,
        system_prompt=text,
        text=text,
        sampling=sampling,  # pyright: ignore[reportArgumentType]
        seed=seed,
    )
    done = finish(store, turn.reply.id, text, token_ids)
    assert store.get("ann", conversation.id) == conversation
    assert (conversation.title, conversation.system_prompt) == (text, text)
    assert store.path("ann", conversation.id) == [turn.question, done]
    assert (turn.question.text, done.text, done.token_ids) == (text, text, token_ids)
    assert (done.seed, done.sampling, done.stats) == (seed, sampling, {"num_prompt_tokens": 3})


@pytest.mark.parametrize(
    "text",
    [
        "    four\n  two",
        "three newlines\n\n\n",
        "\x00",
        "a\x00b",
        "\U0001f469\u200d\U0001f680",
        "\r\n\t",
        " ",
    ],
)
def test_white_space_nul_and_emoji_are_kept(store: Conversations, text: str) -> None:
    turn = begin(store, text=text)
    assert store.message("ann", turn.question.id).text == text


def test_half_a_surrogate_pair_anywhere_is_stored_as_a_replacement_mark(store: Conversations) -> None:
    half, kept = "a\ud83d", "a\ufffd"
    conversation, turn = store.create_with_turn(
        "ann", title=half, system_prompt=half, text=half, sampling={"stop_strings": [half]}, seed=None
    )
    store.save_progress(turn.reply.id, 0, [1], half)
    done = store.finish_reply(
        turn.reply.id,
        token_ids=[1],
        text=half,
        status="failed",
        finish_reason=None,
        error=half,
        stats={},
    )
    assert (conversation.title, conversation.system_prompt) == (kept, kept)
    assert (turn.question.text, done.text, done.error) == (kept, kept, kept)
    assert done.sampling == {"stop_strings": [half]}
    assert store.path("ann", conversation.id) == [turn.question, done]
    assert store.rename("ann", conversation.id, half).title == kept
    assert store.create(half, title="x").owner == kept
    with pytest.raises(NotFound):
        store.get("ann", half)


# Turns and branches


def test_a_turn_on_an_old_view_is_refused_and_writes_nothing(
    store: Conversations, database: Database
) -> None:
    """C28: two tabs on one chat; the second one has not seen what the first one sent."""
    turn = begin(store)
    say(store, turn.question.conversation_id)
    before = dump(database)
    for seen in (turn.reply.id, turn.question.id, None, "unknown"):
        with pytest.raises(StaleView, match="was not stored"):
            store.add_turn(
                "ann",
                turn.question.conversation_id,
                parent_id=turn.reply.id,
                leaf_id=seen,
                text="Late",
                sampling={},
                seed=None,
            )
    assert dump(database) == before


def test_a_turn_for_a_deleted_chat_is_refused_and_writes_nothing(
    store: Conversations, database: Database
) -> None:
    """C28: deleted in one tab, sent from another."""
    turn = begin(store)
    store.delete("ann", turn.question.conversation_id)
    before = dump(database)
    with pytest.raises(NotFound):
        store.add_turn(
            "ann",
            turn.question.conversation_id,
            parent_id=turn.reply.id,
            leaf_id=turn.reply.id,
            text="Late",
            sampling={},
            seed=None,
        )
    assert dump(database) == before


def test_editing_keeps_the_old_branch_and_shows_the_new_one(store: Conversations) -> None:
    first = begin(store)
    chat = first.question.conversation_id
    second = say(store, chat)
    edited = edit(store, first.question, "Hello again")
    assert [m.id for m in store.path("ann", chat)] == [edited.question.id, edited.reply.id]
    assert [m.id for m in store.path_to("ann", second.reply.id)] == [
        first.question.id,
        first.reply.id,
        second.question.id,
        second.reply.id,
    ]
    standing = store.siblings("ann", chat)[edited.question.id]
    assert (standing.ids, standing.position) == ((first.question.id, edited.question.id), 1)


def test_selecting_a_branch_brings_back_what_was_shown_below_it(store: Conversations) -> None:
    first = begin(store)
    chat = first.question.conversation_id
    second = say(store, chat)
    edit(store, first.question, "Hello again")
    store.select("ann", first.question.id)
    assert [m.id for m in store.path("ann", chat)][-1] == second.reply.id


def test_selecting_deep_inside_a_hidden_branch_shows_everything_above_it(store: Conversations) -> None:
    first = begin(store)
    chat = first.question.conversation_id
    second = say(store, chat)
    other = store.add_reply("ann", second.question.id, sampling={}, seed=None)
    edit(store, first.question, "Hello again")
    store.select("ann", second.reply.id)
    assert [m.id for m in store.path("ann", chat)] == [m.id for m in store.path_to("ann", second.reply.id)]
    standing = store.siblings("ann", chat)[second.reply.id]
    assert (standing.ids, standing.position) == ((second.reply.id, other.id), 0)


def test_regenerating_on_a_hidden_branch_shows_that_branch(store: Conversations) -> None:
    first = begin(store)
    edit(store, first.question, "Hello again")
    reply = store.add_reply("ann", first.question.id, sampling=SAMPLING, seed=1)
    assert store.path("ann", first.question.conversation_id) == [first.question, reply]


def test_siblings_of_the_same_instant_stand_in_the_order_of_their_creation(database: Database) -> None:
    store = Conversations(database, clock=lambda: 1.0)
    turn = begin(store)
    made = [turn.reply] + [
        store.add_reply("ann", turn.question.id, sampling={}, seed=None) for _ in range(20)
    ]
    standing = store.siblings("ann", turn.question.conversation_id)[made[-1].id]
    assert standing.ids == tuple(reply.id for reply in made)


def test_a_parent_from_another_chat_of_the_same_owner_is_not_found(
    store: Conversations, database: Database
) -> None:
    here, there = begin(store), begin(store)
    before = dump(database)
    with pytest.raises(NotFound):
        store.branch_turn(
            "ann",
            here.question.conversation_id,
            parent_id=there.reply.id,
            text="x",
            sampling={},
            seed=None,
        )
    with pytest.raises(StaleView):
        store.add_turn(
            "ann",
            here.question.conversation_id,
            parent_id=there.reply.id,
            leaf_id=there.reply.id,
            text="x",
            sampling={},
            seed=None,
        )
    assert dump(database) == before


def test_questions_and_replies_take_turns(store: Conversations, database: Database) -> None:
    turn = begin(store)
    before = dump(database)
    with pytest.raises(ValueError, match="below a reply"):
        store.branch_turn(
            "ann",
            turn.question.conversation_id,
            parent_id=turn.question.id,
            text="x",
            sampling={},
            seed=None,
        )
    with pytest.raises(ValueError, match="below a user message"):
        store.add_reply("ann", turn.reply.id, sampling={}, seed=None)
    assert dump(database) == before


def test_a_snapshot_is_conversation_path_and_siblings_together(store: Conversations) -> None:
    turn = begin(store)
    chat = turn.question.conversation_id
    store.add_reply("ann", turn.question.id, sampling={}, seed=None)
    assert store.snapshot("ann", chat) == (
        store.get("ann", chat),
        store.path("ann", chat),
        store.siblings("ann", chat),
    )


def test_nobody_writes_in_the_middle_of_a_snapshot(
    store: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = begin(store)
    writer = threading.Thread(target=edit, args=(store, turn.question, "Hello again"))
    read_path = tree.selected_path

    def read_path_while_another_thread_writes(database: Database, conversation_id: str) -> list[Message]:
        path = read_path(database, conversation_id)
        writer.start()
        writer.join(0.3)  # time for it to do harm, if it can
        return path

    monkeypatch.setattr(tree, "selected_path", read_path_while_another_thread_writes)
    _, path, siblings = store.snapshot("ann", turn.question.conversation_id)
    writer.join(30)
    assert [message.id for message in path] == list(siblings) == [turn.question.id, turn.reply.id]


# Whole or not at all


@pytest.mark.parametrize("how", ["ABORT", "FAIL", "ROLLBACK"])
def test_a_turn_is_absent_when_its_second_half_cannot_be_stored(
    store: Conversations, database: Database, how: str
) -> None:
    """C27: the question must not stay behind alone."""
    turn = begin(store)
    before = dump(database)
    database.execute(
        "CREATE TEMP TRIGGER refuse BEFORE INSERT ON messages WHEN NEW.role = 'assistant' "
        f"BEGIN SELECT RAISE({how}, 'no reply today'); END"
    )
    with pytest.raises(StoreError):
        say(store, turn.question.conversation_id)
    with pytest.raises(StoreError):
        begin(store)
    assert dump(database) == before
    database.execute("DROP TRIGGER refuse")
    assert say(store, turn.question.conversation_id).reply.status == "running"


def _fail(*_: object) -> None:
    raise ZeroDivisionError


def test_a_turn_is_absent_when_an_exception_hits_between_its_halves(
    store: Conversations, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = begin(store)
    before = dump(database)
    with monkeypatch.context() as patch:
        patch.setattr(tree, "add_reply", _fail)
        for write in (lambda: say(store, turn.question.conversation_id), lambda: begin(store)):
            with pytest.raises(ZeroDivisionError):
                write()
    with monkeypatch.context() as patch:
        patch.setattr(tree, "select", _fail)
        for write in (
            lambda: say(store, turn.question.conversation_id),
            lambda: edit(store, turn.question, "x"),
            lambda: store.add_reply("ann", turn.question.id, sampling={}, seed=None),
        ):
            with pytest.raises(ZeroDivisionError):
                write()
    assert dump(database) == before


def test_a_row_that_cannot_be_read_is_an_error_and_not_an_empty_chat(
    store: Conversations, database: Database
) -> None:
    """C28: a page that took an error for an empty chat once saved that emptiness over the history."""
    turn = begin(store)
    database.execute("UPDATE messages SET sampling = '{' WHERE id = ?", [turn.reply.id])
    before = dump(database)
    for read in (store.path, store.snapshot):
        with pytest.raises(DatabaseDamaged):
            read("ann", turn.question.conversation_id)
    assert dump(database) == before


# Many at once, and deep


def hammer(work: Callable[[int], None], num_threads: int) -> list[BaseException]:
    """Run `work(0..num_threads-1)` at the same time; what they raised."""
    raised: list[BaseException] = []
    start = threading.Barrier(num_threads)

    def run(number: int) -> None:
        try:
            start.wait(30)
            work(number)
        except BaseException as exc:
            raised.append(exc)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return raised


def test_many_threads_share_one_store_and_nothing_mixes(store: Conversations) -> None:
    """C45: Gradio runs handlers in a pool while the inference thread writes."""

    def chat(number: int) -> None:
        owner = f"owner {number}"
        turn = begin(store, owner, text=owner)
        for step in range(8):
            store.save_progress(turn.reply.id, 0, [number, step], owner)
            finish(store, turn.reply.id, owner, (number, step))
            store.list(owner, "owner")
            turn = say(store, turn.question.conversation_id, owner, owner)

    assert hammer(chat, 8) == []
    for number in range(8):
        owner = f"owner {number}"
        (conversation,) = store.list(owner)
        path = store.path(owner, conversation.id)
        assert len(path) == 18
        assert {message.text for message in path[:-1]} == {owner}
        assert [message.token_ids for message in path[1:-1:2]] == [(number, step) for step in range(8)]


def test_of_many_senders_at_once_on_one_view_exactly_one_is_stored(store: Conversations) -> None:
    turn = begin(store)
    chat = turn.question.conversation_id

    def send(number: int) -> None:
        store.add_turn(
            "ann",
            chat,
            parent_id=turn.reply.id,
            leaf_id=turn.reply.id,
            text=str(number),
            sampling={},
            seed=None,
        )

    raised = hammer(send, 8)
    assert [type(exc) for exc in raised] == [StaleView] * 7
    assert len(store.path("ann", chat)) == 4


def count_statements(database: Database, work: Callable[[], object]) -> int:
    statements: list[str] = []
    connection = database._db.conn  # pyright: ignore[reportPrivateUsage]
    connection.set_trace_callback(statements.append)
    work()
    connection.set_trace_callback(None)
    return len(statements)


def grow(database: Database, leaf: Message, num_messages: int) -> Message:
    """Hang a chain of messages below a reply, in two statements; the new leaf."""
    parameters = {"leaf": leaf.id, "chat": leaf.conversation_id, "n": num_messages}
    chain = """
        WITH RECURSIVE chain (i, parent, child) AS (
            SELECT 1, :leaf, :chat || 1
            UNION ALL SELECT i + 1, child, :chat || (i + 1) FROM chain WHERE i < :n
        )
    """
    database.execute(
        f"""
        INSERT INTO messages (id, conversation_id, parent_id, role, status, created_at, sampling, stats,
            text, token_ids)
        {chain}
        SELECT child, :chat, parent, iif(i % 2, 'user', 'assistant'), 'done', 0, '{{}}', '{{}}', 'Go on', x''
        FROM chain ORDER BY i
        """,  # noqa: S608
        parameters,
    )
    shown = f"INSERT INTO selections (parent_id, child_id) {chain} SELECT parent, child FROM chain"  # noqa: S608
    database.execute(shown, parameters)
    return replace(leaf, id=f"{leaf.conversation_id}{num_messages}")


def test_a_path_of_thousands_of_messages_is_read_in_as_few_statements_as_a_short_one(
    store: Conversations, database: Database
) -> None:
    short = begin(store).reply
    deep = grow(database, begin(store).reply, 1998)
    assert len(store.path("ann", deep.conversation_id)) == 2000
    assert len(store.path_to("ann", deep.id)) == 2000
    assert len(store.siblings("ann", deep.conversation_id)) == 2000
    for read in (store.path, store.siblings, store.snapshot):
        counts = {
            count_statements(database, lambda leaf=leaf, read=read: read("ann", leaf.conversation_id))
            for leaf in (short, deep)
        }
        assert len(counts) == 1
        assert counts.pop() < 16
    counts = {
        count_statements(database, lambda leaf=leaf: store.path_to("ann", leaf.id)) for leaf in (short, deep)
    }
    assert len(counts) == 1
    store.delete("ann", deep.conversation_id)
    assert len(database.rows("SELECT 1 FROM messages")) == 2

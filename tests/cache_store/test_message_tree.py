"""Edited replies, undo and redo, branches that go for ever, forks: what each writes and what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_store.conversations import Conversations
from cache_store.database import Database
from cache_store.errors import DiskRefused, NotFound
from cache_store.records import Beginning, Message
from tests.cache_store.talk import SAMPLING, SEED, begin, dump, edit, finish, say


def talk(store: Conversations, *texts: str) -> list[Message]:
    """A chat of these questions, each answered; what is shown."""
    turn = begin(store, text=texts[0])
    finish(store, turn.reply.id, f"to {texts[0]}", (10, 2))
    for number, text in enumerate(texts[1:], start=11):
        reply = say(store, turn.question.conversation_id, text).reply
        finish(store, reply.id, f"to {text}", (number, 2))
    return shown(store, turn.question.conversation_id)


def shown(store: Conversations, conversation_id: str) -> list[Message]:
    return store.path("ann", conversation_id)


def texts(messages: list[Message]) -> list[str]:
    return [message.text for message in messages]


# Replies that begin with something


def test_a_reply_that_begins_with_something_keeps_it_over_a_crash(store: Conversations) -> None:
    """Both with ids that are known when it is stored, and with ids that come as its first piece."""
    path = talk(store, "one", "two")
    known, later = (
        store.add_reply("ann", path[2].id, sampling=SAMPLING, seed=SEED, beginning=beginning)
        for beginning in (Beginning("Well", (5, 6)), Beginning("Well"))
    )
    assert (known.text, known.token_ids, known.status) == ("Well", (5, 6), "running")
    store.save_progress(known.id, 2, [7], ", yes")
    store.save_progress(later.id, 0, [5, 6], "")
    store.save_progress(later.id, 2, [7], ", yes")
    assert store.recover() == 2
    for reply in (known, later):
        recovered = store.message("ann", reply.id)
        assert (recovered.text, recovered.token_ids) == ("Well, yes", (5, 6, 7))
        assert recovered.status == "stopped"


def test_progress_goes_on_behind_what_a_reply_begins_with(store: Conversations) -> None:
    path = talk(store, "one")
    reply = store.add_reply(
        "ann", path[0].id, sampling=SAMPLING, seed=SEED, beginning=Beginning("Well", (5, 6))
    )
    for wrong in (0, 1, 3):
        with pytest.raises(ValueError, match="2 tokens of the reply"):
            store.save_progress(reply.id, wrong, [7], "!")


# Edited replies


def test_an_edited_reply_is_a_sibling_and_the_old_branch_stays(store: Conversations) -> None:
    old = talk(store, "one", "two", "three")
    edited = store.add_edited_reply("ann", old[1].id, text="better", token_ids=(8, 2), keep_rest=False)
    assert (edited.status, edited.finish_reason, edited.token_ids) == ("done", "edited", (8, 2))
    assert shown(store, edited.conversation_id) == [old[0], edited]
    store.select("ann", old[1].id)
    assert shown(store, edited.conversation_id) == old


def test_what_follows_an_edited_reply_can_be_kept_as_copies(store: Conversations) -> None:
    """Same texts and ids, new rows; stats are not copied, because their tokens are still to be read."""
    old = talk(store, "one", "two", "three")
    chat_id = old[0].conversation_id
    other = edit(store, old[4], "not shown").reply
    finish(store, other.id)
    store.select("ann", old[5].id)
    edited = store.add_edited_reply("ann", old[1].id, text="better", token_ids=(8, 2), keep_rest=True)
    path = shown(store, chat_id)
    assert texts(path) == ["one", "better", "two", "to two", "three", "to three"]
    assert path[1] == edited
    assert [message.token_ids for message in path[2:]] == [message.token_ids for message in old[2:]]
    assert not {message.id for message in path[2:]} & {message.id for message in old}
    assert not any(message.stats for message in path[1:])
    assert "not shown" not in texts(path)
    store.select("ann", old[1].id)
    assert shown(store, chat_id) == old


def test_a_question_cannot_be_edited_as_a_reply(store: Conversations, database: Database) -> None:
    path = talk(store, "one")
    before = dump(database)
    with pytest.raises(ValueError, match="reply"):
        store.add_edited_reply("ann", path[0].id, text="x", token_ids=(), keep_rest=True)
    assert dump(database) == before


# Undo and redo


def test_undo_hides_question_by_question_and_redo_brings_all_back(store: Conversations) -> None:
    path = talk(store, "one", "two")
    chat_id = path[0].conversation_id
    assert store.undo("ann", chat_id) == path[2]
    assert shown(store, chat_id) == path[:2]
    assert store.undo("ann", chat_id) == path[0]
    assert shown(store, chat_id) == []
    assert store.undo("ann", chat_id) is None
    assert store.siblings("ann", chat_id) == {}
    assert store.redo("ann", chat_id) == path[0]
    assert shown(store, chat_id) == path[:2]
    assert store.redo("ann", chat_id) == path[2]
    assert shown(store, chat_id) == path
    assert store.redo("ann", chat_id) is None


def test_a_message_after_an_undo_is_a_sibling_of_the_undone_one(store: Conversations) -> None:
    path = talk(store, "one", "two")
    chat_id = path[0].conversation_id
    store.undo("ann", chat_id)
    turn = say(store, chat_id, "two, again")
    assert texts(shown(store, chat_id)) == ["one", "to one", "two, again", ""]
    assert store.siblings("ann", chat_id)[turn.question.id].ids == (path[2].id, turn.question.id)
    assert store.undone("ann", chat_id) is None


def test_selecting_what_was_undone_shows_it_again(store: Conversations) -> None:
    path = talk(store, "one", "two")
    chat_id = path[0].conversation_id
    store.undo("ann", chat_id)
    store.undo("ann", chat_id)
    store.select("ann", path[3].id)
    assert shown(store, chat_id) == path


# Branches that go


def test_a_deleted_branch_is_gone_with_all_below_it_and_nothing_else(store: Conversations) -> None:
    path = talk(store, "one", "two", "three")
    chat_id = path[0].conversation_id
    other = edit(store, path[2], "two, otherwise")
    finish(store, other.reply.id, "fine")
    store.select("ann", path[5].id)
    elsewhere = talk(store, "elsewhere")
    store.delete_branch("ann", path[2].id)
    assert texts(shown(store, chat_id)) == ["one", "to one", "two, otherwise", "fine"]
    for message in path[2:]:
        with pytest.raises(NotFound):
            store.message("ann", message.id)
    assert shown(store, elsewhere[0].conversation_id) == elsewhere
    store.delete_branch("ann", other.question.id)
    assert shown(store, chat_id) == path[:2]
    store.delete_branch("ann", path[0].id)
    assert shown(store, chat_id) == []
    say(store, chat_id, "again")
    assert texts(shown(store, chat_id)) == ["again", ""]


def test_the_sibling_before_a_deleted_branch_is_shown_then(store: Conversations) -> None:
    path = talk(store, "one")
    first, chat_id = path[1], path[0].conversation_id
    second, third = (store.add_reply("ann", path[0].id, sampling=SAMPLING, seed=SEED) for _ in range(2))
    store.select("ann", second.id)
    store.delete_branch("ann", second.id)
    assert shown(store, chat_id)[-1].id == first.id
    store.delete_branch("ann", first.id)
    assert shown(store, chat_id)[-1].id == third.id


def test_deleting_what_is_not_shown_changes_nothing_that_is(store: Conversations) -> None:
    path = talk(store, "one", "two")
    chat_id = path[0].conversation_id
    hidden = edit(store, path[0], "one, otherwise")
    store.select("ann", path[3].id)
    store.delete_branch("ann", hidden.reply.id)
    assert shown(store, chat_id) == path
    store.undo("ann", chat_id)
    store.delete_branch("ann", path[2].id)
    assert shown(store, chat_id) == path[:2]
    assert store.redo("ann", chat_id) is None


def test_a_deleted_branch_leaves_no_text_in_any_file(store: Conversations, tmp_path: Path) -> None:
    """Neither its own nor what stats of other messages quote of it, nor in a title that was taken from it."""
    path = talk(store, "one", "two")
    secret = edit(store, path[0], "Zanzibar is where the key is").reply
    finish(store, secret.id, "Under the Zanzibar stone" * 400)
    store.rename("ann", path[0].conversation_id, "Zanzibar is where")
    store.select("ann", path[3].id)
    regenerated = store.add_reply("ann", path[2].id, sampling=SAMPLING, seed=SEED)
    store.finish_reply(
        regenerated.id,
        token_ids=(1,),
        text="fine",
        status="done",
        finish_reason="eos",
        error=None,
        stats={"ttft_s": 0.5, "divergence": {"position": 3, "before": "", "old": "Zanzibar", "new": "one"}},
    )
    assert secret.parent_id is not None
    assert any(b"Zanzibar" in file.read_bytes() for file in tmp_path.iterdir())
    store.delete_branch("ann", secret.parent_id, "one")
    assert not any(b"Zanzibar" in file.read_bytes() for file in tmp_path.iterdir())
    assert store.message("ann", regenerated.id).stats == {"ttft_s": 0.5}
    assert store.get("ann", path[0].conversation_id).title == "one"


def test_a_disk_error_while_wiping_says_that_the_branch_is_deleted(
    store: Conversations, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> bool:
        raise DiskRefused("full")

    path = talk(store, "one", "two")
    monkeypatch.setattr(database, "truncate_log", refuse)
    with pytest.raises(DiskRefused, match="The branch is deleted"):
        store.delete_branch("ann", path[2].id)
    assert shown(store, path[0].conversation_id) == path[:2]


# Forks


def test_a_fork_is_a_chat_of_its_own_with_copies_of_the_path(store: Conversations) -> None:
    path = talk(store, "one", "two", "three")
    source = store.get("ann", path[0].conversation_id)
    fork = store.fork("ann", path[3].id, title="Talk (fork)")
    copies = shown(store, fork.id)
    assert (fork.title, fork.system_prompt, fork.owner) == ("Talk (fork)", source.system_prompt, "ann")
    assert texts(copies) == texts(path[:4])
    assert [copy.token_ids for copy in copies] == [message.token_ids for message in path[:4]]
    assert [copy.stats for copy in copies] == [message.stats for message in path[:4]]
    store.delete("ann", source.id)
    assert shown(store, fork.id) == copies
    say(store, fork.id, "on")
    assert texts(shown(store, fork.id))[-2:] == ["on", ""]


def test_a_fork_takes_no_texts_of_other_messages_along(store: Conversations) -> None:
    turn = begin(store)
    store.finish_reply(
        turn.reply.id,
        token_ids=(1,),
        text="fine",
        status="done",
        finish_reason="eos",
        error=None,
        stats={"ttft_s": 0.5, "divergence": {"old": "Zanzibar"}},
    )
    fork = store.fork("ann", turn.reply.id, title="fork")
    assert shown(store, fork.id)[1].stats == {"ttft_s": 0.5}


# Reading


def test_leaves_are_all_paths_whatever_is_shown(store: Conversations) -> None:
    path = talk(store, "one", "two")
    other = edit(store, path[0], "otherwise")
    store.undo("ann", path[0].conversation_id)
    paths = store.leaves("ann", path[0].conversation_id)
    assert [[message.id for message in each] for each in paths] == [
        [message.id for message in path],
        [other.question.id, other.reply.id],
    ]
    rest = store.leaves("ann", path[0].conversation_id, without=path[2].id)
    assert [len(each) for each in rest] == [2, 2]
    assert rest[1] == path[:2] or rest[0] == path[:2]
    assert [answer.id for answer in store.answers("ann", path[2].id)] == [path[3].id]

"""A process is killed without warning, at the worst moments; the next one finds whole turns only (C27)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cache_store.conversations import Conversations
from cache_store.database import Database

ROOT = Path(__file__).parents[2]

BEGIN = """
import sys
from pathlib import Path
from cache_store import tree
from cache_store.conversations import Conversations
from cache_store.database import Database
from tests.cache_store.talk import begin, edit, finish, say

database = Database(Path(sys.argv[1]))
store = Conversations(database)

def wait_for_the_kill(*_):
    print("now", flush=True)
    sys.stdin.read()

"""

FIRST = "turn = begin(store, text='First')\nfinish(store, turn.reply.id)\n"
CHAT = "turn.question.conversation_id"

DELETE = """
with database.transaction():
    database.execute('DELETE FROM conversations')
    wait_for_the_kill()
"""


def run_and_kill(path: Path, script: str) -> None:
    """Run `script` until it says that now is the moment, then kill it as `kill -9` does."""
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + script, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        process.kill()


def stored(path: Path) -> list[tuple[str, str]]:
    """(text, status) of what the next process shows, after it recovered."""
    database = Database(path)
    store = Conversations(database)
    store.recover()
    (conversation,) = store.list("ann")
    messages = [(message.text, message.status) for message in store.path("ann", conversation.id)]
    database.close()
    return messages


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keepwarm.sqlite"


def test_a_turn_survives_a_kill_right_after_it_was_sent(path: Path) -> None:
    run_and_kill(path, FIRST + f"say(store, {CHAT}, 'Second')\nwait_for_the_kill()")
    assert stored(path) == [("First", "done"), ("Well.", "done"), ("Second", "done"), ("", "stopped")]


def test_progress_survives_a_kill_right_after_it_was_saved(path: Path) -> None:
    run_and_kill(
        path,
        "turn = begin(store, text='First')\n"
        "store.save_progress(turn.reply.id, 0, [1], 'So')\n"
        "store.save_progress(turn.reply.id, 1, [2], ' far')\n"
        "wait_for_the_kill()",
    )
    assert stored(path) == [("First", "done"), ("So far", "stopped")]


@pytest.mark.parametrize("moment", ["add_reply", "select"])
def test_a_kill_in_the_middle_of_a_turn_leaves_nothing_of_it(path: Path, moment: str) -> None:
    run_and_kill(path, FIRST + f"tree.{moment} = wait_for_the_kill\nsay(store, {CHAT}, 'Second')")
    assert stored(path) == [("First", "done"), ("Well.", "done")]


def test_a_kill_in_the_middle_of_a_first_turn_leaves_no_conversation(path: Path) -> None:
    run_and_kill(path, "tree.add_reply = wait_for_the_kill\nbegin(store)")
    database = Database(path)
    assert Conversations(database).list("ann") == []
    database.close()


def test_a_kill_in_the_middle_of_an_end_leaves_the_saved_progress(path: Path) -> None:
    run_and_kill(
        path,
        "turn = begin(store, text='First')\n"
        "store.save_progress(turn.reply.id, 0, [1], 'So far')\n"
        "with database.transaction():\n"
        "    finish(store, turn.reply.id, 'Whole')\n"
        "    wait_for_the_kill()",
    )
    assert stored(path) == [("First", "done"), ("So far", "stopped")]


def test_a_kill_while_a_chat_is_deleted_keeps_it_whole(path: Path) -> None:
    run_and_kill(
        path,
        FIRST + DELETE,
    )
    assert stored(path) == [("First", "done"), ("Well.", "done")]

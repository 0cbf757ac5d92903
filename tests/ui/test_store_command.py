"""Looking after the saved caches from the command line: what is told, what is changed, what never is."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from cache_store.database import DatabaseView
from cache_store.errors import DatabaseDamaged, DataFolderBusy, DiskRefused, NothingThere
from cache_store.folder import DataFolder
from cache_store.migrations import STEPS
from cache_store.records import Conversation, Link
from tests.cache_store.kv_rows import FIELDS, Shelf
from ui.option_parser import UsageError
from ui.store_command import look_after
from ui.store_options import ACTIONS, UNLIMITED, parse_store_options
from ui.store_report import made_with

LOOKING = ("size", "list", "verify")
PUTTING_IN_ORDER = ("prune", "sweep")

Store = Callable[..., tuple[int, str]]


@pytest.fixture
def shelf(tmp_path: Path) -> Generator[Shelf]:
    shelf = Shelf(tmp_path)
    yield shelf
    shelf.close()


@pytest.fixture
def store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Store:
    """The command on the folder of `shelf`: its exit code and what it printed."""

    def run(*words: str) -> tuple[int, str]:
        code = look_after(parse_store_options([*words, "--data-dir", str(tmp_path)]))
        return code, capsys.readouterr().out

    return run


def document(answer: tuple[int, str]) -> Any:
    return json.loads(answer[1])


def talk(shelf: Shelf) -> tuple[Conversation, list[Link]]:
    """A chat of three segments, the last two of which fork from the first."""
    chat = shelf.chat()
    links = [shelf.say(chat, path) for path in ((1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 3, 6))]
    return chat, links


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


# Looking


def test_size_tells_what_lies_on_the_disk_and_what_may(shelf: Shelf, store: Store) -> None:
    _, links = talk(shelf)
    shelf.segments.set_aside(links[2].segment, "for a test")
    told = document(store("size", "--json", "--max-disk", "3MB"))
    assert told == {
        "data_dir": str(shelf.folder),
        "kv_bytes": shelf.nbytes(),
        "max_bytes": 3 * 2**20,
        "stored_bytes": links[0].segment.nbytes + links[1].segment.nbytes,
        "quarantined_bytes": links[2].segment.nbytes,
        "database_bytes": told["database_bytes"],
        "num_stored": 2,
        "num_evicted": 1,
        "num_quarantined": 1,
    }
    assert told["database_bytes"] > 0
    code, out = store("size")
    assert code == 0
    assert "of 20 GB" in out
    assert "in 2 segments" in out


def test_list_tells_every_segment_its_model_and_its_chats(shelf: Shelf, store: Store) -> None:
    chat, links = talk(shelf)
    told = document(store("list", "--json"))
    assert [segment["id"] for segment in told["segments"]] == [link.segment.id for link in links]
    assert [(segment["start"], segment["end"]) for segment in told["segments"]] == [(0, 3), (3, 5), (3, 4)]
    assert [segment["parent_id"] for segment in told["segments"]] == [
        None,
        links[0].segment.id,
        links[0].segment.id,
    ]
    assert {segment["state"] for segment in told["segments"]} == {"stored"}
    assert told["titles"] == {chat.id: "Talk"}
    assert all(segment["conversations"] == [chat.id] for segment in told["segments"])
    assert {str(segment["model"]) for segment in told["segments"]} == set(told["models"])
    assert list(told["models"].values()) == [FIELDS]


def test_list_tells_a_person_with_what_the_rows_were_computed() -> None:
    fields = {"model": "folder:12", "dtype": "bfloat16", "weights": "nf4", "cache": "native4, groups of 64"}
    assert made_with(fields) == "folder:12, bfloat16, nf4, cache kind native4"
    assert made_with({}) == "an unknown model"


def test_list_shows_a_person_each_branch_once(shelf: Shelf, store: Store) -> None:
    talk(shelf)
    shelf.segments.prune(0)
    code, out = store("list")
    assert code == 0
    lines = [line for line in out.splitlines() if "another branch" not in line]
    assert lines[0] == "Chats of ann, tiny, float32"
    assert [line.split("tokens ")[1].split("  ")[0] for line in lines[1:]] == ["0 to 3", "3 to 5", "3 to 4"]
    assert out.count("another branch, from token 3 on") == 1
    assert out.count("evicted") == 3
    assert out.count("Talk") == 3


def test_a_title_cannot_steer_the_terminal(shelf: Shelf, store: Store) -> None:
    chat, _ = talk(shelf)
    shelf.chats.rename("ann", chat.id, "a\x1b]0;owned\x07b\u202ec\nd")
    _, out = store("list")
    assert "a�]0;owned�b�c�d" in out
    assert not any(mark in out for mark in "\x1b\x07\u202e")


def test_verify_finds_every_damage_and_leaves_the_files_where_they_are(shelf: Shelf, store: Store) -> None:
    _, links = talk(shelf)
    assert store("verify") == (0, "3 cache files read, 0 damaged.\n")
    assert document(store("verify", "--json")) == {"num_checked": 3, "damaged": []}
    flipped, missing = (shelf.file_of(link) for link in links[1:])
    flip_last_bit(flipped)
    missing.unlink()
    files = shelf.files()

    code, out = store("verify")
    assert code == 1
    assert "3 cache files read, 2 damaged." in out
    assert flipped.name in out
    assert missing.name in out
    assert "Nothing was changed." in out
    code, out = store("verify", "--json")
    assert code == 1
    damaged = json.loads(out)["damaged"]
    assert [each["id"] for each in damaged] == [link.segment.id for link in links[1:]]
    assert all(each["damage"] for each in damaged)
    assert [(each["start"], each["end"], each["owner"]) for each in damaged] == [(3, 5, "ann"), (3, 4, "ann")]
    assert shelf.files() == files
    assert [node.segment.state for node in shelf.segments.list()] == ["stored"] * 3


@pytest.mark.parametrize("action", LOOKING)
def test_looking_works_beside_a_running_keepwarm_and_changes_nothing(
    action: str, shelf: Shelf, store: Store
) -> None:
    talk(shelf)
    before = {path: path.read_bytes() for path in shelf.folder.rglob("*") if path.is_file()}
    with DataFolder(shelf.folder):
        assert store(action)[0] == 0
        assert store(action, "--json")[0] == 0
    after = {path: path.read_bytes() for path in before if not path.name.endswith("-shm")}
    assert after == {path: content for path, content in before.items() if path in after}


def test_looking_works_while_files_come_and_go(shelf: Shelf, store: Store) -> None:
    chat = shelf.chat()
    done = threading.Event()

    def write_and_evict() -> None:
        try:
            for number in range(60):
                shelf.say(chat, [number + 1, 2, 3])
                shelf.segments.prune(400)
        finally:
            done.set()

    writer = threading.Thread(target=write_and_evict)
    writer.start()
    try:
        while not done.is_set():
            assert [store(action)[0] for action in LOOKING] == [0, 0, 0]
    finally:
        writer.join()


def test_where_only_texts_are_kept_there_are_no_caches_to_tell_of(
    tmp_path: Path, shelf: Shelf, store: Store
) -> None:
    shelf.kv.rmdir()  # as with --max-disk 0
    assert document(store("size", "--json"))["kv_bytes"] == 0
    assert store("list") == (0, "No caches are saved.\n")
    assert store("verify") == (0, "0 cache files read, 0 damaged.\n")
    assert not shelf.kv.exists()


def test_a_cache_folder_that_was_removed_is_damage(shelf: Shelf, store: Store) -> None:
    _, links = talk(shelf)
    for link in links:
        shelf.file_of(link).unlink()
    shelf.kv.rmdir()
    code, out = store("verify", "--json")
    assert code == 1
    assert len(json.loads(out)["damaged"]) == 3


# Putting in order


def test_prune_evicts_until_the_named_size_is_left_and_keeps_the_texts(shelf: Shelf, store: Store) -> None:
    _, links = talk(shelf)
    before = shelf.nbytes()
    limit = links[0].segment.nbytes + links[1].segment.nbytes
    told = document(store("prune", "--to", str(limit), "--json"))
    assert told["num_evicted"] == 1
    assert (told["max_bytes"], told["kv_bytes_before"]) == (limit, before)
    assert told["kv_bytes_after"] == shelf.nbytes() <= limit
    code, out = store("prune", "--to", "0")
    assert code == 0
    assert "2 segments evicted" in out
    assert shelf.nbytes() == 0
    assert len(shelf.chats.list("ann")) == 1
    assert {node.segment.state for node in shelf.segments.list()} == {"evicted"}


def test_prune_without_a_size_takes_that_of_the_app(shelf: Shelf, store: Store) -> None:
    talk(shelf)
    told = document(store("prune", "--json"))
    assert (told["num_evicted"], told["max_bytes"]) == (0, 20 * 2**30)
    assert document(store("prune", "--json", "--max-disk", "1"))["num_evicted"] == 3


def test_prune_removes_what_belongs_to_no_chat_before_it_evicts(shelf: Shelf, store: Store) -> None:
    talk(shelf)
    limit = shelf.nbytes()
    (shelf.kv / f"{'0' * 32}.safetensors").write_bytes(bytes(10_000))
    told = document(store("prune", "--to", str(limit), "--json"))
    assert (told["num_orphans"], told["num_evicted"]) == (1, 0)
    shelf.segments.sweep()  # looks afresh: another process put it in order
    shelf.check()


def test_sweep_puts_in_order_and_evicts_only_what_somebody_asked_for(shelf: Shelf, store: Store) -> None:
    _, links = talk(shelf)
    (shelf.kv / f"{'0' * 32}.safetensors").write_bytes(b"orphan")
    (shelf.kv / f"{'1' * 32}.safetensors.part").write_bytes(b"half")
    shelf.file_of(links[1]).unlink()
    shelf.file_of(links[2]).write_bytes(b"short")
    told = document(store("sweep", "--json"))
    assert told["max_bytes"] is None
    assert {name: number for name, number in told.items() if name.startswith("num_")} == {
        "num_temporary": 1,
        "num_orphans": 1,
        "num_missing": 1,
        "num_damaged": 1,
        "num_evicted": 0,
    }
    assert [node.segment.state for node in shelf.segments.list()] == ["stored", "evicted", "evicted"]
    assert store("verify")[0] == 0
    code, out = store("sweep")
    assert (code, out.splitlines()[0]) == (0, "Everything was in order.")
    assert "evicted" in store("sweep", "--max-disk", "0")[1]


@pytest.mark.parametrize("action", PUTTING_IN_ORDER)
def test_nothing_is_put_in_order_under_a_running_keepwarm(action: str, shelf: Shelf, store: Store) -> None:
    talk(shelf)
    files = shelf.files()
    with DataFolder(shelf.folder), pytest.raises(DataFolderBusy, match="Another Keepwarm is using"):
        store(action, "--max-disk", "0")
    assert shelf.files() == files


# What cannot be done


@pytest.mark.parametrize("action", ACTIONS)
def test_where_nothing_is_kept_nothing_is_created(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "nowhere", tmp_path / "empty"):
        options = parse_store_options([action, "--data-dir", str(folder), "--json"])
        with pytest.raises(NothingThere, match="nothing was created"):
            look_after(options)
        assert "There are no chats" in json.loads(capsys.readouterr().out)["error"]
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


@pytest.mark.parametrize("action", ACTIONS)
def test_a_file_that_is_no_database_of_ours_is_left_alone(action: str, tmp_path: Path, store: Store) -> None:
    database = tmp_path / "keepwarm.sqlite"
    database.write_bytes(b"something else entirely, longer than a header of SQLite is" * 10)
    before = database.read_bytes()
    with pytest.raises(DatabaseDamaged):
        store(action)
    assert database.read_bytes() == before


def test_who_only_looks_neither_writes_nor_brings_an_old_database_up_to_date(shelf: Shelf) -> None:
    view = DatabaseView(shelf.database.path)
    with pytest.raises(DiskRefused):
        view.execute("DELETE FROM segments")
    view.close()
    shelf.database.execute("DELETE FROM _sqlite_migrations WHERE name = ?", [STEPS[-1].__name__])
    with pytest.raises(DatabaseDamaged, match="older Keepwarm"):
        DatabaseView(shelf.database.path)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "not nothing"),
        (["shrink"], "not 'shrink'"),
        (["size", "--to", "1GB"], "--to"),
        (["prune", "--to", "little"], "--to takes a size"),
        (["prune", "sweep"], "sweep"),
        (["list", "--share"], "--share"),
        (["list", "--data-dir", ""], "--data-dir takes a folder"),
    ],
)
def test_words_that_mean_nothing_are_refused_in_one_sentence(words: list[str], told: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_store_options(words)
    assert told in str(refused.value)
    assert str(refused.value).endswith(".")
    assert "usage:" not in str(refused.value)


def test_the_limit_is_what_somebody_named_else_that_of_the_app_and_none_for_a_sweep() -> None:
    limits = {action: parse_store_options([action]).max_bytes for action in ACTIONS}
    assert limits == {**dict.fromkeys(ACTIONS, 20 * 2**30), "sweep": UNLIMITED}
    assert parse_store_options(["prune", "--to", "1GB", "--max-disk", "2GB"]).max_bytes == 2**30
    assert parse_store_options(["sweep", "--max-disk", "2GB"]).max_bytes == 2 * 2**30

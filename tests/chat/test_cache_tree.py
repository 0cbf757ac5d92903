"""The tree of caches that a page shows is what lies in memory and on disk, and only its owner's."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import chat.cache_tree
import chat.chats
from chat.cache_tree import CacheNode, ChatCaches, first_words, read_cache_tree
from chat.divergence import num_common
from chat.live_match import match_path
from tests.cache_store.kv_rows import Shelf
from tests.chat.passes import llama
from tests.house import OWNER, PATIENCE_S, House
from tests.tiny_models import tiny_llama, tiny_model

DISK = 10**9
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take its time to save."""
    monkeypatch.setattr(chat.chats, "SAVING_PATIENCE_S", PATIENCE_S)


@pytest.fixture
def house(tmp_path: Path) -> Generator[House]:
    with House(tmp_path, llama(), max_disk_bytes=DISK) as house:
        yield house


def only_chat(house: House) -> ChatCaches:
    """The one chat of the tree."""
    (chat,) = house.chats.cache_tree(OWNER).chats
    return chat


def nodes_of(chat: ChatCaches) -> list[CacheNode]:
    return [node for branch in chat.branches for node in branch.nodes]


def evict_all(house: House) -> None:
    """Once what is on its way to the disk has arrived there."""
    assert house.segments is not None
    house.chats.cache_tree(OWNER)
    house.segments.prune(0)


def is_live(node: CacheNode) -> bool:
    return node.num_live_tokens == node.num_tokens


# What there is


def test_a_chat_is_one_branch_of_what_was_said_in_memory_and_on_disk(house: House) -> None:
    view = house.say("Which bird is that?")
    house.say("And the other one?", view.conversation.id)
    tree = house.chats.cache_tree(OWNER)
    chat = only_chat(house)
    assert (chat.conversation_id, chat.title) == (view.conversation.id, "Which bird is that?")
    (branch,) = chat.branches
    ends = [node.start + node.num_tokens for node in branch.nodes]
    assert [node.start for node in branch.nodes] == [0, *ends[:-1]]
    assert "Which bird is that?" in branch.nodes[0].text
    assert any("And the other one?" in node.text for node in branch.nodes[1:])
    assert all("<|im_" not in node.text for node in branch.nodes)
    assert all(is_live(node) and node.nbytes and not node.was_evicted for node in branch.nodes)
    cache = house.kept()[chat.conversation_id].cache
    assert chat.num_live_tokens == chat.num_disk_tokens == ends[-1] == len(cache)
    assert chat.live_bytes == tree.live_bytes == cache.nbytes
    files = [path.stat().st_size for path in (house.folder / "kv").iterdir() if path.is_file()]
    assert chat.disk_bytes == tree.disk_bytes == sum(files)
    assert (tree.max_disk_bytes, tree.max_live_bytes) == (DISK, house.max_live_bytes)


def test_after_a_restart_it_is_on_disk_only_and_after_a_prune_nowhere(house: House) -> None:
    house.say("Hi")
    evict_all(house)
    assert all(is_live(node) and node.was_evicted and not node.nbytes for node in nodes_of(only_chat(house)))
    house.restart()
    nodes = nodes_of(only_chat(house))
    assert nodes
    assert all(node.was_evicted and not node.num_live_tokens and not node.nbytes for node in nodes)
    assert "Hi" in nodes[0].text
    house.say("Hello")
    house.restart()
    newest = house.chats.cache_tree(OWNER).chats[0]
    assert newest.title == "Hello"
    assert all(node.nbytes and not node.num_live_tokens for node in nodes_of(newest))
    assert house.chats.cache_tree(OWNER).live_bytes == 0


def test_an_edited_question_forks_and_only_the_newest_branch_is_live(house: House) -> None:
    first = house.say("One two three four.")
    chat_id = first.conversation.id
    house.say("Tell me of cats.", chat_id)
    question = house.chats.view(OWNER, chat_id).messages[2]
    house.edit(question.id, "Tell me of dogs.")
    main, fork = only_chat(house).branches
    assert (main.depth, fork.depth) == (0, 1)
    assert any("dogs" in node.text for node in fork.nodes)
    assert all(is_live(node) for node in fork.nodes)
    held = house.kept()[chat_id].cache.token_ids
    assert [node.start + node.num_live_tokens for node in main.nodes if node.num_live_tokens][-1] < len(held)
    assert not main.nodes[-1].num_live_tokens


def test_what_two_chats_share_stands_in_both_and_says_so(tmp_path: Path) -> None:
    with House(tmp_path, llama(), max_disk_bytes=DISK, default_system_prompt="Be kind. " * 9) as house:
        house.say("One?")
        house.say("Two!")
        tree = house.chats.cache_tree(OWNER)
        assert [chat.title for chat in tree.chats] == ["Two!", "One?"]
        firsts = [nodes_of(chat)[0] for chat in tree.chats]
        assert firsts[0] == firsts[1]
        assert firsts[0].num_chats == 2
        assert tree.disk_bytes < sum(chat.disk_bytes for chat in tree.chats)


def test_without_saving_a_chat_is_one_node_in_memory(tmp_path: Path) -> None:
    with House(tmp_path, llama()) as house:
        view = house.say("Hi")
        (node,) = nodes_of(only_chat(house))
        assert is_live(node)
        assert (node.start, node.num_tokens) == (0, len(house.kept()[view.conversation.id].cache))
        assert (node.nbytes, node.was_evicted, node.other_setting) == (0, False, False)
        assert "Hi" in node.text
        assert house.chats.cache_tree(OWNER).max_disk_bytes is None


def test_what_could_not_be_saved_follows_what_was(house: House) -> None:
    chat_id = house.say("Saved.").conversation.id
    num_saved = only_chat(house).num_disk_tokens
    assert house.segments is not None
    house.segments._max_bytes = 0  # pyright: ignore[reportPrivateUsage]
    house.say("Not saved.", chat_id)
    (branch,) = only_chat(house).branches
    last = branch.nodes[-1]
    assert (last.start, last.nbytes, last.was_evicted) == (num_saved, 0, False)
    assert is_live(last)
    assert "Not saved." in last.text


# Whose it is


def test_nobody_sees_anything_of_another_owner(house: House) -> None:
    house.say("A secret.", owner="ben")
    tree = house.chats.cache_tree(OWNER)
    assert (tree.chats, tree.num_hidden, tree.disk_bytes, tree.live_bytes) == ((), 0, 0, 0)
    house.say("A secret.")
    theirs, mine = house.chats.cache_tree("ben"), house.chats.cache_tree(OWNER)
    assert theirs.chats[0].conversation_id != mine.chats[0].conversation_id
    assert all(node.num_chats == 1 for chat in (*theirs.chats, *mine.chats) for node in nodes_of(chat))
    assert mine.disk_bytes == theirs.disk_bytes


def test_token_ids_are_given_to_their_owner_only(house: House) -> None:
    assert house.segments is not None
    house.say("A secret.", owner="ben")
    ids = {node.segment.id for node in house.segments.list("ben")}
    assert house.segments.token_ids("ben", ids).keys() == ids
    assert house.segments.token_ids(OWNER, ids) == {}


# Which model it is of


def test_nodes_of_another_model_are_marked_and_still_readable(tmp_path: Path) -> None:
    with House(tmp_path, tiny_llama(seed=1), max_disk_bytes=DISK) as house:
        chat_id = house.say("One.").conversation.id
    with House(tmp_path, tiny_llama(seed=2), max_disk_bytes=DISK) as house:
        assert all(node.other_setting and not node.num_live_tokens for node in nodes_of(only_chat(house)))
        assert "One." in nodes_of(only_chat(house))[0].text
        house.say("Two.", chat_id)
        nodes = nodes_of(only_chat(house))
        assert nodes[0].other_setting is False, "what is in use comes first"
        assert [is_live(node) for node in nodes] == [not node.other_setting for node in nodes]


def test_tokens_of_another_tokenizer_are_not_read_with_ours(tmp_path: Path) -> None:
    with House(tmp_path, tiny_model("llama"), max_disk_bytes=DISK) as house:
        house.say("One.")
        house.database.execute(
            "UPDATE fingerprints SET fields = replace(fields, 'tokenizer\":\"', 'tokenizer\":\"x')"
        )
        nodes = nodes_of(only_chat(house))
        assert any(node.other_setting for node in nodes)
        assert all(not node.text for node in nodes if node.other_setting)


def test_while_the_model_is_loading_there_are_no_texts(house: House) -> None:
    house.say("Hi")
    house.restart()
    tree = read_cache_tree(OWNER, house.store, house.live, house.segments, None)
    nodes = nodes_of(tree.chats[0])
    assert nodes
    assert not any(node.text or node.other_setting for node in nodes)


# How much of it


def test_only_the_first_nodes_are_shown_and_the_rest_is_counted(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat_id = house.say("One.").conversation.id
    for text in ("Two.", "Three."):
        house.say(text, chat_id)
    house.say("Another.")
    whole = {chat.title: chat for chat in house.chats.cache_tree(OWNER).chats}
    num_nodes = {title: len(nodes_of(chat)) for title, chat in whole.items()}

    monkeypatch.setattr(chat.cache_tree, "MOST_NODES_PER_CHAT", 2)
    cut = {chat.title: chat for chat in house.chats.cache_tree(OWNER).chats}
    assert nodes_of(cut["One."]) == nodes_of(whole["One."])[:2]
    assert cut["One."].num_hidden == num_nodes["One."] - 2
    assert cut["One."].num_disk_tokens == whole["One."].num_disk_tokens
    assert cut["One."].disk_bytes == whole["One."].disk_bytes

    monkeypatch.setattr(chat.cache_tree, "MOST_NODES", 2)
    tree = house.chats.cache_tree(OWNER)
    assert [chat.title for chat in tree.chats] == ["Another."]
    assert tree.num_hidden == 1


def test_the_number_of_queries_does_not_grow_with_the_chats(house: House) -> None:
    queries: list[str] = []
    house.database._db.conn.set_trace_callback(queries.append)  # pyright: ignore[reportPrivateUsage]

    def num_queries() -> int:
        house.chats.cache_tree(OWNER)  # waits for what is being saved
        queries.clear()
        house.chats.cache_tree(OWNER)
        return len(queries)

    chat_id = house.say("One.").conversation.id
    few = num_queries()
    for text in ("Two.", "Three.", "Four."):
        house.say(text, chat_id)
        house.say(text)
    assert num_queries() == few


# Words


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("  user\nHello\n\n there ", "user Hello there"),
        ("\ufffdgrün\ufffd", "grün"),
        ("x" * 60, "x" * 60),
        ("y" * 61, "y" * 59 + "…"),
        ("", ""),
    ],
)
def test_first_words_are_one_short_line(text: str, line: str) -> None:
    assert first_words(text) == line


# Matching


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(paths=st.lists(PATHS, min_size=1, max_size=10), live=PATHS)
def test_a_live_path_is_found_in_the_tree_as_far_as_it_is_there(
    tmp_path_factory: pytest.TempPathFactory, paths: list[tuple[int, ...]], live: tuple[int, ...]
) -> None:
    shelf = Shelf(tmp_path_factory.mktemp("shelf"), quick=True)
    talk = shelf.chat()
    for path in paths:
        shelf.say(talk, path)
    segments = [node.segment for node in shelf.segments.list()]
    ids = shelf.segments.token_ids("ann", {segment.id for segment in segments})
    match = match_path(live, segments, ids)
    for segment in segments:
        shared = num_common(shelf.paths()[segment.id], live)
        assert max(0, match.ends.get(segment.id, 0) - segment.start) == max(0, shared - segment.start)
    assert match.end == max(num_common(path, live) for path in paths)
    shelf.close()


def test_rows_of_several_kinds_of_cache_are_told_apart(house: House) -> None:
    chat_id = house.say("Hello there").conversation.id
    house.chats.set_cache_kind(OWNER, chat_id, "native8")
    house.say("And more", chat_id)
    nodes = nodes_of(only_chat(house))
    assert {node.kind for node in nodes} == {"dynamic", "native8"}
    assert not any(node.other_setting for node in nodes)
    assert {node.kind for node in nodes if node.num_live_tokens} == {"native8"}

"""The budget for live caches is a hard limit at every moment, and what is gone is freed."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from chat.settings import SamplingSettings
from tests.chat.passes import CachesInMemory, llama
from tests.house import OWNER, House, end_view, last_stats


def test_forty_chats_stay_within_the_budget_and_deleting_frees_their_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C30: after new chats, regenerated and edited replies, and deleted chats."""
    budget = 150 * llama().kv_bytes_per_token
    memory, short = CachesInMemory(monkeypatch), SamplingSettings(temperature=0, max_new_tokens=2)
    with House(tmp_path, llama(), max_live_bytes=budget) as house:
        view = house.say("Chat", sampling=short)
        ids = [view.conversation.id]
        for number in range(39):
            view = house.say(f"Chat {number}", sampling=short)
            ids.append(view.conversation.id)
            assert house.live.nbytes <= budget
        for number in range(6):
            view = house.regenerate(view.messages[-1].id, short)
            view = house.edit(view.messages[0].id, f"Again {number}", short)
            assert house.live.nbytes <= budget
        assert 1 < len(house.kept()) < 40
        assert len(memory) == len(house.kept())
        for chat_id in ids:
            house.chats.delete(OWNER, chat_id)
        assert len(memory) == house.live.nbytes == 0


@pytest.mark.parametrize(("num_letters", "budget_tokens"), [(130, 160), (140, 176), (300, 320), (600, 640)])
def test_reading_a_long_message_never_takes_more_than_the_budget(
    tmp_path: Path, num_letters: int, budget_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C30, law 5: a hard limit. The prompt is read in chunks, so its cache grows many times."""
    budget = budget_tokens * llama().kv_bytes_per_token
    memory = CachesInMemory(monkeypatch)
    with House(tmp_path, llama(), max_live_bytes=budget) as house:
        house.say("word " * 5)
        view = house.say("x" * num_letters)
        assert memory.peak_bytes <= budget
        house.check(view.conversation.id)
        assert view.conversation.id in house.kept(), "what was written within the budget must be kept"


@pytest.mark.parametrize("budget_tokens", [200, 272, 320])
def test_copying_a_beginning_never_takes_more_than_the_budget(
    tmp_path: Path, budget_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C30, law 5: neither the cache that is copied from nor the one that is given up may be forgotten."""
    budget = budget_tokens * llama().kv_bytes_per_token
    memory, short = CachesInMemory(monkeypatch), SamplingSettings(temperature=0, max_new_tokens=2)
    with House(tmp_path, llama(), max_live_bytes=budget) as house:
        house.say("x" * 60, sampling=short)
        second = house.say("y" * 60, sampling=short)
        third = house.edit(second.messages[0].id, "x" * 60 + "!", short)
        house.check(third.conversation.id)
        house.say("x" * 60 + "?", sampling=short)
        assert memory.peak_bytes <= budget


def test_a_chat_larger_than_the_budget_is_told_so_and_others_keep_theirs(tmp_path: Path) -> None:
    """C30: the text stays, and a shorter chat works."""
    budget = 96 * llama().kv_bytes_per_token
    with House(tmp_path, llama(), max_live_bytes=budget) as house:
        small = house.say("Hi")
        job = house.start("word " * 60)
        ended = end_view(job)
        assert ended.state == "failed"
        assert "max-live-memory" in str(ended.error)
        assert house.chats.view(OWNER, job.conversation_id).messages[0].text == "word " * 60
        view = house.say("And?", small.conversation.id)
        assert set(cast("dict[str, int]", last_stats(view)["reasons"])) == {"new"}
        house.check(small.conversation.id)


def test_a_reply_that_fills_the_budget_is_kept_and_marked(tmp_path: Path) -> None:
    """C30."""
    budget = 64 * llama().kv_bytes_per_token
    with House(tmp_path, llama(), max_live_bytes=budget) as house:
        view = house.say("Hi", sampling=SamplingSettings(temperature=0, max_new_tokens=500))
        reply = view.messages[-1]
        assert (reply.status, reply.finish_reason) == ("stopped", "memory")
        assert 30 < len(reply.token_ids) <= 64
        house.check(view.conversation.id)

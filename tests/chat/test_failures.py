"""An error ends one reply with one sentence: text is kept, memory is freed, the next message works."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import chat.layers.growing
import chat.reply_writer
from cache_store.errors import DiskRefused
from chat.reply_text import ReplyText
from tests.chat.passes import CachesInMemory, Passes, dictated, llama, out_of_memory_in
from tests.chat.replies import (
    LONG,
    encode,
    held_reply,
    num_chunks,
)
from tests.house import OWNER, House, end_view, last_stats


class Broken(RuntimeError):
    """Raised by a test's model, with a tensor among the locals of the frame that raised it."""


def break_with(error: BaseException, refs: list[weakref.ref[torch.Tensor]]) -> Callable[[], None]:
    def raise_it() -> None:
        activations = torch.empty(1000)
        refs.append(weakref.ref(activations))
        raise error

    return raise_it


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"),
    MemoryError(),
    ValueError("odd shapes"),
    KeyboardInterrupt(),
]
PLACES = ["first chunk", "later chunk", "token 1", "token 5"]


@pytest.mark.parametrize(
    ("error", "place", "in_layer"),
    [
        *((error, "token 5", None) for error in ERRORS),
        *((ValueError("odd shapes"), place, 1) for place in PLACES),
        (torch.OutOfMemoryError("CUDA out of memory"), "later chunk", 2),
        (KeyboardInterrupt(), "first chunk", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_an_error_in_the_model_ends_one_reply_and_nothing_else(
    tmp_path: Path, error: BaseException, place: str, in_layer: int | None
) -> None:
    """C31: broken before any layer, or in the middle one so that the first layer holds more than the last."""
    refs: list[weakref.ref[torch.Tensor]] = []
    loaded = llama(num_layers=3)
    with House(tmp_path, loaded) as house:
        view = house.say("Hi")
        chat_id, known = view.conversation.id, house.kept()[view.conversation.id].cache.token_ids
        chunks = num_chunks(house, LONG, chat_id)
        number = {"first chunk": 1, "later chunk": chunks, "token 1": chunks + 1, "token 5": chunks + 5}[
            place
        ]
        module = loaded.model if in_layer is None else cast("Any", loaded.model).model.layers[in_layer]
        with Passes(module) as passes:
            passes.plan(break_with(error, refs), number)
            job = house.start(LONG, chat_id)
            ended = end_view(job)
        assert ended.state == "failed"
        assert ended.error
        assert ended.error.endswith(".")
        view = house.chats.view(OWNER, chat_id)
        question, reply = view.messages[-2:]
        assert view.job is None
        assert question.text == LONG
        assert (reply.status, reply.error, reply.text) == ("failed", ended.error, ended.text)
        assert len(reply.token_ids) <= max(0, number - chunks - 1)
        gc.collect()
        assert [ref() for ref in refs] == [None], "the error keeps tensors alive"
        house.check_invariant(chat_id)
        view = house.say("And?", chat_id)
        house.check(chat_id)
        stats = last_stats(view)
        reasons = cast("dict[str, int]", stats["reasons"])
        assert cast("int", stats["num_live_tokens"]) >= len(known) or "failed" in reasons
        assert not {"restart", "evicted"} & set(reasons)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), AssertionError(), ValueError("one\n  two\nthree"), ValueError("x" * 5000)]
)
def test_every_error_is_told_in_one_sentence(house: House, passes: Passes, error: BaseException) -> None:
    """C31: libraries raise with no text, with a page of text, and with a listing."""
    passes.fail(error)
    sentence = str(end_view(house.start("Hi")).error)
    assert "\n" not in sentence
    assert len(sentence) < 500
    assert ": )" not in sentence


def test_out_of_memory_says_what_helps_and_other_errors_say_what_happened(
    house: House, passes: Passes
) -> None:
    """C31."""
    passes.fail(torch.OutOfMemoryError("CUDA out of memory"))
    assert "memory" in str(end_view(house.start("Hi")).error)
    passes.fail(ValueError("odd shapes"))
    assert "odd shapes" in str(end_view(house.start("Hi")).error)


@pytest.mark.parametrize("failing_call", [1, 2, 3, 4])
def test_no_memory_for_a_larger_cache_fails_one_reply_only(house: House, failing_call: int) -> None:
    """C31: the keys of a layer may have grown when its values were refused."""
    view = house.say("Hi")
    with out_of_memory_in(chat.layers.growing, "grown", failing_call):
        assert end_view(house.start(LONG, view.conversation.id)).state == "failed"
    house.check_invariant(view.conversation.id)
    house.say("And?", view.conversation.id)
    house.check(view.conversation.id)


@pytest.mark.parametrize("name", ["Sampler", "ReplyText"])
def test_an_error_before_the_first_pass_does_not_lose_the_cache(
    house: House, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C31, law 4: the cache that was lent for the reply is kept, or its loss is told as what it was."""
    view = house.say("Hi")
    chat_id = view.conversation.id

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("refused by a test")

    with monkeypatch.context() as patched:
        patched.setattr(chat.reply_writer, name, refuse)
        assert end_view(house.start("More", chat_id)).state == "failed"
    view = house.say("And?", chat_id)
    house.check(chat_id)
    stats = last_stats(view)
    assert cast("int", stats["num_live_tokens"]) > 0 or "failed" in cast("dict[str, int]", stats["reasons"])


@pytest.mark.parametrize("name", ["ending", "push"])
def test_an_error_in_the_text_of_a_reply_still_ends_it_in_the_store(
    house: House, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C31: also when what broke is needed again to put the broken reply away."""

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("refused by a test")

    view = house.say("Hi")
    with monkeypatch.context() as patched:
        patched.setattr(ReplyText, name, refuse)
        job = house.start("More", view.conversation.id)
        ended = end_view(job)
    assert ended.state == "failed"
    stored = house.store.message(OWNER, job.reply_id)
    assert (stored.status, stored.error) == ("failed", ended.error)
    house.check_invariant(view.conversation.id)
    house.say("And?", view.conversation.id)
    house.check(view.conversation.id)


def test_an_output_that_is_no_number_ends_the_reply_with_a_sentence(house: House) -> None:
    head: Any = house.loaded.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda *args: args[2] * float("nan"))
    try:
        ended = end_view(house.start("Hi"))
    finally:
        hook.remove()
    assert ended.state == "failed"
    assert "number" in str(ended.error)
    house.say("Hi again", house.chats.list(OWNER)[0].id)
    house.check(house.chats.list(OWNER)[0].id)


def test_a_layer_that_lost_tokens_is_never_used_for_another_word(house: House) -> None:
    """Law 4: found out at the latest when the reply ends, and the next one reads the text again."""
    view = house.say("Hi")
    chat_id = view.conversation.id
    layer: Any = cast("Any", house.kept()[chat_id].cache)._cache.layers[1]
    layer.crop(-2)
    house.finish(house.start("More", chat_id))
    house.say("And?", chat_id)
    house.check(chat_id)


@pytest.mark.parametrize("write", ["save_progress", "finish_reply"])
def test_a_disk_that_refuses_ends_the_reply_with_its_sentence(
    house: House, write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C31: the store's error, once; then the chat goes on."""
    monkeypatch.setattr(chat.reply_writer, "SHOW_EVERY_S", 0.0)
    original = getattr(house.store, write)

    def refuse(*_: object, **__: object) -> None:
        monkeypatch.setattr(house.store, write, original)
        raise DiskRefused("The disk is full; what was stored before is kept; free some space.")

    monkeypatch.setattr(house.store, write, refuse)
    with dictated(*encode("Yes, the dog is here.")):
        ended = end_view(house.start("Hi"))
    assert ended.state == "failed"
    assert "disk is full" in str(ended.error)
    view = house.chats.view(OWNER, house.chats.list(OWNER)[0].id)
    assert view.messages[-1].status == "failed"
    house.say("And?", view.conversation.id)
    house.check(view.conversation.id)


# a chat that goes away under a reply


@pytest.mark.parametrize("ending", ["goes on", "fails"])
def test_deleting_a_chat_while_its_reply_is_written_leaves_nothing(
    house: House, passes: Passes, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C30, C40: neither a row nor a cache, whether the pass in hand succeeds or fails."""
    memory = CachesInMemory(monkeypatch)
    hold = passes.hold(3)

    def go_on() -> None:
        hold()
        if ending == "fails":
            raise ValueError("broken by a test")

    passes.plan(go_on, 3)
    job = held_reply(house, hold, "Hi")
    house.chats.delete(OWNER, job.conversation_id)
    hold.release()
    assert job.wait_until_ended(60).ended
    assert house.num_rows() == 0
    assert house.kept() == {}
    assert house.live.why_missing(job.conversation_id) is None
    house.say("Another chat")
    assert len(memory) == len(house.kept()) == 1

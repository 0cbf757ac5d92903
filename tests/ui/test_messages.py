"""From stored messages to rows and marks."""

from __future__ import annotations

from dataclasses import replace

from gradio import Chatbot
from hypothesis import given
from hypothesis import strategies as st

from cache_store.records import EDITED, Conversation, Message, Siblings
from chat.chats import ChatView
from chat.stats import TurnStats
from ui.messages import chat_rows, row_mark, row_marks, window

CHAT = Conversation("c1", "me", "A chat", "", 0.0, 0.0)
QUESTION = Message("q1", "c1", None, "user", "    four spaces\n  two\n\n\n", "done", 0.0)
REPLY = Message("a1", "c1", "q1", "assistant", "Well.", "done", 0.0)


@given(st.text())
def test_text_reaches_the_component_exactly_as_stored(text: str) -> None:
    """C17."""
    drawn = Chatbot().postprocess(chat_rows([replace(QUESTION, text=text)]))  # pyright: ignore[reportArgumentType]
    assert drawn.root[0].content[0].text == text  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def test_every_message_is_one_row_even_an_empty_one() -> None:
    """C16, C41."""
    messages = [QUESTION, replace(REPLY, text=""), replace(QUESTION, id="q2"), REPLY]
    drawn = Chatbot(group_consecutive_messages=False).postprocess(chat_rows(messages))  # pyright: ignore[reportArgumentType]
    assert [row.role for row in drawn.root] == ["user", "assistant", "user", "assistant"]


def test_rows_are_made_afresh_and_never_share_parts() -> None:
    assert chat_rows([REPLY])[0] is not chat_rows([REPLY])[0]


def test_a_window_keeps_the_end_of_the_chat() -> None:
    """C44."""
    messages = [replace(REPLY, id=f"m{i}") for i in range(100)]
    assert [m.id for m in window(messages, 40)] == [f"m{i}" for i in range(60, 100)]
    assert window(messages[:3], 40) == tuple(messages[:3])


def test_marks_stand_in_the_order_of_the_rows() -> None:
    view = ChatView(CHAT, (QUESTION, REPLY), {"a1": Siblings(("a0", "a1", "a2"), 1)}, None)
    marks = row_marks(view, view.messages)
    assert [mark["id"] for mark in marks] == ["q1", "a1"]
    assert [mark["version"] for mark in marks] == [None, (2, 3)]


def test_only_a_persons_text_is_painted_letter_by_letter() -> None:
    assert row_mark(QUESTION, None)["text"] == QUESTION.text
    assert row_mark(REPLY, None)["text"] is None


def test_an_only_child_has_no_versions() -> None:
    assert row_mark(REPLY, Siblings(("a1",), 0))["version"] is None


def test_a_finished_reply_has_its_stats_line() -> None:
    stored = TurnStats(10, 4, 0, 6, 3, {"new": 6}).to_json()
    mark = row_mark(replace(REPLY, stats=stored), None)
    assert mark["stats"] is not None
    assert mark["stats"]["line"] == "4 tokens remembered, 6 read"


def test_a_running_reply_has_no_stats_line_yet() -> None:
    stored = TurnStats(10, 4, 0, 6, 3, {"new": 6}).to_json()
    assert row_mark(replace(REPLY, stats=stored, status="running"), None)["stats"] is None


def test_stats_that_do_not_add_up_are_left_out() -> None:
    broken = {**TurnStats(10, 4, 0, 6, 3, {"new": 6}).to_json(), "num_live_tokens": 5}
    assert row_mark(replace(REPLY, stats=broken), None)["stats"] is None
    assert row_mark(replace(REPLY, stats={"from": "the future"}), None)["stats"] is None


def test_a_stopped_reply_says_so_quietly() -> None:
    assert row_mark(replace(REPLY, status="stopped"), None)["note"] == "Stopped"
    limited = row_mark(replace(REPLY, status="stopped", finish_reason="length"), None)
    assert limited["note"] == "Stopped at the limit of new tokens"


def test_an_empty_reply_is_a_state_and_not_an_error() -> None:
    mark = row_mark(replace(REPLY, text=" \n"), None)
    assert mark["note"] == "The model had nothing to say"
    assert mark["error"] is None


def test_a_failed_reply_shows_its_sentence() -> None:
    mark = row_mark(replace(REPLY, status="failed", error="The device had no memory left."), None)
    assert mark["error"] == "The device had no memory left."
    assert mark["note"] is None
    assert row_mark(replace(REPLY, status="failed"), None)["error"]


def test_a_reply_that_was_cut_or_edited_can_go_on() -> None:
    def offer(**changed: str) -> str | None:
        return row_mark(replace(REPLY, **changed), None)["offer"]  # pyright: ignore[reportArgumentType]

    assert offer(status="stopped", finish_reason="stopped") == "continue"
    assert offer(status="stopped", finish_reason="length") == "continue"
    assert offer(status="failed", finish_reason="error") == "continue"
    assert offer(finish_reason=EDITED) == "continue"
    assert offer(finish_reason="eos") is None
    assert offer(status="running") is None
    assert offer(status="stopped", finish_reason="stopped", text=" ") is None
    assert offer(status="stopped", finish_reason="context") is None


def test_an_edited_reply_says_so() -> None:
    assert row_mark(replace(REPLY, finish_reason=EDITED), None)["note"] == "Edited"


def test_only_a_question_at_the_end_asks_for_a_reply() -> None:
    marks = row_marks(ChatView(CHAT, (QUESTION, REPLY, QUESTION), {}, None), (QUESTION, REPLY, QUESTION))
    assert [mark["offer"] for mark in marks] == [None, None, "answer"]
    assert [mark["note"] for mark in marks] == [None, None, "This message has no reply"]

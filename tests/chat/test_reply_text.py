"""Ids become text that never has to be taken back, and what is kept of a reply agrees with its ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat.prompt import PromptRenderer
from chat.reply_text import Ending, ReplyText
from tests.chat.tokenizers import metaspace_tokenizer, sentencepiece_tokenizer
from tests.tiny_models import tiny_tokenizer

BYTES: Any = tiny_tokenizer()
PIECES: Any = sentencepiece_tokenizer()
SPACES: Any = metaspace_tokenizer()
BAD = "\ufffd"

EMOJI = ["😀" * 5, "👨‍👩‍👧‍👦", "🇩🇪🇫🇷", "👍🏽", "❤️", "🏴‍☠️🏳️‍🌈"]
SCRIPTS = ["สวัสดีครับ", "こんにちは", "안녕하세요", "नमस्ते क्षत्रिय", "é̂ Ω ß", "𝒳𝟘", "مرحبا"]


def reply(tokenizer: Any = BYTES, stops: tuple[str, ...] = (), begun: Sequence[int] = ()) -> ReplyText:
    ends = frozenset({tokenizer.eos_token_id})
    return ReplyText(tokenizer.backend_tokenizer, tokenizer, ends, stops, begun)


def encode(text: str, tokenizer: Any = BYTES) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def decode(ids: Any, tokenizer: Any = BYTES) -> str:
    return tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=True)


def ending(text: ReplyText, tokenizer: Any = BYTES) -> Ending:
    end = frozenset({int(tokenizer.eos_token_id)})
    return text.ending(PromptRenderer(tokenizer, end).encode_text)


def run(ids: list[int], stops: tuple[str, ...] = (), tokenizer: Any = BYTES) -> tuple[str, Ending, ReplyText]:
    """Push ids until something ends the reply: what was shown, what is kept, the object."""
    text, shown = reply(tokenizer, stops), ""
    for token_id in ids:
        shown += text.push(token_id)
        if text.ended:
            break
    return shown, ending(text, tokenizer), text


# streaming


@pytest.mark.parametrize("text", EMOJI + SCRIPTS)
@pytest.mark.parametrize("tokenizer", [BYTES, PIECES, SPACES], ids=["bytes", "pieces", "spaces"])
def test_characters_of_many_tokens_stream_whole(text: str, tokenizer: Any) -> None:
    """C13: at no moment is half a character shown, and in the end everything is."""
    streaming, shown = reply(tokenizer), ""
    for token_id in encode(text, tokenizer):
        shown += streaming.push(token_id)
        assert text.startswith(shown)
    assert shown == text
    assert ending(streaming, tokenizer).text == text


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES, SPACES], ids=["bytes", "pieces", "spaces"])
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=BAD), max_size=25))
@settings(max_examples=60)
def test_any_text_streams_to_its_last_character(tokenizer: Any, text: str) -> None:
    """C13: spaces at the seams and at both ends included."""
    shown, kept, _ = run(encode(text, tokenizer), tokenizer=tokenizer)
    assert shown == kept.text == decode(encode(text, tokenizer), tokenizer)


def test_forty_emoji_do_not_wait_for_the_end() -> None:
    """C13: a reply of emoji only must not appear to hang until a space comes."""
    text, num_pieces = reply(), 0
    for token_id in encode("😀😁😂🤣" * 10):
        num_pieces += bool(text.push(token_id))
    assert num_pieces == 40


def some_ids(tokenizer: Any) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(tokenizer) - 1), max_size=40)


@given(some_ids(BYTES))
@settings(max_examples=150)
def test_nothing_shown_is_ever_taken_back(ids: list[int]) -> None:
    """C13, on any ids at all, half characters and control tokens among them."""
    shown, kept, _ = run(ids)
    assert kept.text.startswith(shown)


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES, SPACES], ids=["bytes", "pieces", "spaces"])
@given(data=st.data())
@settings(max_examples=100)
def test_any_ids_at_all_become_text_and_text_and_ids_agree(tokenizer: Any, data: st.DataObject) -> None:
    """C13: what a model samples need not be valid text, and must not end the reply with an error."""
    ids = data.draw(some_ids(tokenizer))
    _, kept, text = run(ids, tokenizer=tokenizer)
    assert kept.text == decode(kept.token_ids, tokenizer)
    assert list(kept.token_ids) == text.token_ids[: kept.num_sampled]


@pytest.mark.parametrize("tokenizer", [PIECES, SPACES], ids=["pieces", "spaces"])
def test_a_broken_character_after_a_whole_one_ends_no_reply(tokenizer: Any) -> None:
    """C13: tokenizers with byte tokens decode neighbouring ones together, so a stray byte also spoils the
    character before it, which was shown already."""
    emoji, word = encode("😀", tokenizer)[1:], encode("a dog", tokenizer)
    assert decode(emoji, tokenizer) == "😀"
    _, kept, _ = run([*emoji, emoji[0], *word], tokenizer=tokenizer)
    assert kept.text.endswith("a dog")


@given(some_ids(BYTES))
@settings(max_examples=150)
def test_ids_that_are_called_certain_say_what_was_shown(ids: list[int]) -> None:
    """What a crash leaves is ids and text that fit together."""
    text, shown = reply(), ""
    for token_id in ids:
        shown += text.push(token_id)
        if text.is_whole:
            assert decode(text.certain_ids) == shown
        if text.ended:
            break


@pytest.mark.parametrize("tokenizer", [PIECES, SPACES], ids=["pieces", "spaces"])
def test_what_follows_a_broken_character_is_shown_while_it_is_written(tokenizer: Any) -> None:
    """C13: one stray byte must not silence the rest of a long reply."""
    emoji, word = encode("😀", tokenizer)[1:], encode(" a dog", tokenizer)
    streaming, shown = reply(tokenizer), ""
    for token_id in [*emoji, emoji[0], *word * 20]:
        shown += streaming.push(token_id)
    assert shown.count("a dog") >= 19


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES, SPACES], ids=["bytes", "pieces", "spaces"])
def test_a_stop_within_a_character_costs_that_character_only(tokenizer: Any) -> None:
    """C13, C37: also when another character was broken long before."""
    emoji, word = encode("😀", tokenizer)[-4:], encode(" a dog", tokenizer)
    ids = [*emoji, emoji[0], *word * 20, *emoji[:2]]
    _, kept, _ = run(ids, tokenizer=tokenizer)
    assert kept.text.count("a dog") == 20
    assert len(ids) - len(kept.token_ids) <= 3


# interrupted


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_half_a_character_at_a_stop_is_cut_off_with_its_ids(num_bytes: int) -> None:
    """C13, C37."""
    ids = encode("Hi 😀")
    shown, kept, _ = run(ids[: len(ids) - 4 + num_bytes])
    assert shown == kept.text == "Hi "
    assert list(kept.token_ids) == encode("Hi ")
    assert kept.num_sampled == len(kept.token_ids)


def test_a_stop_before_the_first_character_is_whole_keeps_nothing() -> None:
    """C13, C37."""
    assert run(encode("😀")[:3])[1] == Ending("", (), 0)
    assert run([])[1] == Ending("", (), 0)


def test_a_replacement_character_stays_where_the_ids_really_say_so() -> None:
    """C13."""
    written = encode(f"a{BAD}b")
    assert run(written)[1].text == f"a{BAD}b"
    broken = [*encode("a"), encode("😀")[0], *encode("b")]
    assert run(broken)[1].text == f"a{BAD}b"
    assert list(run(broken)[1].token_ids) == broken


def test_only_the_unfinished_character_goes_and_not_what_was_broken_before_it() -> None:
    """C13: at most the bytes of one character, however broken the reply was before."""
    ids = [*encode("a"), *[encode("😀")[0]] * 9, *encode("😀")[:3]]
    _, kept, _ = run(ids)
    assert len(ids) - len(kept.token_ids) <= 3


def test_an_end_of_turn_is_kept_in_the_ids_and_not_in_the_text() -> None:
    """C02."""
    ids = [*encode("Yes."), BYTES.eos_token_id]
    shown, kept, text = run(ids)
    assert shown == kept.text == "Yes."
    assert list(kept.token_ids) == ids
    assert text.ended
    assert not text.hit_stop_string


def test_a_reply_that_ends_at_once_is_empty() -> None:
    """C16."""
    _, kept, text = run([BYTES.eos_token_id])
    assert kept == Ending("", (BYTES.eos_token_id,), 1)
    assert text.ended


# stop strings


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES, SPACES], ids=["bytes", "pieces", "spaces"])
@pytest.mark.parametrize(
    ("text", "stops", "kept_text"),
    [
        ("One. STOP Two.", ("STOP",), "One. "),
        ("One. STOP Two.", ("Two", "STOP"), "One. "),
        ("STOP", ("STOP",), ""),
        ("a dog and you", (" and",), "a dog"),
        ("a dog and you", ("og an",), "a d"),
        ("line\n\nline", ("\n\n",), "line"),
        ("line\n\nline", ("\n",), "line"),
        ("SSSTOP", ("STOP",), "SS"),
        ("STSTOPX", ("STOP",), "ST"),
        ("abcabd", ("abd",), "abc"),
        ("Ende。Neu", ("。",), "Ende"),
        ("ja ß nein", ("ß",), "ja "),
        ("ok 😀 go", ("😀",), "ok "),
        ("abXcd", ("X", "bX"), "a"),
    ],
)
def test_a_reply_ends_right_before_a_stop_string(
    text: str, stops: tuple[str, ...], kept_text: str, tokenizer: Any
) -> None:
    shown, kept, pushed = run(encode(text, tokenizer), stops, tokenizer)
    assert pushed.hit_stop_string
    assert kept.text == kept_text
    assert kept_text.startswith(shown)
    assert not kept.token_ids or decode(kept.token_ids, tokenizer) == kept_text
    assert list(kept.token_ids[: kept.num_sampled]) == pushed.token_ids[: kept.num_sampled]


def test_a_stop_string_that_does_not_come_is_shown_as_soon_as_it_cannot_come_any_more() -> None:
    text, shown = reply(stops=("STOP",)), ""
    for token_id in encode("STOX"):
        shown += text.push(token_id)
    assert shown == "STOX"
    assert not text.ended


def test_a_stop_string_that_was_begun_when_the_reply_was_interrupted_is_text() -> None:
    shown, kept, text = run(encode("One. STO"), ("STOP",))
    assert kept.text == "One. STO"
    assert shown == "One. "
    assert not text.hit_stop_string


@given(st.text("abc", max_size=25), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=2))
@settings(max_examples=120)
def test_the_first_stop_string_wins_wherever_tokens_are_cut(text: str, stops: list[str]) -> None:
    shown, kept, pushed = run(encode(text), tuple(stops))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert pushed.hit_stop_string == bool(ends)
    expected = text
    if ends:
        whole = text[: min(ends)]
        expected = whole[: min(at for at in map(whole.find, stops) if at >= 0)]
    assert kept.text == expected
    assert expected.startswith(shown)


# cost


def test_a_token_costs_the_same_at_the_end_of_a_long_reply() -> None:
    """C44: what is decoded for one more token is a few ids, not the reply."""
    largest = 0

    class Watched:
        """The backend, with an eye on how much it is asked to decode at once."""

        def __getattr__(self, name: str) -> Any:
            return getattr(BYTES.backend_tokenizer, name)

        def decode(self, ids: list[int], **options: Any) -> str:
            nonlocal largest
            largest = max(largest, len(ids))
            return BYTES.backend_tokenizer.decode(ids, **options)

    backend: Any = Watched()
    text = ReplyText(backend, BYTES, frozenset({BYTES.eos_token_id}), ("never",))
    for token_id in encode("All the dogs and you 😀. " * 50):
        text.push(token_id)
    assert largest <= 16


# replies that begin with something


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES, SPACES], ids=["bytes", "pieces", "spaces"])
@given(
    data=st.data(),
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=BAD), max_size=25),
)
@settings(max_examples=60)
def test_a_reply_that_goes_on_has_no_seam(tokenizer: Any, data: st.DataObject, text: str) -> None:
    """Stopped anywhere and gone on with: the same text and ids as in one go, spaces at the seam included."""
    ids = encode(text, tokenizer)
    whole, first = reply(tokenizer), reply(tokenizer)
    for token_id in ids:
        whole.push(token_id)
    for token_id in ids[: data.draw(st.integers(0, len(ids)))]:
        first.push(token_id)
    begun = ending(first, tokenizer)
    second = reply(tokenizer, begun=begun.token_ids)
    shown = begun.text + "".join(second.push(token_id) for token_id in ids[len(begun.token_ids) :])
    assert shown == ending(second, tokenizer).text == ending(whole, tokenizer).text
    assert ending(second, tokenizer) == ending(whole, tokenizer)


def test_what_a_reply_begins_with_alone_is_whole_and_ends_nothing() -> None:
    text = reply(stops=("User:",), begun=encode("User: hi"))
    assert not text.ended
    assert ending(text) == Ending("User: hi", tuple(encode("User: hi")), len(encode("User: hi")))


def test_a_stop_string_in_what_a_reply_begins_with_stops_nothing() -> None:
    """Neither one that stands in it nor one that only ends behind it; the next whole one does."""
    text, shown = reply(stops=("User:",), begun=encode("User: Us")), ""
    for token_id in encode("er: yes\nUser: no"):
        shown += text.push(token_id)
        if text.ended:
            break
    assert text.hit_stop_string
    assert shown == "er: yes\n"
    assert ending(text).text == "User: User: yes\n"

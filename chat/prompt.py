"""A path of messages → the token ids that the model is fed.

A reply keeps the exact ids that were sampled; it is never tokenized again, because text does not
determine ids. Everything between two replies is the chat template's text, tokenized as one piece, so
that the ids of a longer chat begin with the ids of the shorter one: that is what lets a cache be reused.

How the pieces are found: the template is rendered twice, once with every reply replaced by a marker and
once with the real texts. Where the two agree, the template left the reply alone and the sampled ids go
between the pieces. Where they differ (a template that trims, or drops earlier thinking), the template's
version of that reply is tokenized instead, and the ids say so.

Control tokens are recognised only where the template wrote them. In text that a person or a model
wrote they are marked first and encoded as ordinary characters.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (the tokenizer's methods are only partly annotated)
from __future__ import annotations

import re
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

from cache_store.records import Message
from chat.errors import PromptFailed
from chat.piece_cache import PieceCache

_MARK = "\ue5c0{}\ue5c1"
"""Stands for reply number {} in the first rendering. Private-use characters: no template treats them
specially, and they are removed from real texts so that nobody can forge one."""

_MARK_RE = re.compile("\ue5c0[0-9]+\ue5c1")
_FORGED = str.maketrans("", "", "\ue5c0\ue5c1")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to feed. `reply_spans[i]` is `[start, end)` of earlier reply i within `token_ids`, end-of-turn
    not included. `rewritten` are the message ids of the replies that the template rendered differently
    from what was sampled."""

    token_ids: tuple[int, ...]
    reply_spans: tuple[tuple[int, int], ...]
    rewritten: frozenset[str]

    def __len__(self) -> int:
        return len(self.token_ids)

    def followed_by(self, begun_ids: tuple[int, ...]) -> Prompt:
        """The same with ids that the next reply begins with."""
        return replace(self, token_ids=self.token_ids + begun_ids) if begun_ids else self


class PromptRenderer:
    """Renders for one tokenizer and its template. `eos_token_ids` are the ids that end a reply."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._control_tokens = _control_token_pattern(tokenizer)
        self._pieces = PieceCache()
        self._lock = threading.Lock()  # the Rust tokenizer refuses to be used while an option is being set

    def render(self, messages: Sequence[Message], system_prompt: str = "") -> Prompt:
        """The ids of `messages`, ending where the next reply begins.

        Raises PromptFailed when the template refuses the messages.
        """
        replies = [message for message in messages if message.role == "assistant"]
        texts = [self._marked(message.text) for message in replies]
        chat = self._chat(messages, system_prompt)
        with_marks = self._render_text(_with_marks(chat))
        pieces = _MARK_RE.split(with_marks)
        real = self._render_text(chat) if replies else with_marks
        shown = _align(real, pieces, texts)
        if shown is None:
            return self._whole(real, replies)
        return self._spliced(replies, pieces, shown, texts)

    def encode_text(self, text: str) -> list[int]:
        """Ids of ordinary text that follows other text: no start token, control tokens stay characters."""
        return list(self._encode_piece(self._marked(text), True))

    def _chat(self, messages: Sequence[Message], system_prompt: str) -> list[dict[str, str]]:
        chat = [{"role": message.role, "content": self._marked(message.text)} for message in messages]
        if system_prompt.strip():
            chat.insert(0, {"role": "system", "content": self._marked(system_prompt)})
        return chat

    def _marked(self, text: str) -> str:
        return mark_control_tokens(text.translate(_FORGED), self._control_tokens)

    def _render_text(self, chat: list[dict[str, str]]) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of somebody else's; it may raise anything
            raise PromptFailed(
                f"The model's chat template refused this chat ({error}); your text is kept, change the"
                " message or the system prompt and try again."
            ) from error
        assert isinstance(rendered, str)
        return rendered

    def _spliced(
        self, replies: Sequence[Message], pieces: list[str], shown: list[str], texts: list[str]
    ) -> Prompt:
        ids = list(self._encode_piece(pieces[0], False))
        spans: list[tuple[int, int]] = []
        rewritten: set[str] = set()
        for reply, now, text, piece in zip(replies, shown, texts, pieces[1:], strict=True):
            start = len(ids)
            if now == text and (reply.token_ids or not text):
                ids += self._without_end(reply.token_ids)
            else:
                ids += self._encode_piece(now, True)
                if reply.token_ids:
                    rewritten.add(reply.id)
            spans.append((start, len(ids)))
            ids += self._encode_piece(piece, True)
        return Prompt(tuple(ids), tuple(spans), frozenset(rewritten))

    def _whole(self, real: str, replies: Sequence[Message]) -> Prompt:
        """The template reordered or dropped replies: take its text as it is and splice nothing."""
        ids = self._encode_piece(real, False)
        return Prompt(tuple(ids), (), frozenset(reply.id for reply in replies))

    def _without_end(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Drop a sampled end-of-turn: the template writes its own right after, exactly once."""
        return token_ids[:-1] if token_ids and token_ids[-1] in self._eos_token_ids else token_ids

    def _encode_piece(self, text: str, follows: bool) -> Sequence[int]:
        """`follows`: something stands before this piece, so a tokenizer that marks the start of a text
        (SentencePiece) must not do it here. Raises PromptFailed when control tokens typed in the text
        cannot be told from real ones."""
        if not text:
            return ()
        with self._lock:
            known = self._pieces.get(text, follows)
            if known is not None:
                return known
            try:
                ids = array("I", self._encoded(text, follows))
            except ValueError as error:
                raise PromptFailed(
                    f"The model's tokenizer cannot encode this chat safely ({error}); your text is kept,"
                    " change the message and try again."
                ) from error
            self._pieces.put(text, follows, ids)
            return ids

    def _encoded(self, text: str, follows: bool) -> list[int]:
        """For a following piece a newline goes in front and its ids are taken off again; where they merge
        with what follows, the piece is encoded alone."""
        if follows:
            newline = encode_marked_chat(self._tokenizer, "\n")
            ids = encode_marked_chat(self._tokenizer, "\n" + text)
            if ids[: len(newline)] == newline:
                return ids[len(newline) :]
        return encode_marked_chat(self._tokenizer, text)


def _control_token_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Tokens that mean something to the model. Not only those flagged special: the delimiters of a thinking
    block rarely are. Added tokens that are plain words or white space are ordinary vocabulary."""
    added = tokenizer.added_tokens_decoder.values()
    control = {t.content for t in added if t.special or not "".join(t.content.split()).isalnum()}
    control = {content for content in control if not content.isspace()}
    longest_first = sorted(control - {""}, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _with_marks(chat: list[dict[str, str]]) -> list[dict[str, str]]:
    marked: list[dict[str, str]] = []
    num_replies = 0
    for message in chat:
        if message["role"] == "assistant":
            marked.append({**message, "content": _MARK.format(num_replies)})
            num_replies += 1
        else:
            marked.append(message)
    return marked


def _align(real: str, pieces: list[str], texts: list[str]) -> list[str] | None:
    """What stands between the pieces in the real rendering, one string per reply; None when the pieces
    are not all there in order."""
    if len(pieces) != len(texts) + 1 or not real.startswith(pieces[0]):
        return None
    shown: list[str] = []
    position = len(pieces[0])
    for text, piece in zip(texts, pieces[1:], strict=True):
        if real.startswith(text + piece, position):
            end = position + len(text)
        else:
            end = real.find(piece, position) if piece else len(real)
            if end < 0:
                return None
        shown.append(real[position:end])
        position = end + len(piece)
    return shown if position == len(real) else None

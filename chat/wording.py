"""Text and ids of one model: prompts of paths, ids as words, and what fits the context.

Any thread may ask: the renderer has a lock of its own, and the decoder is a copy that nobody configures.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

from tokenizers import Tokenizer

from cache_store.records import NOTHING_YET, Beginning, Message
from chat.errors import ContextFull
from chat.model import LoadedModel
from chat.prompt import Prompt, PromptRenderer


class Wording:
    """See the module. `decoder` turns ids into text, also while a reply streams."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.renderer = PromptRenderer(loaded.tokenizer, loaded.eos_token_ids)
        self.decoder = cast(Tokenizer, copy.deepcopy(loaded.tokenizer.backend_tokenizer))
        self._loaded = loaded

    def decode(self, token_ids: Sequence[int]) -> str:
        """Ids as text for people, control tokens included."""
        return self.decoder.decode(list(token_ids), skip_special_tokens=False)

    def words(self, token_ids: Sequence[int]) -> str:
        """Ids as text without control tokens; ids may begin or end within a character."""
        return self.decoder.decode(list(token_ids), skip_special_tokens=True)

    def ids_of_text(self, text: str) -> list[int]:
        """The ids of ordinary text."""
        return self.renderer.encode_text(text)

    def ids_of_reply(self, text: str) -> tuple[int, ...]:
        """The ids of a reply that a person wrote, end-of-turn included; empty when no ids say exactly this
        text, which is then tokenized with the template."""
        ids = self.ids_of_text(text)
        if self.words(ids) != text:
            return ()
        end = self._loaded.tokenizer.eos_token_id
        ends = self._loaded.eos_token_ids
        return (*ids, end if isinstance(end, int) and end in ends else min(ends))

    def begun_ids(self, text: str, token_ids: Sequence[int]) -> tuple[int, ...]:
        """What a reply begins with: its own ids, or those of its text where it has none yet."""
        return tuple(token_ids) if token_ids or not text else tuple(self.ids_of_text(text))

    def prompt(
        self, path: Sequence[Message], system_prompt: str, beginning: Beginning = NOTHING_YET
    ) -> Prompt:
        """What is fed for a reply to `path` that begins so. Raises PromptFailed."""
        begun_ids = self.begun_ids(beginning.text, beginning.token_ids)
        return self.renderer.render(path, system_prompt).followed_by(begun_ids)

    def ids_read(self, path: Sequence[Message], system_prompt: str) -> tuple[int, ...]:
        """What was fed for a path: the prompt of its last reply, and that reply. Raises PromptFailed."""
        *above, last = path
        if last.role == "user" or not last.token_ids:
            return self.renderer.render(path, system_prompt).token_ids
        return self.renderer.render(above, system_prompt).followed_by(last.token_ids).token_ids

    def check_context(self, prompt: Prompt) -> None:
        """Raises ContextFull when no reply could follow."""
        limit = self._loaded.num_context_tokens
        if len(prompt) >= limit:
            raise ContextFull(
                f"This chat would have {len(prompt):,} tokens, and the model reads at most {limit:,}, its"
                " reply included; nothing was lost: shorten the message, edit an earlier one, or start a new"
                " chat."
            )

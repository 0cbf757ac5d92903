"""What a turn cost, and why: the numbers under every reply.

Invariant: every prompt token is accounted for exactly once, so
`num_live_tokens + num_disk_tokens + num_prefilled_tokens == num_prompt_tokens`, and the counts in
`reasons` add up to `num_prefilled_tokens`. Checked when the value is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast, get_args

from cache_store.records import Json

Reason = Literal[
    "new",
    "edited",
    "boundary",
    "template",
    "system_prompt",
    "evicted",
    "restart",
    "fingerprint",
    "damaged",
    "not_croppable",
    "failed",
    "off",
]
"""Why a token was read. First times: `new` text; text of an `edited` message. Always: the one token at the
`boundary`, fed again to get the first logits when all else is remembered. Again: the `template` rendered
the past differently; the `system_prompt` before all else was changed; its cache was `evicted` to stay within
a budget; the app was `restart`ed before it was saved; what is saved has another `fingerprint` (model, dtype,
template, …); a saved file is `damaged`; the model's layers are `not_croppable`; the last turn `failed` and
its cache was dropped; saving is `off`, so that a restart forgot it."""

REASONS: tuple[Reason, ...] = get_args(Reason)

READ_AGAIN: frozenset[Reason] = frozenset(REASONS) - {"new", "edited", "boundary"}
"""The reasons that count as reading a second time (law 1)."""

CACHE_KIND = "cache kind"
"""What the fingerprint's part about the cache is called before people, in `TurnStats.changed_setting`."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt departs from what its conversation had read before: the first `position` tokens are
    the same. `before`, `old` and `new` are short texts: what both have just before that place, and what
    follows in each."""

    position: int
    before: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class TurnStats:
    """Counts are tokens, times are seconds.

    `ttft_s`: from the moment the job left the queue to the first sampled token. `queue_s`: the wait
    before that. `decode_tokens_per_s`: over the tokens after the first one; 0 when there was none.
    `num_cached_tokens`: what the conversation's cache held when the turn was over. Behind the reasons:
    `divergence`, None when the prompt only went on from what was read before; `changed_setting`, the part
    of the fingerprint that differs, with both values; and how many cache files were found damaged.
    `cache_kind`: the kind of the conversation's cache; `note`: a sentence about it that a person should see.
    """

    num_prompt_tokens: int
    num_live_tokens: int
    num_disk_tokens: int
    num_prefilled_tokens: int
    num_reply_tokens: int
    reasons: Mapping[Reason, int] = field(default_factory=dict["Reason", int])
    queue_s: float = 0.0
    ttft_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    num_cached_tokens: int = 0
    divergence: Divergence | None = None
    changed_setting: str = ""
    num_damaged_files: int = 0
    cache_kind: str = ""
    note: str = ""

    @property
    def num_read_again(self) -> int:
        """Prefilled tokens that had been computed before and had to be computed a second time."""
        return sum(count for reason, count in self.reasons.items() if reason in READ_AGAIN)

    def __post_init__(self) -> None:
        parts = self.num_live_tokens + self.num_disk_tokens + self.num_prefilled_tokens
        if parts != self.num_prompt_tokens:
            raise ValueError(f"{parts} tokens accounted for, but the prompt has {self.num_prompt_tokens}")
        if sum(self.reasons.values()) != self.num_prefilled_tokens:
            raise ValueError("the reasons do not add up to num_prefilled_tokens")

    def to_json(self) -> dict[str, Json]:
        """A plain dict for the store; `from_json` is its inverse."""
        return cast("dict[str, Json]", asdict(self))

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> TurnStats:
        """Build from stored JSON. Raises TypeError or ValueError when it is not one of ours."""
        fields = cast("dict[str, Any]", dict(data))
        if fields.get("divergence"):
            fields["divergence"] = Divergence(**fields["divergence"])
        return cls(**fields)

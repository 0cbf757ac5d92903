"""The quiet line under a reply: what a turn cost, in words. Pure functions of a `TurnStats`."""

from __future__ import annotations

from chat.stats import CACHE_KIND, Reason, TurnStats

WHY_AGAIN: dict[Reason, str] = {
    "template": "the chat template rewrote what came before",
    "system_prompt": "the system prompt was changed",
    "evicted": "it had been removed to save space",
    "restart": "the app was restarted before it was saved",
    "fingerprint": "what is saved was made by another model or setting",
    "damaged": "a cache file was damaged",
    "not_croppable": "this model cannot step back to an earlier place",
    "failed": "the last reply failed",
    "off": "saving is turned off, so the restart forgot it",
}
"""Only the reasons for which tokens that had been read before were read once more."""

WHAT_WAS_READ: dict[Reason, str] = {
    "new": "New text",
    "edited": "Text of an edited message",
    "boundary": "Fed once more to begin the reply",
}


def stats_line(stats: TurnStats) -> str:
    """One line, only with what there is: remembered, read, first word, speed, and why any was read again."""
    facts = [*_remembered(stats), *_read(stats)]
    if stats.ttft_s > 0:
        facts.append(f"first word in {seconds(stats.ttft_s)}")
    parts = [", ".join(facts)] if facts else []
    if stats.decode_tokens_per_s > 0:
        parts.append(f"{_rate(stats.decode_tokens_per_s)} tok/s")
    if again := read_again(stats):
        parts.append(again)
    return " · ".join(parts)


def read_again(stats: TurnStats) -> str:
    """Which tokens were read once more, and why, in plain words; empty when none were."""
    clauses = [
        _damage(stats)
        if reason == "damaged"
        else f"{stats.reasons[reason]:,} read again: {_why(reason, stats)}"
        for reason in WHY_AGAIN
        if stats.reasons.get(reason, 0) > 0
    ]
    return "; ".join(clauses)


def _why(reason: Reason, stats: TurnStats) -> str:
    is_kind = reason == "fingerprint" and stats.changed_setting.startswith(CACHE_KIND)
    return "the kind of cache was changed" if is_kind else WHY_AGAIN[reason]


def _damage(stats: TurnStats) -> str:
    files = (
        "1 cache file was"
        if stats.num_damaged_files == 1
        else f"{stats.num_damaged_files:,} cache files were"
    )
    return f"{files} damaged; {_tokens(stats.reasons['damaged'])} read again"


def stats_details(stats: TurnStats) -> list[tuple[str, str]]:
    """Every number of the turn as (label, value), for those who open the line."""
    rows = [
        ("Prompt", _tokens(stats.num_prompt_tokens)),
        ("Remembered in memory", _tokens(stats.num_live_tokens)),
        ("Remembered on disk", _tokens(stats.num_disk_tokens)),
        ("Read now", _tokens(stats.num_prefilled_tokens)),
    ]
    for reason, label in WHAT_WAS_READ.items():
        if stats.reasons.get(reason, 0) > 0:
            rows.append((label, _tokens(stats.reasons[reason])))
    rows += [
        (f"Read again: {_why(reason, stats)}", _tokens(stats.reasons[reason]))
        for reason in WHY_AGAIN
        if stats.reasons.get(reason, 0) > 0
    ]
    rows += _what_changed(stats)
    rows.append(("Reply", _tokens(stats.num_reply_tokens)))
    rows.append(("Waited in the queue", seconds(stats.queue_s)))
    rows.append(("First word after", seconds(stats.ttft_s)))
    if stats.decode_tokens_per_s > 0:
        rows.append(("Writing speed", f"{stats.decode_tokens_per_s:.1f} tok/s"))
    return rows


def _what_changed(stats: TurnStats) -> list[tuple[str, str]]:
    """Where the prompt departs from what had been read before: the setting, or the text around the place."""
    rows = [("What differs", stats.changed_setting)] if stats.changed_setting else []
    if stats.divergence is not None:
        place = stats.divergence
        rows.append(("Differs after", _tokens(place.position)))
        rows.append(("Before", f"{place.before}▸{place.old}…"))
        rows.append(("Now", f"{place.before}▸{place.new}…"))
    return rows


def seconds(value: float) -> str:
    """A duration a person reads at a glance: `0.12 s`, `3.4 s`, `75 s`."""
    if value < 1:
        return f"{value:.2f} s"
    return f"{value:.1f} s" if value < 10 else f"{value:,.0f} s"


def _remembered(stats: TurnStats) -> list[str]:
    num_remembered = stats.num_live_tokens + stats.num_disk_tokens
    if num_remembered == 0:
        return []
    from_disk = f" ({stats.num_disk_tokens:,} from disk)" if stats.num_disk_tokens else ""
    return [f"{_tokens(num_remembered)} remembered{from_disk}"]


def _read(stats: TurnStats) -> list[str]:
    num_read = stats.num_prefilled_tokens
    if num_read == 0:
        return []
    remembered_any = stats.num_prompt_tokens > num_read
    return [f"{num_read:,} read" if remembered_any else f"{_tokens(num_read)} read"]


def _tokens(count: int) -> str:
    return f"{count:,} token" if count == 1 else f"{count:,} tokens"


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.1f}" if tokens_per_s < 10 else f"{tokens_per_s:,.0f}"

"""What `python app.py store` tells: lines for a person, or one JSON document.

The documents, by action; sizes are bytes, times seconds since the epoch, tokens [start, end):
- size: the fields of `StoreSize`, and `data_dir`;
- list: `segments`, each with `id`, `parent_id`, `owner`, `model` (its key in `models`), `start`, `end`,
  `state` (`stored` or `evicted`), `file`, `nbytes`, `seconds`, `created_at`, `last_used_at` and
  `conversations` (keys of `titles`); `models`: with what the rows were computed; `titles`;
- verify: `num_checked`, and `damaged`, each with `id`, `owner`, `file`, `start`, `end`, `nbytes`, `damage`;
- prune and sweep: the fields of `SweepReport`, `max_bytes` (null: no limit), `kv_bytes_before` and
  `kv_bytes_after`;
- whatever could not be done: `error`, a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from cache_store.branches import branches_of
from cache_store.records import Segment, SegmentCheck, SegmentNode, StoreSize, SweepReport
from ui.sizes import size_text
from ui.store_options import UNLIMITED

_AFTER_DAMAGE = (
    "Nothing was changed. Keepwarm sets a damaged file aside when its chat goes on, and reads those tokens "
    "from the text again; the texts of all chats are safe."
)

_NAME_LENGTH = 40
"""Characters of a model's name; some are hashes."""

Models = Mapping[int, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Report:
    """What an action has to tell. `is_fine`: False when it found damage."""

    document: Mapping[str, object]
    lines: Sequence[str]
    is_fine: bool = True


def size_report(size: StoreSize, data_dir: Path) -> Report:
    """How much lies on the disk."""
    stored, evicted = size.num_stored, size.num_evicted
    rows = (
        ("Cache files", f"{size_text(size.kv_bytes)} of {size_text(size.max_bytes)}"),
        ("  in use", f"{size_text(size.stored_bytes)} in {_count(stored, 'segment', 'segments')}"),
        ("  set aside", f"{size_text(size.quarantined_bytes)}, damaged files: {size.num_quarantined:,}"),
        ("  evicted", f"{_count(evicted, 'segment', 'segments')}, to be read from the text again"),
        ("Texts", size_text(size.database_bytes)),
        ("Folder", _plain(str(data_dir))),
    )
    return Report({**asdict(size), "data_dir": str(data_dir)}, [f"{name:<13}{told}" for name, told in rows])


def list_report(nodes: Sequence[SegmentNode], models: Models, titles: Mapping[str, str]) -> Report:
    """Every segment; for a person as branches, by owner and model."""
    document = {"segments": [_segment_facts(node) for node in nodes], "models": models, "titles": titles}
    return Report(document, [*_tree_lines(nodes, models, titles)] or ["No caches are saved."])


def verify_report(checks: Sequence[SegmentCheck]) -> Report:
    """Which files are not what was written."""
    damaged = [check for check in checks if check.damage is not None]
    facts = [{**_file_facts(check.segment), "damage": check.damage} for check in damaged]
    lines = [f"{_count(len(checks), 'cache file', 'cache files')} read, {len(damaged):,} damaged."]
    if damaged:
        lines += [*map(_damage_line, damaged), _AFTER_DAMAGE]
    return Report({"num_checked": len(checks), "damaged": facts}, lines, is_fine=not damaged)


def sweep_report(report: SweepReport, max_bytes: int, *, before: int, after: int) -> Report:
    """What was put in order or evicted. `before`, `after`: bytes of the cache files."""
    document = {
        **asdict(report),
        "max_bytes": None if max_bytes == UNLIMITED else max_bytes,
        "kv_bytes_before": before,
        "kv_bytes_after": after,
    }
    done = (
        (report.num_temporary, "half-written file removed", "half-written files removed"),
        (report.num_orphans, "file that belongs to no chat removed", "files that belong to no chat removed"),
        (report.num_missing, "file is missing", "files are missing"),
        (report.num_damaged, "damaged file set aside", "damaged files set aside"),
        (report.num_evicted, "segment evicted, its text is kept", "segments evicted, their text is kept"),
    )
    lines = [f"{_count(number, one, many)}." for number, one, many in done if number]
    sizes = f"The cache files take {size_text(after)}; before, they took {size_text(before)}."
    return Report(document, [*(lines or ["Everything was in order."]), sizes])


def _file_facts(segment: Segment) -> dict[str, object]:
    return {
        "id": segment.id,
        "owner": segment.owner,
        "file": segment.file,
        "start": segment.start,
        "end": segment.end,
        "nbytes": segment.nbytes,
    }


def _segment_facts(node: SegmentNode) -> dict[str, object]:
    segment = node.segment
    return {
        **_file_facts(segment),
        "parent_id": segment.parent_id,
        "model": segment.fingerprint_id,
        "state": segment.state,
        "seconds": segment.seconds,
        "created_at": segment.created_at,
        "last_used_at": segment.last_used_at,
        "conversations": node.conversation_ids,
    }


def _tree_lines(nodes: Iterable[SegmentNode], models: Models, titles: Mapping[str, str]) -> Iterator[str]:
    trees: dict[tuple[str, int], dict[str, SegmentNode]] = {}
    for node in nodes:
        trees.setdefault((node.segment.owner, node.segment.fingerprint_id), {})[node.segment.id] = node
    for (owner, number), tree in trees.items():
        yield _plain(f"Chats of {owner}, {made_with(models[number])}")
        for branch in branches_of(node.segment for node in tree.values()):
            indent = "  " * (branch.depth + 1)
            if branch.depth:
                yield f"{indent}another branch, from token {branch.start:,} on"
            for segment in branch.segments:
                chats = ", ".join(titles.get(name, name) for name in tree[segment.id].conversation_ids)
                yield f"{indent}{_segment_line(segment)}  {_plain(chats)}".rstrip()


def made_with(fields: Mapping[str, str]) -> str:
    """The model, and what else a person can choose, from a fingerprint."""
    kind = fields.get("cache", "").partition(",")[0]
    chosen = [fields.get(name, "")[:_NAME_LENGTH] for name in ("model", "dtype", "weights")]
    known = [*filter(None, chosen), *([f"cache kind {kind}"] if kind else [])]
    return ", ".join(known) or "an unknown model"


def _segment_line(segment: Segment) -> str:
    tokens = f"tokens {segment.start:,} to {segment.end:,}"
    stored = size_text(segment.nbytes) if segment.state == "stored" else "evicted"
    used = datetime.fromtimestamp(segment.last_used_at).strftime("%Y-%m-%d %H:%M")
    return f"{segment.id[:8]}  {tokens:<27}{stored:>8}  {used}"


def _damage_line(check: SegmentCheck) -> str:
    segment = check.segment
    tokens = f"tokens {segment.start:,} to {segment.end:,} of a chat of {segment.owner}"
    return _plain(f"  {segment.file}, {tokens}: {check.damage}")


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _plain(text: str) -> str:
    """Names and titles are somebody's text: nothing in them may steer a terminal."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)

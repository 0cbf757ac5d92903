"""`python app.py store`: look after the saved caches. See `ui.store_report` for what is told.

Actions that only look take no lock and create nothing, so they also work beside a running Keepwarm. A
damaged file that `verify` finds stays where it is: the app sets it aside when it meets it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from typing import TextIO

from cache_store.conversations import Conversations
from cache_store.database import Database, DatabaseView
from cache_store.errors import StoreError
from cache_store.folder import DataFolder, FolderView
from cache_store.records import SegmentNode
from cache_store.segments import Segments
from ui.store_options import Action, StoreOptions
from ui.store_report import Report, list_report, size_report, sweep_report, verify_report

_MOST_CHATS = 10**9


def look_after(options: StoreOptions) -> int:
    """Do what the options say and print what came of it; 0 when all is well, 1 when there is damage.

    Raises StoreError, after a JSON document with its sentence when JSON was asked for.
    """
    try:
        with ExitStack() as opened:
            report = _ACTIONS[options.action](options, opened)
    except StoreError as exc:
        if options.as_json:
            _print(json.dumps({"error": str(exc)}))
        raise
    _print(json.dumps(report.document, indent=2) if options.as_json else "\n".join(report.lines))
    return 0 if report.is_fine else 1


def _size(options: StoreOptions, opened: ExitStack) -> Report:
    _, segments = _to_look(options, opened)
    return size_report(segments.size(), options.data_dir)


def _list(options: StoreOptions, opened: ExitStack) -> Report:
    database, segments = _to_look(options, opened)
    nodes = segments.list()
    numbers = sorted({node.segment.fingerprint_id for node in nodes})
    models = {number: segments.fields_of(number) for number in numbers}
    return list_report(nodes, models, _titles(Conversations(database), nodes))


def _verify(options: StoreOptions, opened: ExitStack) -> Report:
    _, segments = _to_look(options, opened)
    return verify_report(list(segments.verify()))


def _put_in_order(options: StoreOptions, opened: ExitStack) -> Report:
    """Prune and sweep: what nobody needs would else count against what is kept."""
    FolderView(options.data_dir)  # only where there is something already
    folder = opened.enter_context(DataFolder(options.data_dir))
    database = opened.enter_context(closing(Database(folder.database)))
    segments = Segments(database, folder.kv, options.max_bytes)
    before = segments.size().kv_bytes
    report = segments.sweep()
    return sweep_report(report, options.max_bytes, before=before, after=segments.size().kv_bytes)


_ACTIONS: Mapping[Action, Callable[[StoreOptions, ExitStack], Report]] = {
    "size": _size,
    "list": _list,
    "verify": _verify,
    "prune": _put_in_order,
    "sweep": _put_in_order,
}


def _to_look(options: StoreOptions, opened: ExitStack) -> tuple[Database, Segments]:
    folder = FolderView(options.data_dir)
    database = opened.enter_context(closing(DatabaseView(folder.database)))
    return database, Segments(database, folder.kv, options.max_bytes)


def _titles(conversations: Conversations, nodes: Iterable[SegmentNode]) -> dict[str, str]:
    """Of the chats that use these segments, by id."""
    owners = sorted({node.segment.owner for node in nodes})
    used = {name for node in nodes for name in node.conversation_ids}
    chats = (chat for owner in owners for chat in conversations.list(owner, limit=_MOST_CHATS))
    return {chat.id: chat.title for chat in chats if chat.id in used}


def _print(text: str) -> None:
    """A character that the terminal cannot show becomes a question mark, and a reader who has seen enough
    (`| head`) is no error."""
    out: TextIO = sys.stdout
    try:
        encoding = out.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), file=out, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # for what Python flushes at its end

"""The command line of `python app.py store`: words in, one frozen `StoreOptions` out, or one sentence.

Imports nothing heavy, like `ui.options`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ui.option_parser import MAX_DISK, OptionParser, UsageError, add_data_dir, size

Action = Literal["size", "list", "verify", "prune", "sweep"]

ACTIONS: tuple[Action, ...] = get_args(Action)
UNLIMITED = sys.maxsize

_HELP = """\
size     how much lies on the disk
list     every saved piece of every chat
verify   read every cache file and compare its checksum; changes nothing
prune    put in order, then evict what is worth least until SIZE is left
sweep    put in order what a crash or another program has left behind

Texts of chats are never touched. size, list and verify also work while Keepwarm is running.
Exit codes: 0 fine, 1 something could not be done or verify found damage, 2 a wrong command line.
"""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What to do with the saved caches. `max_bytes`: what they may take; `UNLIMITED` evicts nothing."""

    action: Action
    data_dir: Path
    max_bytes: int
    as_json: bool


def parse_store_options(arguments: Sequence[str]) -> StoreOptions:
    """Read the words behind `store`. Raises UsageError with one sentence; `--help` prints and exits with
    code 0."""
    parser = _parser()
    found = parser.parse_args(arguments)
    action = found.action
    if action not in ACTIONS:
        said = "nothing" if action is None else repr(action)
        parser.error(f"store takes {', '.join(ACTIONS[:-1])} or {ACTIONS[-1]}, not {said}")
    if found.to is not None and action != "prune":
        raise UsageError(f"--to says how much prune leaves; store {action} takes no --to.")
    return StoreOptions(action, found.data_dir, _limit(found), found.json)


def _limit(found: argparse.Namespace) -> int:
    """A sweep evicts only when somebody names a limit: the app may be run with a larger one."""
    if found.to is not None:
        return found.to
    if found.max_disk is not None:
        return found.max_disk
    return UNLIMITED if found.action == "sweep" else size(MAX_DISK)


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="app.py store",
        description="Look after the saved caches, without the page and without a model.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("action", nargs="?", metavar="ACTION", help=f"{', '.join(ACTIONS)}; see below")
    parser.add_argument(
        "--to", type=size, metavar="SIZE", help="how much prune leaves; --max-disk by default"
    )
    add_data_dir(parser)
    parser.add_argument(
        "--max-disk",
        type=size,
        metavar="SIZE",
        help=f"disk space for saved caches; {MAX_DISK} by default, for sweep no limit",
    )
    parser.add_argument("--json", action="store_true", help="tell it as one JSON document")
    return parser

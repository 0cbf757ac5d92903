"""The command line: words in, one frozen `Options` out, or one sentence that says why not.

Imports nothing heavy, so that `--help` and a mistyped option answer at once.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import psutil

from chat.settings import (
    DEFAULT_MODEL,
    STATIC_TOKENS,
    Budgets,
    CacheKind,
    DeviceMap,
    DeviceName,
    DtypeName,
    ModelSettings,
    WeightForm,
)
from ui.login import Account
from ui.option_parser import MAX_DISK, OptionParser, UsageError, add_data_dir, size

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that the command line decides. `data_dir` need not exist yet; port 0 takes a free one."""

    model: ModelSettings
    budgets: Budgets
    data_dir: Path
    host: str
    port: int
    share: bool
    accounts: tuple[Account, ...]
    system_prompt: str
    log_level: str
    cache_kind: CacheKind = "dynamic"
    static_tokens: int = STATIC_TOKENS


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read `arguments` (default: those of this process). Raises UsageError with one sentence; `--help`
    prints and exits with code 0."""
    found = _parser().parse_args(arguments)
    if found.share and found.offline:
        raise UsageError("--share needs the internet and --offline forbids it; choose one of them.")
    names = [account.name for account in found.auth]
    if len(set(names)) < len(names):
        raise UsageError("--auth names the same user twice; give each user one password.")
    return Options(
        model=_model_settings(found),
        budgets=Budgets(found.max_live_memory, found.max_disk),
        data_dir=found.data_dir,
        host=found.host,
        port=found.port,
        share=found.share,
        accounts=tuple(found.auth),
        system_prompt=found.system_prompt,
        log_level=found.log_level,
        cache_kind=found.cache_kind,
        static_tokens=found.static_tokens,
    )


def _model_settings(found: argparse.Namespace) -> ModelSettings:
    try:
        return ModelSettings(
            found.model, found.device, found.dtype, found.offline, found.weights, found.device_map
        )
    except ValueError as exc:
        raise UsageError(str(exc)) from exc


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="app.py",
        description="Chat with a local model that never reads the same token twice.",
        epilog="python app.py store --help: looking after the saved caches, without starting the page",
        allow_abbrev=False,
    )
    _add_model_options(parser)
    _add_storage_options(parser)
    _add_server_options(parser)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=_model,
        default=DEFAULT_MODEL,
        metavar="NAME",
        help="'default' (a small model, fetched once), a hub id, a folder, or a .gguf file",
    )
    _add_choice(parser, "--device", get_args(DeviceName), "auto", "where the model runs")
    _add_choice(parser, "--dtype", get_args(DtypeName), "auto", "number format of weights and caches")
    _add_choice(
        parser,
        "--weights",
        get_args(WeightForm),
        "full",
        "weights as they were saved, or quantized to 8 or 4 bits while they are loaded (on a CPU, int8 is "
        "smaller but not faster)",
    )
    _add_choice(
        parser,
        "--device-map",
        get_args(DeviceMap),
        "single",
        "the model on one device, or, where that is too small, also on other GPUs, in memory and on disk",
    )
    parser.add_argument(
        "--system-prompt",
        default="",
        metavar="TEXT",
        help="how every new chat begins; the model's own by default",
    )
    parser.add_argument("--offline", action="store_true", help="use only what is on this machine already")


def _add_storage_options(parser: argparse.ArgumentParser) -> None:
    add_data_dir(parser)
    parser.add_argument(
        "--max-live-memory",
        type=_memory_size,
        default=psutil.virtual_memory().total // 4,
        metavar="SIZE",
        help="memory for live caches, as 2GB, 512MB or plain bytes (1KB is 1,024 bytes); "
        "a quarter of this machine's memory by default",
    )
    _add_choice(
        parser,
        "--cache-kind",
        get_args(CacheKind),
        "dynamic",
        "how caches are kept, where a chat has no choice of its own",
    )
    parser.add_argument(
        "--static-tokens",
        type=_num_tokens,
        default=STATIC_TOKENS,
        metavar="N",
        help=f"how long a chat can become in a cache of fixed size; {STATIC_TOKENS} by default",
    )
    parser.add_argument(
        "--max-disk",
        type=size,
        default=MAX_DISK,
        metavar="SIZE",
        help=f"disk space for saved caches; {MAX_DISK} by default, 0 saves none",
    )


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host",
        type=_host,
        default="127.0.0.1",
        help="address to listen at; 127.0.0.1 by default, 0.0.0.0 for every address of this machine",
    )
    parser.add_argument(
        "--port", type=_port, default=7860, help="port to listen at; 7860 by default, 0 for any free one"
    )
    parser.add_argument("--share", action="store_true", help="also make a public link, guarded by a password")
    parser.add_argument(
        "--auth",
        type=_account,
        action="append",
        default=[],
        metavar="USER:PASSWORD",
        help="who may sign in; repeat it for more people; without it, a shared page makes up a password",
    )
    _add_choice(parser, "--log-level", LOG_LEVELS, "warning", "how much to tell on the terminal")


def _add_choice(
    parser: argparse.ArgumentParser, flag: str, names: tuple[str, ...], default: str, help_text: str
) -> None:
    """Like argparse's `choices`, whose message differs from one Python version to the next."""
    listed = f"{', '.join(names[:-1])} or {names[-1]}"
    parser.add_argument(
        flag,
        type=_one_of(names, listed),
        default=default,
        metavar="NAME",
        help=f"{help_text}: {listed}; {default} by default",
    )


def _one_of(names: tuple[str, ...], listed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"takes {listed}, not {text!r}")
        return text

    return parse


def _model(text: str) -> str:
    """A path is made absolute, since the name is remembered with the chats."""
    if text == DEFAULT_MODEL:
        return text
    if not text.strip():
        raise argparse.ArgumentTypeError("takes the name of a model, not an empty one")
    path = Path(text).expanduser()
    try:
        if path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf"):
            return str(path.resolve())
        there = path.exists()
    except OSError as exc:
        raise argparse.ArgumentTypeError(f"cannot use {text!r} ({exc.strerror})") from exc
    if there:
        raise argparse.ArgumentTypeError(f"takes a folder or a .gguf file, and {text!r} is neither")
    if _HUB_ID.fullmatch(text) and path.suffix.lower() != ".gguf":
        return text
    raise argparse.ArgumentTypeError(
        f"takes 'default', a hub id such as owner/name, a folder or a .gguf file; {text!r} is none of them"
    )


def _memory_size(text: str) -> int:
    num_bytes = size(text)
    if num_bytes == 0:
        raise argparse.ArgumentTypeError("takes more than nothing, because no chat fits into 0 bytes")
    return num_bytes


def _num_tokens(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"takes a number of tokens, at least 1, not {text!r}")
    return int(text)


def _port(text: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"takes a whole number from 0 to 65535, not {text!r}")
    return int(text)


def _host(text: str) -> str:
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not re.fullmatch(r"[A-Za-z0-9._-]+|[A-Fa-f0-9:.]*:[A-Fa-f0-9:.]*:[A-Fa-f0-9:.]*(%\w+)?", host):
        raise argparse.ArgumentTypeError(f"takes an address or a name without scheme or port, not {text!r}")
    return host


def _account(text: str) -> Account:
    """Never repeats the text in a message: it may hold a password."""
    name, colon, password = text.partition(":")
    try:
        if not colon:
            raise ValueError("takes USER:PASSWORD, with a colon between the two")
        return Account(name, password)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None

"""How a command line is read, whichever command it is for: one sentence for a mistake, sizes, folders."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction
from pathlib import Path
from typing import NoReturn

import platformdirs

MAX_DISK = "20GB"
"""What saved caches may take unless somebody says otherwise."""

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_OF_ARGPARSE = re.compile(r"argument (--[a-z-]+): (.*)", re.DOTALL)


class UsageError(Exception):
    """The command line asks for something that does not exist or contradicts itself."""


class OptionParser(argparse.ArgumentParser):
    """argparse without its usage dump: an error is one sentence, raised."""

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        of_option = _OF_ARGPARSE.fullmatch(message)
        if of_option:
            message = f"{of_option[1]} {of_option[2]}"
        elif message.startswith("unrecognized arguments: "):
            message = f"There is no option {message.partition(': ')[2]}"
        message = message.replace("expected one argument", "needs a value")
        message = re.sub("ignored explicit argument .*", "takes no value", message)
        raise UsageError(f"{' '.join(message.split())}; see python {self.prog} --help.")


def add_data_dir(parser: argparse.ArgumentParser) -> None:
    """`--data-dir`, as a whole path; it need not exist yet."""
    home = str(platformdirs.user_data_path("keepwarm", appauthor=False)).replace("%", "%%")
    parser.add_argument(
        "--data-dir",
        type=_folder,
        default=home,
        metavar="FOLDER",
        help=f"where chats, caches and models are kept; {home} by default",
    )


def size(text: str) -> int:
    """Bytes of `2GB`, `1.5 GiB`, `512m`, `1000`; units are powers of 1,024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"takes a size such as 2GB, 512MB or plain bytes, not {text!r}")
    power = " kmgt".index(match[2].lower() or " ")
    return int(Fraction(match[1]) * 1024**power)


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("takes a folder, not an empty name")
    path = Path(text).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"takes a folder, and {text!r} is a file")
    return path

"""`python -m tests.bench NAME [--json]`: run one measurement; the last line of output is one JSON object."""

from __future__ import annotations

import argparse
import importlib
import json

from tests.bench.machine import describe_machine

NAMES = ("turns", "resume", "save", "kinds", "edit", "weights")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    arguments = parser.parse_args()
    say = _silent if arguments.json else print
    machine = describe_machine()
    say(" · ".join(f"{key} {value}" for key, value in machine.items()))
    result = importlib.import_module(f"tests.bench.{arguments.name}").run(say)
    print(json.dumps({"bench": arguments.name, **result, "machine": machine}))


def _silent(*words: object) -> None:
    """Progress is for people; a caller of --json wants one line."""


if __name__ == "__main__":
    main()

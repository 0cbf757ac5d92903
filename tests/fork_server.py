"""Fresh processes that cost milliseconds: a server loads the libraries and one model, and forks per task.

A forked process shares the model's weights and nothing else: it opens, writes and closes a data folder by
itself, and ends, or is killed, like any other. The server computes in one thread and never starts another,
so that nothing is lost in a fork. As many servers as wanted may run; each has its own interpreter and its own
hash seed.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from chat.model import LoadedModel, load_model
from chat.settings import ModelSettings
from tests.tiny_models import tiny_model

ROOT = Path(__file__).parents[1]

Task = Callable[..., Any]
"""Called with the server's model and keyword arguments that JSON can hold; so is what it returns."""


@dataclass(frozen=True)
class Outcome:
    """How a process ended: what its task returned, or the number of the signal that killed it."""

    result: Any = None
    killed_by: int | None = None


class ForkServer:
    """See the module. `model`: one of `TINY_KINDS`, or the path of a model folder. A context manager."""

    def __init__(self, model: str) -> None:
        quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", model],
            cwd=ROOT,
            env={**os.environ, **quiet},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, task: Task, **arguments: Any) -> Outcome:
        """Run a module-level function in a process of its own. Raises AssertionError when it raised."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        order = {"module": task.__module__, "name": task.__name__, "arguments": arguments}
        print(json.dumps(order), file=self._server.stdin, flush=True)
        answer = json.loads(self._server.stdout.readline() or '{"error": "the server has ended"}')
        assert "error" not in answer, answer["error"]
        return Outcome(**answer)

    def close(self) -> None:
        self._server.communicate(timeout=60)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(model: str) -> None:
    """Answer each line on stdin with one on stdout, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    loaded = _load(model)
    for line in sys.stdin:
        order = json.loads(line)
        task = getattr(importlib.import_module(order["module"]), order["name"])
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            _do(task, loaded, order["arguments"], writer)
        os.close(writer)
        with os.fdopen(reader) as told:
            answer = told.read()
        status = os.waitpid(child, 0)[1]
        killed = json.dumps({"killed_by": os.WTERMSIG(status)}) if os.WIFSIGNALED(status) else None
        print(killed or answer or '{"error": "it ended without an answer"}', file=answers, flush=True)


def _do(task: Task, loaded: LoadedModel, arguments: dict[str, Any], writer: int) -> None:
    """In the forked process; never returns."""
    try:
        answer = {"result": task(loaded, **arguments)}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    with os.fdopen(writer, "w") as told:
        told.write(json.dumps(answer))
    os._exit(0)


def _load(model: str) -> LoadedModel:
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    if not Path(model).is_dir():
        return tiny_model(model)
    settings = ModelSettings(model, device="cpu", dtype="float32", offline=True)
    return load_model(settings, Path(model).parent)


if __name__ == "__main__":
    serve(sys.argv[1])

"""A hand on a running model, for tests: watch, hold or break its forward passes, and dictate its choices.

Nothing here replaces the model: what is not held, broken or dictated is computed by the real one.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chat.kv_cache import KVCache
from chat.model import LoadedModel
from chat.sampler import Sampler
from tests.tiny_models import tiny_llama

PATIENCE_S = 120.0


@lru_cache
def llama(num_layers: int = 2, num_context_tokens: int = 2048) -> LoadedModel:
    """One plain tiny model for all tests; its weights never change."""
    return tiny_llama(num_hidden_layers=num_layers, max_position_embeddings=num_context_tokens)


class Hold:
    """A pass that waits: `reached` once it began, until `release`."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._released = threading.Event()

    def wait_until_reached(self) -> None:
        """Raises AssertionError when the pass does not come."""
        assert self._reached.wait(PATIENCE_S), "the model never came to the pass that was to be held"

    def is_reached(self, timeout_s: float) -> bool:
        """Whether the pass has begun, or begins within that time."""
        return self._reached.wait(timeout_s)

    def release(self) -> None:
        self._released.set()

    def __call__(self) -> None:
        self._reached.set()
        assert self._released.wait(PATIENCE_S), "the test never released the model"


class Passes:
    """The calls of one module from now on. `fed[i]` are the input ids of pass i (whole models only)."""

    def __init__(self, module: nn.Module) -> None:
        self.fed: list[list[int]] = []
        self.num_passes = 0
        self._module: Any = module
        self._forward: Callable[..., Any] = module.forward
        self._plans: dict[int, Callable[[], None]] = {}
        self._holds: list[Hold] = []

    def __enter__(self) -> Passes:
        self._module.forward = self._watched
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hold in self._holds:
            hold.release()
        del self._module.forward

    @property
    def fed_ids(self) -> list[int]:
        """All ids fed so far, in order."""
        return [token_id for ids in self.fed for token_id in ids]

    def hold(self, number: int = 1) -> Hold:
        """Make the `number`-th pass from now wait before it computes anything."""
        hold = Hold()
        self._holds.append(hold)
        self.plan(hold, number)
        return hold

    def fail(self, error: BaseException, number: int = 1) -> None:
        """Make the `number`-th pass from now raise before it computes anything."""

        def raise_it() -> None:
            raise error

        self.plan(raise_it, number)

    def plan(self, action: Callable[[], None], number: int = 1) -> None:
        """Run `action` at the beginning of the `number`-th pass from now."""
        self._plans[self.num_passes + number] = action

    def forget_plans(self) -> None:
        """What was planned and has not come will not come."""
        self._plans.clear()

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        self.num_passes += 1
        ids = kwargs.get("input_ids")
        if ids is not None:
            self.fed.append(ids[0].tolist())
        plan = self._plans.pop(self.num_passes, None)
        if plan is not None:
            plan()
        return self._forward(*args, **kwargs)


class CachesInMemory:
    """Every cache that a pass or a copy has touched and that still exists, whoever holds it; and the most
    bytes that all of them took together at the end of any pass or copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak_bytes = 0
        self._alive: weakref.WeakSet[KVCache] = weakref.WeakSet()
        for name in ("feed", "copy_prefix"):
            monkeypatch.setattr(KVCache, name, self._watched(getattr(KVCache, name)))

    def __len__(self) -> int:
        """How many exist now."""
        gc.collect()
        return len(self._alive)

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(cache: KVCache, *args: Any) -> Any:
            self._alive.add(cache)
            result = original(cache, *args)
            if isinstance(result, KVCache):
                self._alive.add(result)
            self.peak_bytes = max(self.peak_bytes, sum(each.nbytes for each in list(self._alive)))
            return result

        return watched


@contextmanager
def dictated(*token_ids: int) -> Generator[None]:
    """The next choices are these ids, whatever the model would have liked; after them it chooses again."""
    script: Iterator[int] = iter(token_ids)
    choose: Callable[[Sampler, Tensor], int] = Sampler.sample

    def sample(self: Sampler, logits: Tensor) -> int:
        chosen = choose(self, logits)
        return next(script, chosen)

    Sampler.sample = sample
    try:
        yield
    finally:
        Sampler.sample = choose


@contextmanager
def out_of_memory_in(module: Any, name: str, number: int) -> Generator[None]:
    """Make the `number`-th call of `module.name` from now raise what torch raises when memory is gone."""
    original = getattr(module, name)
    num_calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == number:
            raise torch.OutOfMemoryError("no memory left (asked for by a test)")
        return original(*args, **kwargs)

    setattr(module, name, call)
    try:
        yield
    finally:
        setattr(module, name, original)

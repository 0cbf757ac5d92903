"""Who may come in, and whose chats a request may touch.

Passwords are kept as keyed hashes and compared in constant time. Guessing is slow: the attempts on one
name, and those on all unknown names together, wait in one line each; every failure makes the line's next
failure take longer, and a line that is full refuses at once. So the rate of guesses is bounded per name
and in total, whatever number of connections somebody opens.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import unicodedata
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a web framework is too slow an import for `--help`
    import gradio as gr

LOCAL_OWNER = "local"
"""The owner of every row while there is no login."""

GENERATED_NAME = "keepwarm"

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
MAX_WAITING = 4
"""Attempts that may wait in one line; more are refused without a look at the password."""


class NotSignedIn(Exception):
    """A login is configured, but the request carries none."""


@dataclass(frozen=True, slots=True)
class Account:
    """One person who may sign in. The name is brought to the one spelling that rows are stored under.

    Raises ValueError for an empty part, for control characters, and for the name `local`, which owns the
    chats made without a login.
    """

    name: str
    password: str = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", normal_name(self.name))
        if not self.name or not self.password:
            raise ValueError("needs both a name and a password")
        if any(unicodedata.category(char).startswith("C") for char in self.name):
            raise ValueError("takes names of visible characters only")
        if self.name == LOCAL_OWNER:
            raise ValueError("takes any name but 'local', which owns the chats made without a login")


def generated_account() -> Account:
    """A fresh account with a password of 96 random bits, for a page that others can reach."""
    return Account(GENERATED_NAME, secrets.token_urlsafe(12))


def normal_name(name: str) -> str:
    """The one spelling of a name: composed, compatible forms folded, no white space around it."""
    return unicodedata.normalize("NFKC", name).strip()


@dataclass(slots=True)
class _Line:
    """The attempts on one name, one after the other."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_waiting: int = 0
    num_failures: int = 0

    def pause_s(self) -> float:
        """How long the latest failure has to wait; doubles with each one in a row."""
        return min(FIRST_PAUSE_S * 2.0 ** min(self.num_failures - 1, 32), LONGEST_PAUSE_S)


class Login:
    """Checks names and passwords. `pause` is what a failure waits with; tests pass their own."""

    def __init__(
        self, accounts: Iterable[Account], pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._key = secrets.token_bytes(32)
        self._digests = {account.name: self._digest(account.password) for account in accounts}
        self._nobody = self._digest(secrets.token_urlsafe(32))
        self._lines = {name: _Line() for name in self._digests}
        self._unknown = _Line()
        self._pause = pause

    async def check(self, name: str, password: str) -> bool:
        """True when this password belongs to this name.

        Hand this bound method to Gradio, never the object: Gradio awaits what it recognises as a
        coroutine function, and would take the coroutine of anything else for a yes.
        """
        name = normal_name(name)
        line = self._lines.get(name, self._unknown)
        if line.num_waiting >= MAX_WAITING:
            return False
        line.num_waiting += 1
        try:
            async with line.lock:
                return await self._attempt(line, name, password)
        finally:
            line.num_waiting -= 1

    async def _attempt(self, line: _Line, name: str, password: str) -> bool:
        expected = self._digests.get(name, self._nobody)
        if hmac.compare_digest(expected, self._digest(password)):
            line.num_failures = 0
            return True
        line.num_failures += 1
        await self._pause(line.pause_s())
        return False

    def _digest(self, password: str) -> bytes:
        text = unicodedata.normalize("NFC", password).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, key=self._key).digest()


def owner_of(request: gr.Request) -> str:
    """The owner of whatever this request makes or asks for: its login's name, or `local` without logins.

    Raises NotSignedIn when a login is configured and the request has none, or when that cannot be told.
    """
    if request.username:
        return normal_name(request.username)
    web_request = request.request
    if web_request is None or web_request.app.auth is not None:
        raise NotSignedIn(
            "You are not signed in any more, and nothing was changed; reload the page to sign in."
        )
    return LOCAL_OWNER

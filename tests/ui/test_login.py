"""Accounts, the check of a password, and whose rows a request may touch."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any, cast

import gradio as gr
import pytest

from tests.ui.own_loop import run
from ui.login import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MAX_WAITING,
    Account,
    Login,
    NotSignedIn,
    generated_account,
    owner_of,
)

COMPOSED = "J\u00fcrgen"
DECOMPOSED = "Ju\u0308rgen"


class Pauses:
    """Remembers what a failure would wait with; lets it go on when `release` is set."""

    def __init__(self, *, held: bool = False) -> None:
        self.seconds: list[float] = []
        self.release = asyncio.Event()
        if not held:
            self.release.set()

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        await self.release.wait()


def check(login: Login, *attempts: tuple[str, str]) -> list[bool]:
    async def scene() -> list[bool]:
        return [await login.check(name, password) for name, password in attempts]

    return run(scene())


def test_only_the_right_password_of_the_right_person_lets_in() -> None:
    login = Login([Account("anna", "one:two"), Account("ben", "b")], Pauses())
    attempts = [("anna", "one:two"), ("ben", "b"), ("anna", "b"), ("ben", "one:two"), ("carl", "b"), ("", "")]
    assert check(login, *attempts) == [True, True, False, False, False, False]


def test_names_and_passwords_match_however_a_keyboard_composes_them() -> None:
    login = Login([Account(DECOMPOSED, f"geheim {COMPOSED}")], Pauses())
    attempts = [(f" {COMPOSED} ", f"geheim {DECOMPOSED}"), ("JÜRGEN", f"geheim {COMPOSED}")]
    assert check(login, *attempts) == [True, False]


def test_text_that_is_no_valid_unicode_is_just_wrong() -> None:
    login = Login([Account("anna", "x")], Pauses())
    assert check(login, ("anna", "\ud800"), ("\ud800", "x")) == [False, False]


def test_gradio_awaits_the_check_because_it_sees_a_coroutine_function() -> None:
    """Otherwise it would take the coroutine object for a yes, and let everybody in."""
    assert inspect.iscoroutinefunction(Login([Account("anna", "x")]).check)


def test_each_failure_in_a_row_waits_longer_up_to_a_limit_and_a_success_forgives() -> None:
    pauses = Pauses()
    login = Login([Account("anna", "x")], pauses)
    check(login, *[("anna", "no")] * 7)
    assert pauses.seconds == [FIRST_PAUSE_S, 1.0, 2.0, 4.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    check(login, ("anna", "x"), ("anna", "no"))
    assert pauses.seconds[7:] == [FIRST_PAUSE_S]


def test_guessing_many_unknown_names_is_slowed_down_like_guessing_one() -> None:
    pauses = Pauses()
    check(Login([Account("anna", "x")], pauses), *[(f"user{number}", "x") for number in range(5)])
    assert pauses.seconds == [FIRST_PAUSE_S, 1.0, 2.0, 4.0, LONGEST_PAUSE_S]


def test_attempts_in_parallel_are_looked_at_one_by_one_and_a_full_line_refuses_unseen() -> None:
    async def scene() -> None:
        pauses = Pauses(held=True)
        login = Login([Account("anna", "x"), Account("ben", "b")], pauses)
        guesses = [asyncio.create_task(login.check("anna", "no")) for _ in range(MAX_WAITING)]
        await asyncio.sleep(0)
        assert len(pauses.seconds) == 1
        assert not await login.check("anna", "x"), "a full line looks at nothing"
        assert await login.check("ben", "b"), "one person's line does not hold up another"
        pauses.release.set()
        assert await asyncio.gather(*guesses) == [False] * MAX_WAITING
        assert await login.check("anna", "x"), "the line is empty again"

    run(scene())


def test_a_visitor_who_gives_up_leaves_the_line() -> None:
    async def scene() -> None:
        pauses = Pauses(held=True)
        login = Login([Account("anna", "x")], pauses)
        for _ in range(2 * MAX_WAITING):
            attempt = asyncio.create_task(login.check("anna", "no"))
            await asyncio.sleep(0)
            attempt.cancel()
            await asyncio.gather(attempt, return_exceptions=True)
        assert await login.check("anna", "x")

    run(scene())


@pytest.mark.parametrize(
    ("name", "password"),
    [
        ("", "x"),
        ("anna", ""),
        ("  ", "x"),
        ("local", "x"),
        ("ｌｏｃａｌ", "x"),
        ("a\nb", "x"),
        ("a\u200bb", "x"),
    ],
)
def test_an_account_needs_a_visible_name_of_its_own_and_a_password(name: str, password: str) -> None:
    with pytest.raises(ValueError, match=r"needs|takes"):
        Account(name, password)


def test_a_password_does_not_show_when_an_account_is_printed() -> None:
    assert "hunter2" not in repr(Account("anna", "hunter2"))


def test_made_up_passwords_are_long_and_never_the_same() -> None:
    accounts = [generated_account() for _ in range(20)]
    assert {account.name for account in accounts} == {"keepwarm"}
    assert len({account.password for account in accounts}) == 20
    assert min(len(account.password) for account in accounts) >= 16


def request(username: str | None, *, auth: object = None, known: bool = True) -> gr.Request:
    """A request as Gradio hands it to a handler; `auth` is what the application was started with."""
    web_request = SimpleNamespace(app=SimpleNamespace(auth=auth)) if known else None
    return gr.Request(cast("Any", web_request), username=username)


def test_without_logins_everything_belongs_to_local() -> None:
    assert owner_of(request(None)) == "local"


def test_with_logins_everything_belongs_to_the_name_in_its_one_spelling() -> None:
    assert owner_of(request(DECOMPOSED, auth=print)) == COMPOSED


@pytest.mark.parametrize("nobody", [None, ""])
def test_with_logins_nobody_is_not_local(nobody: str | None) -> None:
    with pytest.raises(NotSignedIn, match="sign in"):
        owner_of(request(nobody, auth=print))


def test_a_request_that_cannot_be_told_is_not_local() -> None:
    with pytest.raises(NotSignedIn):
        owner_of(request(None, known=False))

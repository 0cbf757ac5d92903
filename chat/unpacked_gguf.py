"""GGUF files as folders: unpacked once, kept in the data folder, loaded from there ever after.

transformers unpacks a GGUF file's weights at every load, and its tokenizer too, which takes many times as
long as reading them. The folder holds exactly what that load gave, in the dtype that was asked for, so a
model is the same model from either: same identity, same fingerprint, same logits. What cannot be kept, on a
full disk say, is unpacked again at the next start.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from chat.checkpoint import Checkpoint
from chat.made_folder import is_made, put_in_place, work_folder

log = logging.getLogger(__name__)

SPARE_BYTES = 2**28
"""Disk space left free beside what is kept."""

_WORK_PREFIX = ".unpacking-"
_SHOWN_DIGITS = 12


def kept_folder(checkpoint: Checkpoint, identity: str, dtype: torch.dtype, models_dir: Path) -> Path:
    """Where this file is kept in this dtype; `identity` is the one that `fetch_weights` gave."""
    digest = identity.rpartition(":")[2][:_SHOWN_DIGITS]
    return models_dir / f"{checkpoint.name}-{digest}-{_short(dtype)}"


def is_kept(folder: Path, identity: str, dtype: torch.dtype) -> bool:
    """Whether the folder holds all of this file."""
    return is_made(folder, _source(identity, dtype))


def keep(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, identity: str) -> bool:
    """Save what was unpacked. False, with a line in the log, when the disk does not take it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        needed, free = _nbytes(model) + SPARE_BYTES, shutil.disk_usage(folder.parent).free
        if free < needed:
            log.warning(
                "%s is unpacked at every start, because keeping it takes %s MB and only %s MB are free.",
                folder.name,
                needed // 2**20,
                free // 2**20,
            )
            return False
        with work_folder(folder.parent, _WORK_PREFIX) as work:
            made = work / "made"
            cast("Any", model).save_pretrained(made)
            cast("Any", tokenizer).save_pretrained(made)
            put_in_place(made, folder, _source(identity, model.dtype))
    except OSError as error:
        log.warning("%s is unpacked at every start, because it could not be kept: %s", folder.name, error)
        return False
    return True


def _source(identity: str, dtype: torch.dtype) -> Mapping[str, str]:
    return {"gguf": identity, "dtype": _short(dtype)}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _nbytes(model: PreTrainedModel) -> int:
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())

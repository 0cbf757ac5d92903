"""The forms in which a model's weights can be in memory: as they were saved, or quantized by bitsandbytes.

Quantized are the linear layers of the blocks; embeddings and the output layer, which are often one and the
same tensor, stay in the model's dtype, and so do all activations and caches. bitsandbytes runs on CUDA
devices and on CPUs. On a CPU int8 is smaller but not faster; nf4 is faster too, where the processor has
AVX-512 with bfloat16 (`python -m tests.bench weights`).
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, cast

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel

from chat.errors import ModelUnusable
from chat.settings import WeightForm

PACKAGE = "bitsandbytes"

BYTES_PER_WEIGHT: dict[WeightForm, float] = {"int8": 1.0, "nf4": 0.5625}
"""Of a quantized weight, scales included: nf4 has one float32 scale for every 64."""

_LIBRARY_NAMES = {"llm_int8": "int8"}
_FOREIGN_CODE = "kernels"
_CHATTY = ("bitsandbytes.autograd._functions", "bitsandbytes.backends.cpu.ops")


def quantization(form: WeightForm, dtype: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` must be told for this form; nothing for full weights. `dtype` is what the model
    computes in. Raises ModelUnusable when bitsandbytes does not load."""
    if form == "full":
        return {}
    _import_library(form)
    if form == "int8":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    }


def form_in_words(model: PreTrainedModel) -> str:
    """The form of a model's quantized weights and the library that computes with them; empty where
    bitsandbytes has no part in it."""
    config: object = getattr(model.config, "quantization_config", None)
    if not isinstance(config, BitsAndBytesConfig):
        return ""
    method = str(config.quantization_method())
    return f"{_LIBRARY_NAMES.get(method, method)}, {PACKAGE} {version(PACKAGE)}"


@torch.inference_mode()
def try_out(model: PreTrainedModel) -> None:
    """One pass over one token: bitsandbytes packs its weights for this processor at the first pass, and only
    then complains about shapes that it cannot pack."""
    cast("Any", model)(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)


def _import_library(form: WeightForm) -> None:
    for name in _CHATTY:  # a line for every layer and pass, and advice to install what fetches code
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with _without(_FOREIGN_CODE):
            importlib.import_module(PACKAGE)
    except Exception as error:  # a library that is there may still not load: built for another torch, say
        raise ModelUnusable(
            f"--weights {form} cannot be had because {PACKAGE} does not load ({error}); run `pip install -r"
            " requirements.txt`, or leave --weights out."
        ) from error


@contextmanager
def _without(module: str) -> Generator[None]:
    """Hide a package: where `kernels` is installed, importing bitsandbytes would have it fetch program code
    from the hub and run it."""
    if PACKAGE in sys.modules:
        yield
        return
    before = sys.modules.get(module)
    sys.modules[module] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        if before is None:
            del sys.modules[module]
        else:
            sys.modules[module] = before

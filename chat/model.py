"""A loaded model: what everything that generates works with, and how it is loaded and described.

A model is usable when it can chat: its template is tried on a sample before the weights are read, and its
tokenizer must have a fast backend. No code that came with a model is ever run. `LoadedModel.fingerprint`
says what a cache made by this model depends on; a cache with another fingerprint is never used.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from chat.checkpoint import Checkpoint, fetch_weights, find_checkpoint, first_line, read_json
from chat.errors import ModelError, ModelUnusable
from chat.made_folder import is_disk_full
from chat.model_facts import (
    check_template,
    check_tokenizer,
    end_token_ids,
    fingerprint,
    kv_bytes_per_token,
    num_context_tokens,
    text_config,
)
from chat.placement import check_room, forget_spilled, placement_of, spread_from, tell_spread
from chat.settings import DeviceName, DtypeName, ModelSettings
from chat.unpacked_gguf import is_kept, keep, kept_folder
from chat.weight_forms import quantization, try_out

GROUPS_SWITCH = "TRANSFORMERS_SDPA_FORCE_GQA"
"""The library's variable, which it reads at every pass (5.24)."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model in evaluation mode and its tokenizer.

    `kv_bytes_per_token`: what a dense cache takes per token; an upper bound for sliding-window models.
    `eos_token_ids`: any of them ends a reply. `device`: where input ids go. `fingerprint`: see the module.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype
    num_context_tokens: int
    eos_token_ids: frozenset[int]
    kv_bytes_per_token: int
    fingerprint: Mapping[str, str]


def load_model(settings: ModelSettings, models_dir: Path) -> LoadedModel:
    """Find, check and load. Progress bars may appear on the terminal; nothing is asked there.

    Raises ModelNotFound, ModelUnusable or DownloadFailed.
    """
    device = choose_device(settings.device)
    plan = _Plan(device, choose_dtype(settings.dtype, device), _with_device(settings, device), models_dir)
    attend_in_groups(device)
    checkpoint = find_checkpoint(settings, models_dir)
    if checkpoint.gguf_file is not None:
        return _load_gguf(checkpoint, plan)
    return _load(checkpoint, plan)


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a checkpoint is to be loaded; `settings` name the device that was chosen."""

    device: torch.device
    dtype: torch.dtype
    settings: ModelSettings
    models_dir: Path


def _with_device(settings: ModelSettings, device: torch.device) -> ModelSettings:
    """What `auto` came to may not go with the other settings. Raises ModelUnusable."""
    try:
        return replace(settings, device=cast("DeviceName", device.type))
    except ValueError as error:
        raise ModelUnusable(str(error)) from error


def _load(checkpoint: Checkpoint, plan: _Plan, identity: str = "") -> LoadedModel:
    """`identity`: of the files that the checkpoint was made from; its own when empty."""
    config = _load_config(checkpoint)
    tokenizer = _load_tokenizer(checkpoint)
    check_template(checkpoint.name, tokenizer)
    _check_room(checkpoint, config, plan)
    identity = identity or fetch_weights(checkpoint)
    model = _load_weights(checkpoint, config, plan)
    return describe(checkpoint.name, model, tokenizer, identity)


def _load_gguf(checkpoint: Checkpoint, plan: _Plan) -> LoadedModel:
    """From the folder that the file was unpacked into, which is made first if it is not there yet."""
    identity = fetch_weights(checkpoint)
    folder = kept_folder(checkpoint, identity, plan.dtype, plan.models_dir)
    if not is_kept(folder, identity, plan.dtype):
        plainly = replace(plan.settings, weights="full", device_map="single")
        unpacked = _load(checkpoint, replace(plan, device=torch.device("cpu"), settings=plainly), identity)
        if not keep(folder, unpacked.model, unpacked.tokenizer, identity):
            model = cast("Any", unpacked.model).to(plan.device)
            return describe(checkpoint.name, model, unpacked.tokenizer, identity)
        del unpacked  # else the weights would be in memory twice
    return _load(replace(checkpoint, folder=folder, gguf_file=None), plan, identity)


def attend_in_groups(device: torch.device) -> None:
    """On the CPU, let attention read each shared key and value once, instead of copying the whole cache for
    every query head that shares it: short reads behind a long history take half the attention time (measured
    in float32, 18 tokens behind 4,100). On CUDA the library's own choice is right; there a mask rules it out.
    """
    os.environ[GROUPS_SWITCH] = "1" if device.type == "cpu" else "0"


def describe(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str
) -> LoadedModel:
    """Derive everything from a model and its tokenizer. `source` must differ for different weights."""
    config = text_config(model)
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        device=placement_of(model).inputs,
        dtype=model.dtype,
        num_context_tokens=num_context_tokens(config),
        eos_token_ids=end_token_ids(model, tokenizer),
        kv_bytes_per_token=kv_bytes_per_token(config, model.dtype),
        fingerprint=fingerprint(model, tokenizer, source),
    )


def choose_device(name: DeviceName) -> torch.device:
    """`auto` takes CUDA, else Apple's GPU, else the CPU. Raises ModelUnusable when a named one is absent."""
    usable = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(device for device, is_usable in usable.items() if is_usable))
    if not usable[name]:
        raise ModelUnusable(
            f"torch finds no {name} device on this machine; start with --device cpu, or install the torch"
            f" build for {name}."
        )
    return torch.device(name)


def choose_dtype(name: DtypeName, device: torch.device) -> torch.dtype:
    """`auto` takes what the device computes fastest without surprises: on a CPU that is float32."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    return torch.float16 if device.type == "mps" else torch.float32


def _load_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Decided by what config.json says, before the library gets to interpret it."""
    if checkpoint.gguf_file is None:
        stated = read_json(checkpoint, "config.json")
        if stated.get("model_type") not in CONFIG_MAPPING:
            raise ModelUnusable(_why_unknown(checkpoint.name, stated))
    with _failures_as_sentences(checkpoint.name, _guess(checkpoint)):
        config: PreTrainedConfig = cast("Any", AutoConfig).from_pretrained(
            checkpoint.folder, **_from(checkpoint)
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelUnusable(
            f"{checkpoint.name} ({config.model_type}) is not a model that writes text from text alone; choose"
            " another one with --model."
        )
    return config


def _why_unknown(name: str, stated: Mapping[str, Any]) -> str:
    if "auto_map" in stated:
        return (
            f"{name} needs program code that comes with the model, which Keepwarm never runs; choose another"
            " one with --model."
        )
    return (
        f"{name} is of a kind ({stated.get('model_type')}) that transformers {transformers.__version__} does"
        " not know; choose another one with --model."
    )


def _load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    guess = "its files are missing or of a kind that needs other packages"
    with _failures_as_sentences(f"The tokenizer of {checkpoint.name}", guess):
        tokenizer: object = cast("Any", AutoTokenizer).from_pretrained(checkpoint.folder, **_from(checkpoint))
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelUnusable(
            f"{checkpoint.name} has a tokenizer without a fast form (tokenizer.json), which streaming needs;"
            " choose another model with --model."
        )
    check_tokenizer(checkpoint.name, tokenizer)
    return tokenizer


def _load_weights(checkpoint: Checkpoint, config: PreTrainedConfig, plan: _Plan) -> PreTrainedModel:
    """Straight to where they belong; a weight file is mapped, not read twice into memory."""
    if checkpoint.gguf_file is not None:
        form: dict[str, Any] = {"quantization_config": GgufConfig(dequantize=True)}
    else:
        form = {"use_safetensors": True, "config": config}
    quantized = plan.settings.weights != "full"
    if quantized:
        form.update(_quantization(checkpoint, config, plan))
    with _failures_as_sentences(checkpoint.name, _guess(checkpoint)):
        places = _places(config, plan)
        model, report = cast("Any", AutoModelForCausalLM).from_pretrained(
            checkpoint.folder,
            dtype=plan.dtype,
            output_loading_info=True,
            **places,
            **form,
            **_from(checkpoint),
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelUnusable(
            f"{checkpoint.name} is incomplete: its files lack weights (in all {len(missing)}, such as"
            f" {missing[0]}); fetch the model again or choose another one with --model."
        )
    model = cast("PreTrainedModel", model.eval().requires_grad_(False))
    tell_spread(checkpoint.name, model)
    if quantized:
        what = f"{checkpoint.name} with --weights {plan.settings.weights}"
        with _failures_as_sentences(what, "bitsandbytes cannot compute with its shapes here"):
            try_out(model)
    return model


def _quantization(checkpoint: Checkpoint, config: PreTrainedConfig, plan: _Plan) -> dict[str, Any]:
    if _is_quantized(config):
        raise ModelUnusable(
            f"{checkpoint.name} is quantized already, so --weights {plan.settings.weights} finds nothing to"
            " quantize; leave it out, or choose the model in full precision with --model."
        )
    return quantization(plan.settings.weights, plan.dtype)


def _is_quantized(config: PreTrainedConfig) -> bool:
    return getattr(config, "quantization_config", None) is not None


def _check_room(checkpoint: Checkpoint, config: PreTrainedConfig, plan: _Plan) -> None:
    """Before weights are fetched, let alone read. What a checkpoint that is quantized already takes is for
    its own library to say."""
    if plan.settings.device_map == "auto" or _is_quantized(config):
        return
    with _failures_as_sentences(checkpoint.name, _guess(checkpoint)):
        check_room(checkpoint.name, config, plan.dtype, plan.settings.weights, plan.device)


def _places(config: PreTrainedConfig, plan: _Plan) -> dict[str, Any]:
    forget_spilled(plan.models_dir)
    if plan.settings.device_map == "auto":
        return spread_from(plan.device, config, plan.dtype, plan.models_dir)
    return {"device_map": {"": plan.device}}


def _from(checkpoint: Checkpoint) -> dict[str, Any]:
    """What every loading call says: these files only, nothing fetched, no foreign code, no question asked."""
    where = {} if checkpoint.gguf_file is None else {"gguf_file": checkpoint.gguf_file}
    return {"local_files_only": True, "trust_remote_code": False, **where}


def _guess(checkpoint: Checkpoint) -> str:
    if checkpoint.gguf_file is None:
        return "its files do not go together"
    return "the file is damaged, or of a kind that transformers does not read"


@contextmanager
def _failures_as_sentences(what: str, guess: str) -> Generator[None]:
    """The one place where the libraries' errors while loading become ours. `guess`: the usual cause."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        said = str(error)
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in said:
            reason = "it does not fit into memory, where --weights nf4 or --device-map auto may help"
        elif is_disk_full(error):
            reason = "the disk is full"
        elif "dispatched on the CPU or the disk" in said:
            reason = "it does not fit onto the GPUs, and quantized weights lie nowhere else"
        elif "trust_remote_code" in said:
            reason = "it needs program code that comes with the model, which Keepwarm never runs"
        else:
            reason = f"{guess}: {first_line(error) or type(error).__name__}"
        raise ModelUnusable(
            f"{what} cannot be loaded ({reason}); choose another model with --model."
        ) from error

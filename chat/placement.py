"""Where the parts of a model lie: whole on one device, or spread over several GPUs, memory and disk.

A spread model is kept together by accelerate: each layer computes on the device of its weights, weights in
memory or on disk are brought to the first device for as long as they are needed, and every cache layer gets
its rows where its own attention runs. `Placement` tells where input ids go and where each layer's rows live,
before the model has made a single pass.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from chat.errors import ModelUnusable
from chat.memory_forecast import free_bytes
from chat.model_facts import kv_bytes_per_token, num_context_tokens
from chat.settings import WeightForm
from chat.weight_forms import BYTES_PER_WEIGHT

CHAT_TOKENS = 4096
"""Tokens of caches for which a spread model leaves room on every device."""
KEPT_FREE = 0.1
"""Of what is free, for activations and for what else the machine does."""

_SPILLED = "spilled"
_IN_WORDS = {"cpu": "in memory", "disk": "on the disk"}

log = logging.getLogger(__name__)
logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # `tell_spread` says it in plain words


@dataclass(frozen=True, slots=True)
class Placement:
    """`inputs`: where input ids go and logits come from. `layers`: by number, those elsewhere."""

    inputs: torch.device
    layers: Mapping[int, torch.device] = field(default_factory=dict[int, torch.device])

    def of_layer(self, index: int) -> torch.device:
        """Where the cache layer of this number has its rows."""
        return self.layers.get(index, self.inputs)


def placement_of(model: PreTrainedModel) -> Placement:
    """Of a model as it was loaded."""
    if not _has_hook(model):
        return Placement(model.device)
    inputs = _execution_device(model)
    layers: dict[int, torch.device] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            layers[index] = _execution_device(module)
    return Placement(inputs, layers)


def spread_from(
    device: torch.device, config: PreTrainedConfig, dtype: torch.dtype, models_dir: Path
) -> dict[str, Any]:
    """What `from_pretrained` must be told to fill one device after the other: all GPUs when `device` is one,
    then memory, then the disk. A model that fits the first one comes to lie there whole.

    Weights that stay on disk are read from the model's own files; the few kinds of model whose weights are
    rearranged while loading write them into a folder in `models_dir` (see `forget_spilled`).
    """
    text = cast("PreTrainedConfig", cast("Any", config).get_text_config(decoder=True))
    for_chats = kv_bytes_per_token(text, dtype) * min(num_context_tokens(text), CHAT_TOKENS)
    return {
        "device_map": "sequential",
        "max_memory": free_memory(device, for_chats),
        "offload_folder": str(models_dir / _SPILLED),
    }


def forget_spilled(models_dir: Path) -> None:
    """Remove the weights that an earlier start wrote to the disk: nothing but that start could read them."""
    shutil.rmtree(models_dir / _SPILLED, ignore_errors=True)


def tell_spread(name: str, model: PreTrainedModel) -> None:
    """Log where the parts of a spread model lie: people should know what makes it slow."""
    if not _has_hook(model):
        return
    places = dict.fromkeys(cast("Mapping[str, object]", cast("Any", model).hf_device_map).values())
    words = [_IN_WORDS.get(str(place), f"on GPU {place}") for place in places]
    log.warning("%s does not fit into one place: its parts lie %s.", name, " and ".join(words))


def free_memory(device: torch.device, for_chats: int) -> dict[int | str, int]:
    """Bytes for weights on each device by accelerate's name, the one to fill first in front; `for_chats`
    bytes are left on every device that computes."""
    in_memory = int(psutil.virtual_memory().available * (1 - KEPT_FREE))
    if device.type != "cuda":
        return {"cpu": max(0, in_memory - for_chats)}
    numbers = range(torch.cuda.device_count())
    free = {number: free_bytes(torch.device("cuda", number)) for number in numbers}
    on_gpus = {number: max(0, int(size * (1 - KEPT_FREE)) - for_chats) for number, size in free.items()}
    return {**on_gpus, "cpu": in_memory}


def check_room(
    name: str, config: PreTrainedConfig, dtype: torch.dtype, form: WeightForm, device: torch.device
) -> None:
    """Before anything is allocated. Raises ModelUnusable when the weights alone would not fit `device`."""
    needed, free = weight_bytes(config, dtype, form), free_bytes(device)
    if needed <= free:
        return
    smaller = "choose a smaller model with --model"
    if form == "full":
        smaller = f"start with --weights nf4 or --device-map auto, or {smaller}"
    raise ModelUnusable(
        f"{name} does not fit into memory: its weights take {needed / 2**30:.1f} GB and"
        f" {free / 2**30:.1f} GB are free on {device.type}; {smaller}."
    )


def weight_bytes(config: PreTrainedConfig, dtype: torch.dtype, form: WeightForm) -> int:
    """What the weights take in this form, from a model that is built without memory."""
    with torch.device("meta"):
        model: Any = cast("Any", AutoModelForCausalLM).from_config(config, dtype=dtype)
    plain: int = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    if form == "full":
        return plain
    output = model.get_output_embeddings()
    linear: list[nn.Linear] = [m for m in model.modules() if type(m) is nn.Linear and m is not output]
    saved = sum(layer.weight.numel() for layer in linear) * (dtype.itemsize - BYTES_PER_WEIGHT[form])
    return plain - int(saved)


def _has_hook(module: nn.Module) -> bool:
    return hasattr(module, "_hf_hook")


def _execution_device(module: nn.Module) -> torch.device:
    """Where a module computes: with its weights, or where the hook that fetches them brings them."""
    for part in module.modules():
        device: Any = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return next(module.parameters()).device

"""Weights quantized by bitsandbytes while they are loaded: on the CPU here, on a GPU where there is one."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Generator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chat.model
from chat import weight_forms
from chat.errors import ModelUnusable
from chat.model import LoadedModel, load_model
from chat.placement import weight_bytes
from chat.settings import DeviceName, ModelSettings, WeightForm
from chat.stats import TurnStats
from chat.weight_forms import form_in_words, quantization
from tests.bench.weights import nbytes
from tests.house import GREEDY, House
from tests.tiny_models import tiny_llama

FORMS: tuple[WeightForm, ...] = ("int8", "nf4")
DISK = 10**9

Load = Callable[..., LoadedModel]


@pytest.fixture(scope="module", name="load")
def _load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """One saved model, whose output layer is its embedding, loaded once in each form that is asked for."""
    folder = tmp_path_factory.mktemp("models") / "tiny-bird"
    source = tiny_llama(tie_word_embeddings=True)
    source.model.save_pretrained(folder)
    source.tokenizer.save_pretrained(folder)

    @lru_cache
    def load(weights: WeightForm = "full", device: DeviceName = "cpu", dtype: Any = "float32") -> LoadedModel:
        settings = ModelSettings(name=str(folder), device=device, dtype=dtype, weights=weights)
        return load_model(settings, folder.parent)

    return load


@pytest.fixture
def one_thread() -> Generator[None]:
    """Several threads wait for each other at every step of this work, for long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stats(view: Any) -> TurnStats:
    return TurnStats.from_json(view.messages[-1].stats)


def chat_and_edit(house: House, *, restarting: bool) -> list[tuple[int, ...]]:
    """The ids of all messages in the end."""
    chat = house.say("What is a dog?").conversation.id
    for text in ("And the other one?", "You and the dog."):
        if restarting:
            house.restart()
        view = house.say(text, chat)
        assert view.messages[-1].error is None, view.messages[-1].error
        assert stats(view).num_read_again == 0
    view = house.edit(view.messages[2].id, "And a third?")
    house.regenerate(view.messages[-1].id)
    house.check_invariant(chat)
    if restarting:
        house.restart()
    view = house.say("The last one.", chat)
    assert stats(view).num_read_again == 0
    return [message.token_ids for message in view.messages]


@pytest.mark.parametrize("form", FORMS)
def test_linear_layers_are_quantized_and_embedding_and_output_are_not(load: Load, form: WeightForm) -> None:
    loaded: Any = load(form)
    layer = loaded.model.model.layers[1]
    assert layer.mlp.up_proj.weight.dtype in (torch.int8, torch.uint8)
    assert layer.self_attn.q_proj.weight.dtype in (torch.int8, torch.uint8)
    assert type(loaded.model.lm_head) is nn.Linear
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert loaded.model.lm_head.weight.dtype == torch.float32 == loaded.dtype
    assert (loaded.device.type, loaded.kv_bytes_per_token) == ("cpu", load().kv_bytes_per_token)


@pytest.mark.parametrize("form", FORMS)
def test_the_bytes_foretold_are_those_that_the_weights_take(load: Load, form: WeightForm) -> None:
    foretold = weight_bytes(load().model.config, torch.float32, form)
    assert foretold == pytest.approx(nbytes(load(form).model), rel=0.03)
    assert foretold < nbytes(load().model) * 0.6
    assert weight_bytes(load().model.config, torch.float32, "full") == pytest.approx(
        nbytes(load().model), rel=0.001
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_dtype_goes_with_quantized_weights(load: Load, form: WeightForm, dtype: str) -> None:
    loaded = load(form, "cpu", dtype)
    assert str(loaded.dtype) == f"torch.{dtype}"
    with torch.inference_mode():
        assert loaded.model(input_ids=torch.arange(8)[None]).logits.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_a_chat_on_quantized_weights_resumes_as_if_there_had_been_no_restart(
    load: Load, form: WeightForm, tmp_path: Path
) -> None:
    """Laws 1 and 3."""
    told: list[list[tuple[int, ...]]] = []
    for restarting in (False, True):
        folder = tmp_path / str(restarting)
        folder.mkdir()
        with House(folder, load(form), max_disk_bytes=DISK) as house:
            told.append(chat_and_edit(house, restarting=restarting))
    assert told[0] == told[1]


@pytest.mark.parametrize(("before", "after"), [("nf4", "full"), ("full", "nf4"), ("nf4", "int8")])
def test_rows_made_with_weights_of_one_form_are_never_used_with_another(
    load: Load, before: WeightForm, after: WeightForm, tmp_path: Path
) -> None:
    """Law 4."""
    with House(tmp_path, load(before), max_disk_bytes=DISK) as house:
        chat = house.say("What is a dog?").conversation.id
        house.loaded = load(after)
        house.restart()
        view = house.say("And the other one?", chat)
        assert stats(view).num_disk_tokens == 0
        assert stats(view).reasons["fingerprint"] > 0
        assert stats(view).changed_setting.startswith("weights was ")
        house.loaded = load(before)
        house.restart()
        edited = house.edit(view.messages[2].id, "And a third?")
        assert stats(edited).num_disk_tokens > 0


def test_the_fingerprint_tells_the_forms_apart_and_full_weights_add_nothing_to_it(load: Load) -> None:
    full = load().fingerprint
    assert "weights" not in full
    for form in FORMS:
        fields = dict(load(form).fingerprint)
        assert fields.pop("weights").startswith(f"{form}, bitsandbytes ")
        assert fields == full


def test_nothing_is_logged_while_quantized_weights_work(
    load: Load, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING), torch.inference_mode():
        load("int8").model(input_ids=torch.arange(8)[None])
    assert caplog.records == []
    assert capfd.readouterr().out == ""


def test_weights_that_are_quantized_already_are_not_quantized_again(load: Load, tmp_path: Path) -> None:
    """They load as they are, by what their own config says."""
    folder = tmp_path / "packed-bird"
    load("nf4").model.save_pretrained(folder)
    load("nf4").tokenizer.save_pretrained(folder)
    with pytest.raises(ModelUnusable, match=r"packed-bird is quantized already, so --weights int8 .*\.$"):
        load_model(ModelSettings(name=str(folder), device="cpu", weights="int8"), tmp_path)
    loaded = load_model(ModelSettings(name=str(folder), device="cpu"), tmp_path)
    assert form_in_words(loaded.model).startswith("nf4")
    assert loaded.fingerprint["model"] != load().fingerprint["model"]


def test_shapes_that_the_library_cannot_pack_are_said(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_model: object) -> None:
        raise AssertionError("N must be divisible by block_n")

    monkeypatch.setattr(chat.model, "try_out", refuse)
    with pytest.raises(ModelUnusable) as refused:
        load("nf4", "cpu", "auto")
    assert "with --weights nf4 cannot be loaded (bitsandbytes cannot compute" in str(refused.value)
    assert "N must be divisible by block_n" in str(refused.value)


@pytest.mark.parametrize(
    ("device", "settings", "words"),
    [
        ("mps", {"weights": "nf4"}, "--weights nf4 cannot go with --device mps"),
        ("mps", {"device_map": "auto"}, "--device-map auto cannot go with --device mps"),
        ("cpu", {"weights": "int8", "device_map": "auto"}, "cannot go with --device-map auto on the CPU"),
    ],
)
def test_what_does_not_go_with_the_device_that_auto_found_is_said(
    device: str, settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat.model, "choose_device", lambda _: torch.device(device))
    with pytest.raises(ModelUnusable, match=words):
        load_model(ModelSettings("no/model", **settings), Path("nowhere"))


def test_a_library_that_does_not_load_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_forms, "PACKAGE", "no_such_package")
    with pytest.raises(ModelUnusable, match=r"--weights nf4 cannot be had .* leave --weights out\.$"):
        quantization("nf4", torch.float32)


def test_importing_the_library_fetches_no_code_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 7: with the package `kernels` installed, bitsandbytes downloads binaries and runs them."""
    (tmp_path / "kernels.py").write_text("")
    (tmp_path / "stand_in.py").write_text(
        "try:\n    import kernels\nexcept ImportError:\n    kernels = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(weight_forms, "PACKAGE", "stand_in")
    quantization("nf4", torch.float32)
    stand_in: Any = sys.modules.pop("stand_in")
    assert stand_in.kernels is None
    assert "kernels" not in sys.modules


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_default_model_still_knows_its_capital_with_nf4_weights(
    default_model_folder: Path, tmp_path: Path
) -> None:
    settings = ModelSettings(device="cpu", dtype="float32", offline=True, weights="nf4")
    loaded = load_model(settings, default_model_folder.parent)
    assert nbytes(loaded.model) < weight_bytes(loaded.model.config, torch.float32, "full") * 0.4
    with House(tmp_path, loaded) as house:
        view = house.say("What is the capital of France?", sampling=GREEDY)
        assert "Paris" in view.messages[-1].text
        house.check_invariant(view.conversation.id)


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
def test_quantized_weights_on_a_gpu_chat_and_resume(load: Load, form: WeightForm, tmp_path: Path) -> None:
    loaded = load(form, "cuda", "auto")
    assert loaded.device.type == "cuda"
    told: list[list[tuple[int, ...]]] = []
    for restarting in (False, True):
        (tmp_path / str(restarting)).mkdir()
        with House(tmp_path / str(restarting), loaded, max_disk_bytes=DISK) as house:
            told.append(chat_and_edit(house, restarting=restarting))
    assert told[0] == told[1]


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
def test_quantized_weights_take_less_of_a_gpu_at_their_peak(
    default_model_folder: Path, form: WeightForm
) -> None:
    def peak(weights: WeightForm) -> int:
        gc.collect()  # the model before this one
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        settings = ModelSettings(device="cuda", offline=True, weights=weights)
        loaded = load_model(settings, default_model_folder.parent)
        with torch.inference_mode():
            loaded.model(input_ids=torch.arange(64, device="cuda")[None])
        return torch.cuda.max_memory_allocated() - before

    peak(form)  # what libraries allocate once for themselves
    assert peak(form) < peak("full")

"""Models spread over memory and disk, on the CPU; of several devices only what goes where."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch

import chat.kv_cache
from chat import placement
from chat.boundary_states import _InMemory as InMemory  # pyright: ignore[reportPrivateUsage]
from chat.errors import ModelUnusable
from chat.kv_cache import KVCache
from chat.model import LoadedModel, load_model
from chat.model_facts import text_config
from chat.placement import Placement, check_room, free_memory, placement_of, weight_bytes
from chat.settings import CacheSettings, ModelSettings
from chat.stats import TurnStats
from tests.house import House
from tests.tiny_models import TINY_KINDS, tiny_model

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")
DISK = 10**9
STATE_KINDS = ("tiny mistral", "mistral", "tiny lfm2", "lfm2")


def saved(kind: str, folder: Path) -> LoadedModel:
    source = tiny_model(kind)
    source.model.save_pretrained(folder / kind)
    source.tokenizer.save_pretrained(folder / kind)
    return source


def spread(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, share: float = 0.0) -> LoadedModel:
    """The saved model with room in memory for a share of its weights."""
    config = text_config(tiny_model(kind).model)
    room = int(weight_bytes(config, torch.float32, "full") * share)
    monkeypatch.setattr(placement, "free_memory", lambda *_: {"cpu": room})
    settings = ModelSettings(name=str(folder / kind), device="cpu", device_map="auto")
    return load_model(settings, folder / "data")


def places(loaded: LoadedModel) -> set[object]:
    spread_over: Mapping[str, object] = getattr(loaded.model, "hf_device_map", {"": "cpu"})
    return set(spread_over.values())


def talk(house: House, *, restarting: bool) -> list[tuple[int, ...]]:
    """The ids of all messages in the end."""
    chat = house.say("What is a dog?").conversation.id
    view = house.say("And the other one?", chat)
    house.check(chat)
    view = house.edit(view.messages[2].id, "And a third?")
    if restarting:
        house.restart()
    view = house.regenerate(view.messages[-1].id)
    view = house.say("The last one.", chat)
    cut = 8 if house.loaded.name in STATE_KINDS else 0  # a state goes back to where one was kept
    assert TurnStats.from_json(cast("Any", view.messages[-1].stats)).num_read_again <= cut
    house.check(chat)
    return [message.token_ids for message in view.messages]


@pytest.mark.parametrize(("kind", "share"), [("llama", 0.0), ("mistral", 0.8), ("lfm2", 0.8)])
def test_a_model_on_the_disk_chats_edits_and_resumes_with_the_tokens_of_one_in_memory(
    kind: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Laws 1 and 3."""
    whole = saved(kind, tmp_path)
    loaded = spread(kind, tmp_path, monkeypatch, share)
    assert "disk" in places(loaded)
    assert loaded.device == CPU
    assert loaded.fingerprint["dtype"] == "float32"
    told: list[list[tuple[int, ...]]] = []
    for name, model, restarting in (("a", whole, False), ("b", loaded, True)):
        (tmp_path / name).mkdir()
        with House(tmp_path / name, model, max_disk_bytes=DISK) as house:
            told.append(talk(house, restarting=restarting))
    assert told[0] == told[1]


def test_a_model_that_fits_lies_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved("llama", tmp_path)
    loaded = spread("llama", tmp_path, monkeypatch, 2.0)
    assert not any(hasattr(module, "_hf_hook") for module in loaded.model.modules())
    assert placement_of(loaded.model) == Placement(CPU)
    assert caplog.records == []


def test_where_the_parts_of_a_spread_model_lie_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved("llama", tmp_path)
    spread("llama", tmp_path, monkeypatch, 0.8)
    (told,) = caplog.messages
    assert told == "llama does not fit into one place: its parts lie in memory and on the disk."


def test_input_goes_where_the_embedding_computes_and_not_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("llama", tmp_path)
    loaded = spread("llama", tmp_path, monkeypatch)
    assert loaded.model.device.type == "meta"
    assert placement_of(loaded.model) == Placement(CPU, {0: CPU, 1: CPU})


def test_weights_that_were_rearranged_are_written_to_the_data_folder_and_gone_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = saved("qwen3_next", tmp_path)
    loaded = spread("qwen3_next", tmp_path, monkeypatch)
    spilled = tmp_path / "data" / "spilled"
    assert len(list(spilled.iterdir())) == 8
    ids = torch.arange(30)[None]
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(input_ids=ids).logits, whole.model(input_ids=ids).logits)
    load_model(ModelSettings(name=str(tmp_path / "qwen3_next"), device="cpu"), tmp_path / "data")
    assert not spilled.exists()


def test_a_disk_that_fills_up_with_such_weights_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("I/O error: No space left on device (os error 28)")

    saved("qwen3_next", tmp_path)
    monkeypatch.setattr("transformers.integrations.accelerate.save_file", refuse)
    with pytest.raises(ModelUnusable, match=r"qwen3_next cannot be loaded \(the disk is full\)"):
        spread("qwen3_next", tmp_path, monkeypatch)


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_saved_rows_and_states_come_back_to_the_device_of_their_own_layer(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any pass: a second device is only told here, the rows that go there hold nothing."""
    model = tiny_model(kind).model
    cache = KVCache(model, CacheSettings(growth_step=16))
    cache.feed(list(range(20)))
    tensors = cache.rows_out(0)
    num_layers = len(inner_layers(cache))
    elsewhere = dict.fromkeys(range(num_layers // 2, num_layers), ELSEWHERE)
    monkeypatch.setattr(chat.kv_cache, "placement_of", lambda _: Placement(CPU, elsewhere))
    restored = KVCache(model, CacheSettings(growth_step=16))
    restored.take_rows(InMemory(tensors), cache.token_ids, with_state=True)
    for number, layer in enumerate(inner_layers(restored)):
        expected = {ELSEWHERE if number in elsewhere else CPU}
        assert {tensor.device for tensor in tensors_of(layer)} == expected, number


def inner_layers(cache: KVCache) -> list[Any]:
    return cache._cache.layers  # pyright: ignore[reportPrivateUsage]


def tensors_of(layer: Any) -> list[torch.Tensor]:
    held: list[Any] = [getattr(layer, "keys", None), getattr(layer, "values", None)]
    for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
        held += states.values()
    return [tensor for tensor in held if tensor is not None]


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_the_bytes_foretold_are_those_of_the_weights(kind: str) -> None:
    model: Any = tiny_model(kind).model
    assert weight_bytes(model.config, torch.float32, "full") == sum(w.nbytes for w in model.parameters())
    assert (
        weight_bytes(model.config, torch.bfloat16, "full") == sum(w.nbytes for w in model.parameters()) // 2
    )


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("llama", tmp_path)
    monkeypatch.setattr(placement, "free_bytes", lambda _: 100_000)
    (tmp_path / "llama" / "model.safetensors").write_bytes(b"")
    settings = ModelSettings(name=str(tmp_path / "llama"), device="cpu")
    with pytest.raises(
        ModelUnusable, match=r"^llama does not fit into memory: .* --weights nf4 or --device-map"
    ):
        load_model(settings, tmp_path)


def test_quantized_weights_are_only_refused_when_they_do_not_fit_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config: Any = tiny_model("llama").model.config
    needed = weight_bytes(config, torch.float32, "nf4")
    monkeypatch.setattr(placement, "free_bytes", lambda _: needed)
    check_room("Bird", config, torch.float32, "nf4", CPU)
    monkeypatch.setattr(placement, "free_bytes", lambda _: needed - 1)
    with pytest.raises(ModelUnusable, match=r"free on cpu; choose a smaller model with --model\.$"):
        check_room("Bird", config, torch.float32, "nf4", CPU)


def test_a_spread_model_leaves_room_for_chats_on_every_device_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_memory = int(psutil.virtual_memory().available * 0.9)
    assert free_memory(CPU, 0)["cpu"] == pytest.approx(in_memory, rel=0.05)
    assert free_memory(CPU, 10**6)["cpu"] == pytest.approx(in_memory - 10**6, rel=0.05)
    assert free_memory(CPU, 10**15) == {"cpu": 0}
    free = {0: 1000, 1: 500, 2: 50}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(placement, "free_bytes", lambda device: free[device.index])
    found = free_memory(torch.device("cuda"), 100)
    assert list(found) == [0, 1, 2, "cpu"]
    assert (found[0], found[1], found[2]) == (800, 350, 0)
    assert found["cpu"] == pytest.approx(in_memory, rel=0.05)


@pytest.mark.cuda
@pytest.mark.parametrize("share", [0.0, 0.8])
def test_a_model_that_is_too_large_for_a_gpu_goes_on_in_memory(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = saved("llama", tmp_path)
    room = int(weight_bytes(text_config(whole.model), torch.float32, "full") * share)
    monkeypatch.setattr(placement, "free_memory", lambda *_: {0: room, "cpu": 10**9})
    settings = ModelSettings(str(tmp_path / "llama"), "cuda", "float32", device_map="auto")
    loaded = load_model(settings, tmp_path / "data")
    assert {str(place) for place in places(loaded)} >= {"cpu"}
    assert loaded.device.type == ("cuda" if share else "cpu")
    (tmp_path / "chats").mkdir()
    with House(tmp_path / "chats", loaded, max_disk_bytes=DISK) as house:
        talk(house, restarting=True)

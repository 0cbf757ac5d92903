"""A GGUF file is unpacked once; every later start reads the folder that came of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import chat.model
from chat import placement, unpacked_gguf
from chat.errors import ModelUnusable
from chat.model import LoadedModel, load_model
from chat.settings import ModelSettings
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_models import tiny_llama


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Path:
    path = tmp_path / "bird.gguf"
    write_tiny_gguf(path, tiny_llama())
    return path


def load(file: Path, **settings: Any) -> LoadedModel:
    return load_model(ModelSettings(name=str(file), device="cpu", **settings), file.parent / "models")


def kept(file: Path) -> list[Path]:
    return sorted((file.parent / "models").iterdir())


def logits(loaded: LoadedModel) -> torch.Tensor:
    with torch.inference_mode():
        return loaded.model(input_ids=torch.arange(40)[None]).logits


def forbid_unpacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat.model, "GgufConfig", None)


def test_the_second_start_reads_the_folder_and_is_the_same_model(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(file)
    assert len(kept(file)) == 1
    forbid_unpacking(monkeypatch)
    second = load(file)
    assert second.name == first.name == "bird"
    assert second.fingerprint == first.fingerprint
    assert second.fingerprint["model"].startswith("gguf:")
    assert second.eos_token_ids == first.eos_token_ids == tiny_llama().eos_token_ids
    torch.testing.assert_close(logits(second), logits(tiny_llama()), rtol=0, atol=0)


def test_what_the_folder_gives_is_what_the_file_gives(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 4: rows that an earlier version computed from the file itself stay of use."""
    from_folder = load(file)
    shutil.rmtree(file.parent / "models")
    monkeypatch.setattr(chat.model, "keep", lambda *_: False)
    from_file = load(file)
    assert not (file.parent / "models").exists()
    assert from_file.fingerprint == from_folder.fingerprint
    torch.testing.assert_close(logits(from_file), logits(from_folder), rtol=0, atol=0)


def test_each_file_and_each_dtype_has_a_folder_of_its_own(file: Path) -> None:
    other = file.parent / "nest" / "bird.gguf"
    other.parent.mkdir()
    write_tiny_gguf(other, tiny_llama(seed=1))
    loaded = [load(file), load(file, dtype="bfloat16")]
    loaded.append(load_model(ModelSettings(str(other), "cpu"), file.parent / "models"))
    assert [each.dtype for each in loaded] == [torch.float32, torch.bfloat16, torch.float32]
    assert len({str(each.fingerprint) for each in loaded}) == 3
    assert len(kept(file)) == 3
    assert not torch.equal(logits(loaded[0]), logits(loaded[2]))


@pytest.mark.parametrize("name", ["model.safetensors", "keepwarm.json", "tokenizer.json"])
def test_a_folder_that_lacks_something_is_made_again(file: Path, name: str) -> None:
    load(file)
    (folder,) = kept(file)
    (folder / name).unlink()
    torch.testing.assert_close(logits(load(file)), logits(tiny_llama()), rtol=0, atol=0)
    assert kept(file) == [folder]
    assert (folder / name).exists()


def test_a_file_that_changed_under_its_name_is_another_model(file: Path) -> None:
    load(file)
    write_tiny_gguf(file, tiny_llama(seed=1))
    torch.testing.assert_close(logits(load(file)), logits(tiny_llama(seed=1)), rtol=0, atol=0)


def test_what_a_killed_start_left_goes_at_the_next(file: Path) -> None:
    leftover = file.parent / "models" / ".unpacking-dead"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    load(file)
    assert len(kept(file)) == 1


def test_an_unpacked_file_may_be_left_on_the_disk(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "free_memory", lambda *_: {"cpu": 0})
    loaded = load(file, device_map="auto")
    assert {parameter.device.type for parameter in loaded.model.parameters()} == {"meta"}
    torch.testing.assert_close(logits(loaded), logits(tiny_llama()), rtol=0, atol=0)


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_without_room_on_the_disk_the_model_works_and_the_log_says_why_it_starts_slowly(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = unpacked_gguf.SPARE_BYTES
    monkeypatch.setattr(unpacked_gguf.shutil, "disk_usage", lambda _: Usage(10 * free, 9 * free, free))
    torch.testing.assert_close(logits(load(file)), logits(tiny_llama()), rtol=0, atol=0)
    assert kept(file) == []
    (told,) = caplog.messages
    assert "is unpacked at every start, because keeping it takes 256 MB and only 256 MB are free" in told


def test_a_disk_that_refuses_is_told_and_nothing_half_done_stays(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(unpacked_gguf, "put_in_place", refuse)
    torch.testing.assert_close(logits(load(file)), logits(tiny_llama()), rtol=0, atol=0)
    assert kept(file) == []
    assert "could not be kept" in caplog.messages[0]


def test_a_file_that_cannot_be_read_leaves_nothing(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelUnusable, match=r"cannot be loaded \(the file is damaged"):
        load(file)
    assert not (file.parent / "models").exists()

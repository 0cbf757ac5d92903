"""Loading and describing models, on folders and files of tiny models that are made here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, DynamicCache, Mamba2Config, ViTConfig

from chat.errors import ModelError, ModelNotFound, ModelUnusable
from chat.model import LoadedModel, choose_device, choose_dtype, load_model
from chat.model_facts import UNBOUNDED_CONTEXT, check_template, kv_bytes_per_token, num_context_tokens
from chat.settings import ModelSettings
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_models import CHATML, TINY_KINDS, tiny_llama, tiny_model, tiny_tokenizer

_NOWHERE = Path("does-not-exist")


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """A whole model folder, free to be damaged."""
    return save(tiny_llama(), tmp_path / "tiny-bird")


def save(loaded: LoadedModel, folder: Path, **options: Any) -> Path:
    loaded.model.save_pretrained(folder, **options)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def load(name: Path | str, **settings: Any) -> LoadedModel:
    return load_model(ModelSettings(name=str(name), device="cpu", **settings), Path(name).parent / "models")


def logits(loaded: LoadedModel) -> torch.Tensor:
    with torch.inference_mode():
        return loaded.model(input_ids=torch.arange(40)[None]).logits


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(name: Path | str, error: type[ModelError] = ModelUnusable, **settings: Any) -> str:
    """The sentence with which loading `name` is refused."""
    with pytest.raises(error) as caught:
        load(name, **settings)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert "--model" in sentence
    return sentence


# What loads


def test_a_folder_loads_with_the_weights_that_were_saved(folder: Path) -> None:
    loaded = load(folder)
    assert loaded.name == "tiny-bird"
    assert not loaded.model.training
    assert (loaded.device.type, loaded.dtype) == ("cpu", torch.float32)
    torch.testing.assert_close(logits(loaded), logits(tiny_llama()), rtol=0, atol=0)


def test_weights_in_several_files_load_like_weights_in_one(tmp_path: Path) -> None:
    folder = save(tiny_llama(), tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    torch.testing.assert_close(logits(load(folder)), logits(tiny_llama()), rtol=0, atol=0)


def test_a_gguf_file_loads_with_its_tokenizer_and_template(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "bird.gguf", tiny_llama())
    loaded = load(tmp_path / "bird.gguf")
    text = "A dog, <think> and 12 birds 🐦<|im_end|>"
    assert loaded.name == "bird"
    assert loaded.eos_token_ids == tiny_llama().eos_token_ids
    assert loaded.tokenizer.encode(text) == tiny_tokenizer().encode(text)
    torch.testing.assert_close(logits(loaded), logits(tiny_llama()), rtol=0, atol=0)


def test_the_dtype_asked_for_is_the_dtype_of_weights_and_cache(folder: Path) -> None:
    loaded = load(folder, dtype="bfloat16")
    cache: Any = DynamicCache(config=loaded.model.config)
    with torch.inference_mode():
        loaded.model(input_ids=torch.arange(8)[None], cache=cache)
    assert loaded.dtype == torch.bfloat16 == cache.layers[0].keys.dtype
    assert loaded.kv_bytes_per_token * 2 == load(folder).kv_bytes_per_token


def test_loading_says_nothing_on_stdout(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(folder)
    assert capfd.readouterr().out == ""


def test_auto_takes_float32_on_a_cpu() -> None:
    assert choose_dtype("auto", torch.device("cpu")) == torch.float32


@pytest.mark.cuda
def test_auto_puts_a_model_on_the_gpu_in_half_precision(folder: Path) -> None:
    loaded = load_model(ModelSettings(name=str(folder)), _NOWHERE)
    assert loaded.device.type == "cuda"
    assert loaded.dtype in (torch.bfloat16, torch.float16)
    assert {parameter.device.type for parameter in loaded.model.parameters()} == {"cuda"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_device_that_is_not_there_is_refused_with_a_way_out() -> None:
    with pytest.raises(ModelUnusable, match=r"no cuda device .* --device cpu"):
        choose_device("cuda")


def test_the_default_model_answers(default_model: LoadedModel) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    encoded: Any = default_model.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt"
    )
    num_prompt_tokens = encoded["input_ids"].shape[1]
    with torch.inference_mode():
        model: Any = default_model.model
        output = model.generate(**encoded, do_sample=False, max_new_tokens=20)[0, num_prompt_tokens:].tolist()
    assert output[-1] in default_model.eos_token_ids
    assert default_model.tokenizer.decode(output[:-1]) == "The capital of France is Paris."
    assert default_model.num_context_tokens == 8192
    assert default_model.kv_bytes_per_token == 46_080


# What does not, and how it is said


def test_a_path_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert "no folder or file" in refusal(tmp_path / "nothing", ModelNotFound)
    assert "no file" in refusal("nothing.gguf", ModelNotFound)


def test_a_folder_without_a_config_is_said(tmp_path: Path) -> None:
    (tmp_path / "bird.gguf").write_bytes(b"GGUF")
    assert "no config.json" in refusal(tmp_path)
    assert "name the file itself" in refusal(tmp_path)


def test_a_file_of_another_kind_is_said(tmp_path: Path) -> None:
    (tmp_path / "bird.gguf").write_bytes(b"PK\x03\x04")
    assert "not a GGUF file" in refusal(tmp_path / "bird.gguf")


def test_a_gguf_file_that_is_cut_short_is_said(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "bird.gguf", tiny_llama())
    content = (tmp_path / "bird.gguf").read_bytes()
    for num_bytes in (4, 100, len(content) // 2):
        (tmp_path / "cut.gguf").write_bytes(content[:num_bytes])
        assert "cannot be loaded (the file is damaged" in refusal(tmp_path / "cut.gguf")


def test_code_that_comes_with_a_model_is_never_run(folder: Path, tmp_path: Path) -> None:
    """C48."""
    trap = tmp_path / "it-ran"
    (folder / "modeling_bird.py").write_text(f"open({str(trap)!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "modeling_bird.Bird", "AutoModelForCausalLM": "modeling_bird.Bird"}
    edit_json(folder / "config.json", model_type="bird", auto_map=auto_map)
    assert "never runs" in refusal(folder)
    assert not trap.exists()


def test_tokenizer_code_that_comes_with_a_model_is_never_run(folder: Path, tmp_path: Path) -> None:
    """C48."""
    trap = tmp_path / "it-ran"
    (folder / "tokenization_bird.py").write_text(f"open({str(trap)!r}, 'w').close()\n")
    auto_map = {"AutoTokenizer": [None, "tokenization_bird.Bird"]}
    edit_json(folder / "tokenizer_config.json", tokenizer_class="Bird", auto_map=auto_map)
    assert "never runs" in refusal(folder)
    assert not trap.exists()


def test_a_kind_of_model_that_the_library_does_not_know_is_said(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="bird")
    assert "(bird)" in refusal(folder)


def test_a_model_that_only_sees_pictures_is_said(tmp_path: Path) -> None:
    """C48."""
    config = ViTConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    AutoModel.from_config(config).save_pretrained(tmp_path)
    assert "writes text" in refusal(tmp_path)


def test_a_config_that_is_not_json_is_said(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(folder)


def test_a_missing_weight_file_is_said_by_name(tmp_path: Path) -> None:
    """C48."""
    folder = save(tiny_llama(), tmp_path / "sharded", max_shard_size="100KB")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    assert f"{gone.name} is missing" in refusal(folder)


@pytest.mark.parametrize("num_bytes", [0, 7, 100, -1])
def test_a_weight_file_that_is_cut_short_is_said_by_name(folder: Path, num_bytes: int) -> None:
    """C48."""
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:num_bytes])
    assert "model.safetensors is cut short or damaged" in refusal(folder)


def test_weights_that_do_not_cover_the_whole_model_are_said(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refusal(folder)


def test_pickled_weights_are_never_opened(folder: Path) -> None:
    """C25."""
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    assert "never opened" in refusal(folder)


def test_a_model_without_a_tokenizer_is_said(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "tokenizer of tiny-bird cannot be loaded (its files are missing" in refusal(folder)


def test_a_tokenizer_that_loads_without_its_files_is_said(tmp_path: Path) -> None:
    folder = save(tiny_model("qwen3"), tmp_path / "tiny-bird")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert "knows no words" in refusal(folder)


def test_a_model_without_a_chat_template_is_said(folder: Path) -> None:
    """C49."""
    (folder / "chat_template.jinja").unlink()
    assert "no chat template" in refusal(folder)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for message in messages %}", "chat template fails"),
        ("{{ raise_exception('birds only') }}", "birds only"),
        ("{{ 1 // 0 }}", "chat template fails"),
        ("{{ messages[0]['content'] }}", "drops messages"),
    ],
    ids=["syntax", "raises", "crashes", "drops"],
)
def test_a_broken_chat_template_is_said_before_the_weights_are_read(
    folder: Path, template: str, words: str
) -> None:
    """C49."""
    (folder / "chat_template.jinja").write_text(template)
    (folder / "model.safetensors").unlink()
    assert words in refusal(folder)


# What is known of a loaded model


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_the_bytes_per_token_are_what_a_cache_really_takes(kind: str) -> None:
    loaded = tiny_model(kind)
    cache = DynamicCache(config=loaded.model.config)
    with torch.inference_mode():
        loaded.model(input_ids=torch.arange(8)[None], cache=cache)
    kept: list[Any] = [getattr(layer, part, None) for layer in cache.layers for part in ("keys", "values")]
    assert sum(tensor.nbytes for tensor in kept if tensor is not None) == 8 * loaded.kv_bytes_per_token


def test_latent_attention_and_shared_layers_are_counted_as_they_are_kept() -> None:
    config: Any = tiny_llama().model.config
    config.kv_lora_rank, config.qk_rope_head_dim = 16, 8
    assert kv_bytes_per_token(config, torch.float16) == 2 * (16 + 8) * 2
    config.num_kv_shared_layers = 1
    assert kv_bytes_per_token(config, torch.float16) == 1 * (16 + 8) * 2


def test_the_context_is_what_the_config_states() -> None:
    assert tiny_llama(max_position_embeddings=64).num_context_tokens == 64
    assert num_context_tokens(Mamba2Config()) == UNBOUNDED_CONTEXT


def test_every_token_that_may_end_a_reply_ends_it(folder: Path) -> None:
    """C49: a base model's end token in the config, another one in the template."""
    ids: dict[str, int] = tiny_tokenizer().get_vocab()
    edit_json(folder / "generation_config.json", eos_token_id=[ids["<|endoftext|>"], ids["</think>"]])
    edit_json(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    assert load(folder).eos_token_ids == {ids["<|endoftext|>"], ids["</think>"], ids["<|im_end|>"]}


def test_a_template_without_an_end_marker_adds_none(folder: Path) -> None:
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(plain)
    edit_json(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    edit_json(folder / "generation_config.json", eos_token_id=None)
    assert load(folder).eos_token_ids == {tiny_tokenizer().get_vocab()["<|endoftext|>"]}


def test_a_template_that_knows_no_system_role_is_fine() -> None:
    """C10."""
    check_template(
        "Bird", tiny_tokenizer("{% if messages[0]['role'] == 'system' %}{{ 1 // 0 }}{% endif %}" + CHATML)
    )


# The fingerprint


def test_the_fingerprint_depends_on_content_and_not_on_the_place(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "elsewhere" / "copy")
    assert load(copy).fingerprint == load(folder).fingerprint


def _other_weights(folder: Path) -> None:
    """A fine-tune in place: every name and shape as before."""
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] += 0.01
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _other_rope(folder: Path) -> None:
    edit_json(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5e5})


def _other_window(folder: Path) -> None:
    edit_json(folder / "config.json", max_position_embeddings=1024)


def _other_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{# new #}" + CHATML)


def _other_tokens(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<bird>"])
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        (_other_weights, {"model"}),
        (_other_rope, {"model", "positions"}),
        (_other_window, {"model", "positions"}),
        (_other_template, {"template"}),
        (_other_tokens, {"tokenizer"}),
    ],
)
def test_whatever_changes_the_cache_changes_the_fingerprint(
    folder: Path, change: Callable[[Path], None], keys: set[str]
) -> None:
    """C22."""
    before = load(folder).fingerprint
    change(folder)
    after = load(folder).fingerprint
    assert {key for key in before if before[key] != after[key]} == keys


def test_the_fingerprint_tells_dtypes_seeds_and_files_apart(folder: Path, tmp_path: Path) -> None:
    """C22."""
    write_tiny_gguf(tmp_path / "bird.gguf", tiny_llama())
    write_tiny_gguf(tmp_path / "other.gguf", tiny_llama(seed=1))
    models = [
        load(folder),
        load(folder, dtype="bfloat16"),
        load(tmp_path / "bird.gguf"),
        load(tmp_path / "other.gguf"),
        tiny_llama(),
        tiny_llama(seed=1),
        tiny_llama(max_position_embeddings=64),
    ]
    assert len({tuple(sorted(model.fingerprint.items())) for model in models}) == len(models)

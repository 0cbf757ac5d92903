"""Words of a command line in, options or one sentence out."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from ui.login import Account
from ui.options import UsageError, parse_options


def refusal(*arguments: str) -> str:
    """The sentence for a command line that is refused: one line that ends in one full stop."""
    with pytest.raises(UsageError) as refused:
        parse_options(arguments)
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert "usage:" not in sentence
    assert sentence.endswith(".")
    return sentence


def test_without_words_the_page_is_for_this_machine_and_the_default_model(tmp_path: Path) -> None:
    options = parse_options([])
    assert (options.model.name, options.model.device, options.model.dtype) == ("default", "auto", "auto")
    assert (options.host, options.port, options.share, options.accounts) == ("127.0.0.1", 7860, False, ())
    assert options.budgets.max_live_bytes == psutil.virtual_memory().total // 4
    assert options.budgets.max_disk_bytes == 20 * 1024**3
    assert options.data_dir.name == "keepwarm"
    assert options.data_dir.is_absolute()
    assert (options.system_prompt, options.log_level, options.model.offline) == ("", "warning", False)
    assert (options.model.weights, options.model.device_map) == ("full", "single")
    assert (options.cache_kind, options.static_tokens) == ("dynamic", 8192)


def test_every_option_arrives_where_it_belongs(tmp_path: Path) -> None:
    words = ["--model", "owner/name", "--device", "cpu", "--dtype", "bfloat16", "--data-dir", str(tmp_path)]
    words += ["--host", "0.0.0.0", "--port", "0", "--auth", "anna:a:b", "--auth", "ben:c", "--share"]
    words += ["--weights", "nf4"]
    words += ["--cache-kind", "offloaded_static", "--static-tokens", "1024"]
    words += [
        "--system-prompt",
        "Be brief.",
        "--max-live-memory",
        "2GB",
        "--max-disk",
        "0",
        "--log-level",
        "debug",
    ]
    options = parse_options(words)
    assert (options.model.name, options.model.device, options.model.dtype) == (
        "owner/name",
        "cpu",
        "bfloat16",
    )
    assert (options.data_dir, options.host, options.port, options.share) == (tmp_path, "0.0.0.0", 0, True)
    assert options.accounts == (Account("anna", "a:b"), Account("ben", "c"))
    assert (options.budgets.max_live_bytes, options.budgets.max_disk_bytes) == (2 * 1024**3, 0)
    assert (options.system_prompt, options.log_level) == ("Be brief.", "debug")
    assert options.model.weights == "nf4"
    assert parse_options(["--device-map", "auto"]).model.device_map == "auto"
    assert (options.cache_kind, options.static_tokens) == ("offloaded_static", 1024)
    assert parse_options(["--offline"]).model.offline


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1", 1),
        ("1000", 1000),
        ("10b", 10),
        ("1kb", 1024),
        ("512MB", 512 * 1024**2),
        ("1.5 GiB", 3 * 1024**3 // 2),
        ("2g", 2 * 1024**3),
        ("1TB", 1024**4),
    ],
)
def test_a_size_may_be_written_with_or_without_a_unit(text: str, num_bytes: int) -> None:
    assert parse_options(["--max-live-memory", text]).budgets.max_live_bytes == num_bytes
    assert parse_options(["--max-disk", text]).budgets.max_disk_bytes == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GB", "two GB", "2 gigs", "1e9", "0x10", "1,5GB", "nan", "inf", "٣GB", "9" * 99]
)
def test_a_size_that_is_none_is_refused(text: str) -> None:
    assert "--max-disk takes a size such as 2GB" in refusal("--max-disk", text)


def test_a_live_memory_of_nothing_is_refused() -> None:
    assert "0 bytes" in refusal("--max-live-memory", "0GB")


@pytest.mark.parametrize("port", ["65536", "99999", "-1", "http", "80.5", "", "1" * 99, "٣"])
def test_a_port_that_does_not_exist_is_refused(port: str) -> None:
    assert "--port" in refusal(f"--port={port}")


@pytest.mark.parametrize("host", ["", "http://localhost", "127.0.0.1:7860", "my host", "a/b", "a@b"])
def test_a_host_that_is_no_address_is_refused(host: str) -> None:
    assert "--host takes an address" in refusal("--host", host)


@pytest.mark.parametrize(("text", "host"), [("[::1]", "::1"), ("::", "::"), ("localhost", "localhost")])
def test_a_host_may_be_a_name_or_an_address_of_either_kind(text: str, host: str) -> None:
    assert parse_options(["--host", text]).host == host


@pytest.mark.parametrize("option", ["--device", "--dtype", "--weights", "--device-map", "--log-level"])
def test_a_value_outside_a_list_is_refused_and_the_list_is_told(option: str) -> None:
    sentence = refusal(option, "tpu")
    assert f"{option} takes " in sentence
    assert " or " in sentence
    assert "'tpu'" in sentence


@pytest.mark.parametrize(
    "name", ["here.gguf", "./folder", "/no/such/folder", "plain", "a/b/c", "a b/c", "", "~/x"]
)
def test_a_model_that_is_not_there_and_no_hub_id_is_refused(name: str) -> None:
    assert "--model takes" in refusal("--model", name)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.touch()
    assert "neither" in refusal("--model", str(file))


def test_a_model_folder_and_a_gguf_file_become_whole_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "Model.GGUF").touch()
    monkeypatch.chdir(tmp_path)
    assert parse_options(["--model", "model"]).model.name == str(tmp_path / "model")
    assert parse_options(["--model", "Model.GGUF"]).model.name == str(tmp_path / "Model.GGUF")


def test_a_data_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert "is a file" in refusal("--data-dir", str(file))
    assert "--data-dir" in refusal("--data-dir", "")


@pytest.mark.parametrize(
    "account", ["secret", ":secret", "anna:", "  :secret", "local:secret", "a\nb:secret"]
)
def test_an_account_that_is_not_whole_is_refused_without_repeating_it(account: str) -> None:
    sentence = refusal("--auth", account)
    assert sentence.startswith("--auth ")
    assert "secret" not in sentence


@pytest.mark.parametrize("again", ["anna:y", "anna:x", " anna :y", "ａｎｎａ:y"])
def test_one_user_with_two_passwords_is_refused(again: str) -> None:
    assert "the same user twice" in refusal("--auth", "anna:x", "--auth", again)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--weights", "nf4", "--model", "bird.gguf"], "quantized already"),
        (["--weights", "int8", "--device", "mps"], "code from the hub"),
        (["--weights", "int8", "--device", "cpu", "--device-map", "auto"], "left on the disk"),
        (["--device-map", "auto", "--device", "mps"], "the machine's own"),
    ],
)
def test_weights_and_places_that_contradict_each_other_are_refused(
    words: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bird.gguf").touch()
    monkeypatch.chdir(tmp_path)
    sentence = refusal(*words)
    assert sentence.startswith(words[0])
    assert reason in sentence


def test_sharing_and_staying_offline_contradict_each_other() -> None:
    assert "--share" in refusal("--share", "--offline")


@pytest.mark.parametrize(
    "words", [["--colour", "red"], ["store"], ["--por", "1"], ["--share=yes"], ["--port"]]
)
def test_words_that_mean_nothing_are_refused(words: list[str]) -> None:
    assert words[0].partition("=")[0] in refusal(*words)


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(["--help"])
    told = capsys.readouterr().out
    assert ended.value.code == 0
    options = ["model", "device", "dtype", "data-dir", "host", "port", "share", "auth", "system-prompt"]
    for option in [*options, "max-live-memory", "max-disk", "offline", "log-level", "weights", "device-map"]:
        assert f"--{option}" in told

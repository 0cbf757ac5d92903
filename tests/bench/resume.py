"""What it costs to go on with a 4,096-token chat in a new process, against reading it again.

One process writes the chat and exits. This one loads the model, opens the same folder and sends one short
message: `resume_s` is from the request to the first token, rows coming from disk. `cold_prefill_s` is the
library's own prefill of the same ids, and `read_limit_gb_s` a plain read of the same cache files. The files
are in the operating system's page cache in both cases.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chat.settings import CacheSettings, SamplingSettings
from tests.bench.default_model import load_default_model
from tests.bench.prose import prose
from tests.bench.turns import fresh_prefill_s
from tests.house import House

NUM_TOKENS = 4096
NUM_TURNS = 4
DISK = 10**10
ONE_TOKEN = SamplingSettings(temperature=0, max_new_tokens=1)
SHORT = SamplingSettings(temperature=0, max_new_tokens=16)


def run(say: Callable[..., None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "tests.bench.resume", folder], check=True)
        return _resume(Path(folder), say)


def _resume(folder: Path, say: Callable[..., None]) -> dict[str, Any]:
    loaded = load_default_model()
    num_bytes, read_s = _plain_read(folder)
    with House(folder, loaded, settings=CacheSettings(), max_disk_bytes=DISK) as house:
        chat = house.chats.list("ada")[0].id
        began = time.perf_counter()
        view = house.say("And what is the last word?", chat, ONE_TOKEN)
        request_s = time.perf_counter() - began
        stats = view.messages[-1].stats
        ids = house.prompt(view, upto=-1).token_ids
    cold_s = fresh_prefill_s(loaded, ids)
    resume_s = float(stats["ttft_s"])  # pyright: ignore[reportArgumentType]
    say(f"{len(ids):,} tokens: {resume_s:.3f} s from disk, {cold_s:.2f} s read again")
    return {
        "tokens": len(ids),
        "cold_prefill_s": cold_s,
        "resume_s": resume_s,
        "request_s": request_s,
        "speedup": cold_s / resume_s,
        "resume_prefilled_tokens": stats["num_prefilled_tokens"],
        "num_disk_tokens": stats["num_disk_tokens"],
        "num_bytes": num_bytes,
        "read_limit_gb_s": num_bytes / read_s / 1e9,
    }


def _plain_read(folder: Path) -> tuple[int, float]:
    """Bytes and seconds of reading every cache file once more into one buffer."""
    files = list((folder / "kv").rglob("*.safetensors"))
    buffer = bytearray(max(file.stat().st_size for file in files))
    _read_all(files, buffer)  # into the page cache
    began = time.perf_counter()
    num_bytes = _read_all(files, buffer)
    return num_bytes, time.perf_counter() - began


def _read_all(files: list[Path], buffer: bytearray) -> int:
    num_bytes = 0
    for file in files:
        with file.open("rb", buffering=0) as stream:
            num_bytes += stream.readinto(buffer)
    return num_bytes


def write_chat(folder: Path) -> None:
    """The first process: a chat of `NUM_TOKENS` tokens, saved."""
    loaded = load_default_model()
    with House(folder, loaded, settings=CacheSettings(), max_disk_bytes=DISK) as house:
        chat: str | None = None
        for turn in range(NUM_TURNS):
            text = prose(loaded.tokenizer, NUM_TOKENS // NUM_TURNS - 30, salt=turn)
            chat = house.say(text, chat, SHORT).conversation.id


if __name__ == "__main__":
    write_chat(Path(sys.argv[1]))

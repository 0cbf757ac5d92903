"""What it costs to go on with a 4,096-token chat in a new process, against reading it again.

One process writes the chat and exits. This one loads the model and then, several times, opens a copy of the
folder and sends one short message: `resume_s` is from the request to the end of a reply of one token, the
rows coming from disk. `resume_opened_s` is the same after the chat was opened first, as the page does, so
that its rows are in memory when the request comes. `cold_prefill_s` is the library's own prefill of the same
ids, in the same run.
`restore_gb_s` is looking up, reading and checking the rows alone, into a new cache; `read_limit_gb_s` a plain
read of the same files into new memory, `reread_gb_s` one into memory that is in use already. The files are in
the operating system's page cache in every case. All are medians.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chat.kv_cache import KVCache
from chat.model import LoadedModel
from chat.settings import CacheSettings, SamplingSettings
from tests.bench.default_model import load_default_model
from tests.bench.prose import prose
from tests.bench.turns import fresh_prefill_s
from tests.house import OWNER, PATIENCE_S, House

NUM_TOKENS = 4096
NUM_TURNS = 4
NUM_REPEATS = 7
NUM_COLD_REPEATS = 3
DISK = 10**10
ONE_TOKEN = SamplingSettings(temperature=0, max_new_tokens=1)
SHORT = SamplingSettings(temperature=0, max_new_tokens=16)
QUESTION = "And what is the last word?"


def run(say: Callable[..., None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "tests.bench.resume", folder], check=True)
        return _measure(Path(folder), say)


def _measure(folder: Path, say: Callable[..., None]) -> dict[str, Any]:
    loaded = load_default_model()
    resumed = [_resume(folder, loaded, opened=False) for _ in range(NUM_REPEATS)]
    opened = [_resume(folder, loaded, opened=True) for _ in range(NUM_REPEATS)]
    stats, ids = resumed[-1][1], resumed[-1][2]
    restored = [_restore_s(folder, loaded, ids) for _ in range(NUM_REPEATS)]
    num_bytes, read_s, reread_s = _plain_reads(folder)
    cold_s = statistics.median(fresh_prefill_s(loaded, ids) for _ in range(NUM_COLD_REPEATS))
    resume_s, restore_s = statistics.median(each[0] for each in resumed), statistics.median(restored)
    opened_s = statistics.median(each[0] for each in opened)
    say(
        f"{len(ids):,} tokens: {resume_s:.3f} s from disk, {opened_s:.3f} s opened, {cold_s:.2f} s read again"
    )
    return {
        "tokens": len(ids),
        "cold_prefill_s": cold_s,
        "resume_s": resume_s,
        "all_resume_s": [each[0] for each in resumed],
        "speedup": cold_s / resume_s,
        "resume_opened_s": opened_s,
        "speedup_opened": cold_s / opened_s,
        "resume_prefilled_tokens": stats["num_prefilled_tokens"],
        "resume_disk_tokens": stats["num_disk_tokens"],
        "new_message_tokens": len(ids) - stats["known"],
        "num_bytes": num_bytes,
        "restore_gb_s": num_bytes / restore_s / 1e9,
        "read_limit_gb_s": num_bytes / read_s / 1e9,
        "reread_gb_s": num_bytes / reread_s / 1e9,
    }


def _resume(
    folder: Path, loaded: LoadedModel, *, opened: bool
) -> tuple[float, dict[str, Any], tuple[int, ...]]:
    """Seconds of a request in a copy of the folder, the stats of its turn, and the ids of its prompt."""
    with tempfile.TemporaryDirectory() as copied:
        shutil.copytree(folder, copied, dirs_exist_ok=True)
        with House(Path(copied), loaded, settings=CacheSettings(), max_disk_bytes=DISK) as house:
            chat = house.chats.list(OWNER)[0].id
            known = house.chats.view(OWNER, chat).messages[-1].stats["num_cached_tokens"]
            if opened:
                house.chats.warm(OWNER, chat)
                house.worker.wait_until_idle(PATIENCE_S)
            began = time.perf_counter()
            view = house.say(QUESTION, chat, ONE_TOKEN)
            seconds = time.perf_counter() - began
            stats = {**view.messages[-1].stats, "known": known}
            return seconds, stats, house.prompt(view, upto=-1).token_ids


def _restore_s(folder: Path, loaded: LoadedModel, ids: tuple[int, ...]) -> float:
    """Seconds from ids to a cache that holds what is saved of them."""
    with House(folder, loaded, settings=CacheSettings(), max_disk_bytes=DISK) as house:
        disk = house.disk()
        chat = house.chats.list(OWNER)[0].id
        cache = KVCache(loaded.model, CacheSettings())
        began = time.perf_counter()
        chain = disk.find(OWNER, chat, ids, wait=False)
        cache.reserve(chain.num_tokens)
        disk.load(cache, chain, ids, chat, lambda: KVCache(loaded.model, CacheSettings()))
        return time.perf_counter() - began


def _plain_reads(folder: Path) -> tuple[int, float, float]:
    """Bytes of all cache files, seconds of reading them into new memory, and into one buffer."""
    files = list((folder / "kv").glob("*.safetensors"))
    buffer = bytearray(max(file.stat().st_size for file in files))
    fresh = statistics.median(_fresh_read_s(files) for _ in range(NUM_REPEATS))
    again = statistics.median(_reread_s(files, buffer) for _ in range(NUM_REPEATS))
    return sum(file.stat().st_size for file in files), fresh, again


def _fresh_read_s(files: list[Path]) -> float:
    began = time.perf_counter()
    contents = [file.read_bytes() for file in files]
    seconds = time.perf_counter() - began
    assert all(contents)
    return seconds


def _reread_s(files: list[Path], buffer: bytearray) -> float:
    began = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            stream.readinto(buffer)
    return time.perf_counter() - began


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

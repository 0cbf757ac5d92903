"""Keepwarm's command line: reads the options, wires the parts together, serves the page.

`python app.py --help` lists the options, `python app.py store` looks after the saved caches instead. Exit
codes: 0 after a normal end (Ctrl-C too), 1 when the app could not start, 2 when the command line asks for
something impossible; both with one sentence. Heavy libraries are imported where they are needed,
after the environment says how they have to behave.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import MutableMapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from cache_store.errors import StoreError
from cache_store.folder import DataFolder
from chat.errors import ChatError
from chat.settings import DEFAULT_MODEL, CacheKind, CacheSettings, DeviceName
from ui.address import AddressRefused, claim_address
from ui.option_parser import UsageError
from ui.options import Options, parse_options
from ui.store_options import parse_store_options

if TYPE_CHECKING:
    from cache_store.database import Database
    from cache_store.segments import Segments
    from chat.chats import Chats
    from chat.saver import Saver
    from chat.session import ChatSession

OWN_ADDRESSES = ("127.0.0.1", "localhost", "::1")

NOT_SAVED = (
    "Caches are not saved this time, because their folder cannot be used; your chats are safe, and the"
    " terminal says why."
)
"""For the page, which guests see, too: it does not say where things are."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until Ctrl-C or SIGTERM. Returns the exit code; unexpected errors leave as they are."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if words and words[0] == "store":
            return look_after_store(words[1:])
        run(parse_options(words))
    except KeyboardInterrupt:
        return 0
    except UsageError as exc:
        return _say(exc, code=2)
    except (StoreError, ChatError, AddressRefused) as exc:
        return _say(exc, code=1)
    return 0


def look_after_store(words: Sequence[str]) -> int:
    """`python app.py store …`: the exit code. Raises UsageError or StoreError."""
    options = parse_store_options(words)

    from ui.store_command import look_after

    try:
        return look_after(options)
    except KeyboardInterrupt:
        print("Stopped before it was done; nothing is lost, start it again to finish.", file=sys.stderr)
        return 1


def run(options: Options) -> None:
    """Serve until KeyboardInterrupt; whatever was opened is closed again, in reverse order."""
    with ExitStack() as opened:
        folder = opened.enter_context(DataFolder(options.data_dir))
        listener = opened.enter_context(claim_address(options.host, options.port))
        prepare_environment(os.environ, folder.temporary, offline=options.model.offline)
        start_logging(options.log_level)
        check_device(options.model.device)
        check_cache_kind(options.cache_kind, options.model.device)
        if options.model.name == DEFAULT_MODEL:
            fetch_default_model(folder.models, offline=options.model.offline)
        chats = build_chats(options, folder, opened)

        from ui.page import build_page
        from ui.server import ServerSettings, start
        from ui.theme import launch_looks

        page = build_page(chats, default_system_prompt=options.system_prompt)
        settings = ServerSettings(
            host=options.host,
            port=options.port,
            share=options.share,
            accounts=options.accounts,
            certificate_path=folder.temporary / "share-server.pem",
        )
        opened.enter_context(start(page, settings, launch_looks(), listener=listener)).wait()


def prepare_environment(environment: MutableMapping[str, str], temporary: Path, *, offline: bool) -> None:
    """Tell libraries that are not imported yet: no telemetry, a private folder for files, no proxy on the
    way to ourselves, and with `offline` no hub."""
    environment["GRADIO_ANALYTICS_ENABLED"] = "False"
    environment["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = "1000000"  # Gradio tabulates its events every time else
    environment["GRADIO_TEMP_DIR"] = str(temporary)
    environment["HF_HUB_DISABLE_TELEMETRY"] = "1"
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve on a busy machine
    # Pinned memory is else rounded up to powers of two and kept when it is freed, beside every budget.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys():
        environment["PYTORCH_ALLOC_CONF"] = "pinned_max_cached_size_mb:1"
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
        environment["TRANSFORMERS_OFFLINE"] = "1"
    for name in ("NO_PROXY", "no_proxy"):
        named = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
        environment[name] = ",".join(dict.fromkeys([*named, *OWN_ADDRESSES]))


def start_logging(level: str) -> None:
    """Log to stderr. The web client's line per request is told only when debugging."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if level != "debug":
        for chatty in ("httpx", "httpcore"):
            logging.getLogger(chatty).setLevel(logging.WARNING)


def check_device(device: DeviceName) -> None:
    """Raises UsageError when this machine has no such device, or torch cannot use it."""
    if device in ("auto", "cpu"):
        return
    import torch

    usable = torch.cuda.is_available() if device == "cuda" else torch.backends.mps.is_available()
    if not usable:
        raise UsageError(
            f"--device {device} is not available here to torch {torch.__version__}; try auto or cpu."
        )


def check_cache_kind(kind: CacheKind, device: DeviceName) -> None:
    """Raises UsageError when this machine, or a package that is missing on it, does not offer this kind."""
    if kind == "dynamic":
        return
    from chat.errors import KindUnavailable
    from chat.layers.kinds import availability, codec_for
    from chat.model import choose_device

    found = availability(kind, choose_device(device).type)
    if not found.is_available:
        how = f"run `{found.install}`, or choose" if found.install else "choose"
        raise UsageError(
            f"--cache-kind {kind} cannot be had here, because {found.because}; {how} another kind."
        )
    try:
        codec_for(CacheSettings(kind=kind))
    except KindUnavailable as error:
        raise UsageError(str(error)) from error


def fetch_default_model(models_dir: Path, *, offline: bool) -> None:
    """Have the default model on disk, with progress on the terminal. Raises DownloadFailed."""
    from chat import default_model

    default_model.fetch_default_model(models_dir, offline=offline)


def build_chats(options: Options, folder: DataFolder, opened: ExitStack) -> Chats:
    """The store, the live caches and the inference thread behind one door; `opened` closes them again."""
    from cache_store.conversations import Conversations
    from cache_store.database import Database
    from cache_store.kind_qualities import KindQualities
    from chat.chats import Chats
    from chat.disk import DiskCaches
    from chat.layers.kinds import cache_fingerprint
    from chat.live_caches import LiveCaches
    from chat.model import load_model
    from chat.session import ChatSession
    from chat.worker import Worker

    database = opened.enter_context(closing(Database(folder.database)))
    store = Conversations(database)
    store.recover()
    live = LiveCaches(options.budgets.max_live_bytes)
    segments, saver, why_not_saved = open_saved_caches(options, folder, database)

    def load() -> ChatSession:
        loaded = load_model(options.model, folder.models)
        settings = CacheSettings(kind=options.cache_kind, static_tokens=options.static_tokens)
        fingerprint = cache_fingerprint(loaded.fingerprint, settings)
        disk = DiskCaches(segments, saver, fingerprint) if segments and saver else None
        return ChatSession(loaded, store, live, settings, disk)

    worker = Worker(load, store)
    chats = Chats(
        store,
        worker,
        live,
        KindQualities(database),
        model_name=options.model.name,
        default_system_prompt=options.system_prompt,
        saver=saver,
        why_not_saved=why_not_saved,
    )
    opened.callback(chats.close)
    worker.start()
    if saver is not None:
        saver.start()
    return chats


def open_saved_caches(
    options: Options, folder: DataFolder, database: Database
) -> tuple[Segments, Saver, str] | tuple[None, None, str]:
    """The caches on disk, in order, and what writes them; none with `--max-disk 0`. Caches are disposable:
    where the folder cannot be used, the app runs without, and the sentence says why."""
    from cache_store.segments import Segments
    from chat.saver import Saver

    if not options.budgets.max_disk_bytes:
        return None, None, ""
    try:
        segments = Segments(database, folder.kv, options.budgets.max_disk_bytes)
        segments.sweep()
    except StoreError as error:
        print(f"Caches are not saved this time: {error}", file=sys.stderr)
        return None, None, NOT_SAVED
    return segments, Saver(segments), ""


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _say(exc: Exception, *, code: int) -> int:
    print(" ".join(str(exc).split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

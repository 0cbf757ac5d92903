"""A whole Keepwarm below the page, in a folder of its own, and the two checks that every turn must pass.

ORACLE: the prompt run through the stock model in one pass, with no cache of ours, greedily continued,
gives the same tokens as the reply. INVARIANT: the conversation's live cache holds as many tokens in every
layer as its id list names, and that list is an exact beginning of what will be fed next.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DynamicCache

from cache_store.conversations import Conversations
from cache_store.database import Database
from cache_store.kind_qualities import KindQualities
from cache_store.records import Message
from cache_store.segments import Segments
from chat.chats import Chats, ChatView
from chat.disk import DiskCaches
from chat.job import Job, JobView
from chat.layers.kinds import cache_fingerprint
from chat.live_caches import LiveCache, LiveCaches
from chat.model import LoadedModel
from chat.prompt import Prompt, PromptRenderer
from chat.saver import Saver
from chat.session import ChatSession
from chat.settings import CacheSettings, SamplingSettings
from chat.worker import Worker

OWNER = "ada"
GREEDY = SamplingSettings(temperature=0, max_new_tokens=8)
PATIENCE_S = 120.0
NEAR_TIE = 1e-4


class House:
    """`max_live_bytes` bounds the live caches. Use as a context manager; `restart` is a new process's view
    of the same folder: everything in RAM is gone. With a `load` of its own the house does not wait for it.
    Without `max_disk_bytes` nothing but text is kept on disk."""

    def __init__(
        self,
        folder: Path,
        loaded: LoadedModel,
        *,
        max_live_bytes: int = 10**9,
        settings: CacheSettings | None = None,
        default_system_prompt: str = "",
        load: Callable[[], ChatSession] | None = None,
        max_disk_bytes: int | None = None,
    ) -> None:
        self.max_disk_bytes = max_disk_bytes
        self.load = load
        self.folder = folder
        self.loaded = loaded
        self.max_live_bytes = max_live_bytes
        self.settings = settings or CacheSettings(growth_step=16, prefill_chunk=16)
        self.default_system_prompt = default_system_prompt
        self.renderer = PromptRenderer(loaded.tokenizer, loaded.eos_token_ids)
        self.open()

    def open(self) -> None:
        """Build every part and wait until the model is there."""
        self.database = Database(self.folder / "keepwarm.sqlite3")
        self.store = Conversations(self.database)
        self.num_recovered = self.store.recover()
        self.live = LiveCaches(self.max_live_bytes)
        self.segments, self.saver = self._open_disk()
        self.worker = Worker(self._session, self.store)
        self.chats = Chats(
            self.store,
            self.worker,
            self.live,
            KindQualities(self.database),
            model_name=self.loaded.name,
            default_system_prompt=self.default_system_prompt,
            saver=self.saver,
        )
        self.worker.start()
        if self.load is None:
            self.worker.wait_until_loaded(PATIENCE_S)

    def _open_disk(self) -> tuple[Segments | None, Saver | None]:
        if self.max_disk_bytes is None:
            return None, None
        folder = self.folder / "kv"
        folder.mkdir(exist_ok=True)
        segments = Segments(self.database, folder, self.max_disk_bytes, reserve_bytes=0)
        segments.sweep()
        saver = Saver(segments)
        saver.start()
        return segments, saver

    def close(self) -> None:
        self.chats.close()
        self.database.close()

    def restart(self) -> None:
        self.close()
        self.open()

    def __enter__(self) -> House:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _session(self) -> ChatSession:
        return self.load() if self.load is not None else self.new_session()

    def new_session(self) -> ChatSession:
        disk = None if self.max_disk_bytes is None else self.disk()
        return ChatSession(self.loaded, self.store, self.live, self.settings, disk)

    def disk(self) -> DiskCaches:
        """What is saved, as this model sees it. Only with `max_disk_bytes`."""
        assert self.segments is not None
        assert self.saver is not None
        fingerprint = cache_fingerprint(self.loaded.fingerprint, self.settings)
        return DiskCaches(self.segments, self.saver, fingerprint)

    # A person's verbs, waiting for the reply

    def start(
        self, text: str, chat: str | None = None, sampling: SamplingSettings = GREEDY, owner: str = OWNER
    ) -> Job:
        leaf = self.chats.view(owner, chat).leaf_id if chat else None
        return self.chats.send(owner, text, conversation_id=chat, leaf_id=leaf, sampling=sampling)

    def say(
        self, text: str, chat: str | None = None, sampling: SamplingSettings = GREEDY, owner: str = OWNER
    ) -> ChatView:
        return self.finish(self.start(text, chat, sampling, owner))

    def regenerate(
        self, message_id: str, sampling: SamplingSettings = GREEDY, owner: str = OWNER
    ) -> ChatView:
        return self.finish(self.chats.regenerate(owner, message_id, sampling))

    def edit(
        self, message_id: str, text: str, sampling: SamplingSettings = GREEDY, owner: str = OWNER
    ) -> ChatView:
        return self.finish(self.chats.edit(owner, message_id, text, sampling))

    def continue_reply(
        self, message_id: str, sampling: SamplingSettings = GREEDY, owner: str = OWNER
    ) -> ChatView:
        return self.finish(self.chats.continue_reply(owner, message_id, sampling))

    def finish(self, job: Job) -> ChatView:
        job.wait_until_ended(PATIENCE_S)
        return self.chats.view(job.owner, job.conversation_id)

    # What must hold

    def cache_of(self, chat: str) -> LiveCache | None:
        """The conversation's live cache, left where it is."""
        live = self.live.take(chat)
        if live is not None:
            self.live.keep(chat, live)
        return live

    def kept(self) -> dict[str, LiveCache]:
        """Every kept cache by conversation, least recently used first; looking changes nothing."""
        return dict(self.live._kept)  # pyright: ignore[reportPrivateUsage]

    def num_rows(self) -> int:
        """Rows of all tables that hold what people wrote."""
        tables = ("conversations", "messages")
        return sum(len(self.database.rows(f"SELECT id FROM {table}")) for table in tables)  # noqa: S608

    def prompt(self, view: ChatView, upto: int | None = None, extra: str | None = None) -> Prompt:
        """What is fed for the first `upto` messages, followed by a question `extra`."""
        messages = list(view.messages[:upto])
        if extra is not None:
            messages.append(Message("next", view.conversation.id, None, "user", extra, "done", 0.0))
        return self.renderer.render(messages, view.conversation.system_prompt)

    def check_invariant(self, chat: str, owner: str = OWNER) -> None:
        live = self.cache_of(chat)
        if live is None:
            return
        live.cache.check()
        fed_next = self.prompt(self.chats.view(owner, chat), extra="and then?").token_ids
        held = live.cache.token_ids
        assert held == fed_next[: len(held)], "the cache is not a beginning of what is fed next"

    def check_oracle(self, chat: str, owner: str = OWNER, num_tokens: int = 30) -> None:
        """The newest reply must have been written greedily."""
        view = self.chats.view(owner, chat)
        reply = view.messages[-1]
        assert reply.error is None, reply.error
        assert reply.finish_reason is not None, "the reply has no end"
        prompt = self.prompt(view, upto=-1)
        assert_greedy(self.loaded, prompt.token_ids, reply.token_ids[:num_tokens])

    def check(self, chat: str, owner: str = OWNER) -> None:
        self.check_oracle(chat, owner)
        self.check_invariant(chat, owner)


@torch.inference_mode()
def assert_greedy(loaded: LoadedModel, prompt_ids: tuple[int, ...], reply_ids: tuple[int, ...]) -> None:
    """Each reply token is the stock model's first choice after everything before it, near-ties apart.
    One fresh pass over prompt and reply, with a cache of the library's own that is thrown away."""
    if not reply_ids:
        return
    ids = torch.tensor([[*prompt_ids, *reply_ids]], device=loaded.device)
    cache = DynamicCache(config=loaded.model.config)
    logits = (
        loaded.model(input_ids=ids, cache=cache, use_cache=True).logits[0, len(prompt_ids) - 1 : -1].float()
    )
    chosen = logits.gather(1, torch.tensor(reply_ids, device=loaded.device)[:, None])[:, 0]
    gaps = logits.max(dim=-1).values - chosen
    worst = int(gaps.argmax())
    assert float(gaps[worst]) <= NEAR_TIE, (
        f"token {worst} of the reply is {float(gaps[worst]):.3g} below the first choice of a fresh run"
    )


def last_stats(view: ChatView) -> dict[str, object]:
    """The newest reply's stats as stored."""
    return dict(view.messages[-1].stats)


def end_view(job: Job) -> JobView:
    return job.wait_until_ended(PATIENCE_S)

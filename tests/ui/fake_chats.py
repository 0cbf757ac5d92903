"""`Chats` without a model: an in-memory tree and a slow writer of words, to look at the page with.

It keeps the promises that the page relies on: owners, leaf check, one reply at a time per chat, a queue
with positions, loading, prefill progress, decode, stop and failure. Text commands steer it: a message
that contains `fail` fails, `code` answers with code, `long` writes much, `read` takes long to read.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

from cache_store.errors import NotFound, StaleView
from cache_store.records import Conversation, Message, Siblings
from chat.chats import Chats, ChatView, ModelStatus
from chat.errors import EmptyMessage, NothingToDo
from chat.job import Job
from chat.settings import SamplingSettings
from chat.stats import TurnStats

CODE = '''Here is a small function and a test for it.

```python
def longest_word(text: str) -> str:
    """The longest word of `text`; the first one when several are equally long, and "" for no words."""
    words = [word.strip(".,;:!?") for word in text.split()]
    return max(words, key=len, default="")


def test_longest_word() -> None:
    assert longest_word("a quick brown fox") == "quick"
```

It strips punctuation first, so **"jumps,"** counts five letters. Cost is linear: \\(O(n)\\).

| Input | Result |
|---|---|
| `"a bb ccc"` | `"ccc"` |
| `""` | `""` |
'''

PROSE = (
    "A heat pump moves warmth instead of making it. Think of a refrigerator turned inside out: it takes a "
    "little heat from the cold air outside and carries it into the room.\n\n"
    "1. **Evaporator.** A cold liquid takes heat from the outside air and boils.\n"
    "2. **Compressor.** Squeezing the vapour makes it hot.\n"
    "3. **Condenser.** The hot vapour gives its heat to the house and becomes liquid again.\n\n"
    "Because it only *moves* heat, one unit of electricity brings three or four units of warmth. "
)


class FakeChats(Chats):
    """See the module. `word_s`: seconds per word."""

    def __init__(self, word_s: float = 0.04) -> None:
        self._word_s = word_s
        self._ids = itertools.count(1)
        self._lock = threading.RLock()
        self._turn = threading.Lock()
        self._conversations: dict[str, Conversation] = {}
        self._messages: dict[str, dict[str, Message]] = {}
        self._selected: dict[str, dict[str | None, str]] = {}
        self._jobs: dict[str, Job] = {}
        self._waiting: list[Job] = []
        self.status = ModelStatus("ready", "SmolLM2-135M-Instruct", "", "cpu", "bfloat16", 8192, 23040)

    def model_status(self) -> ModelStatus:
        return self.status

    def list(self, owner: str, search: str = "") -> list[Conversation]:
        with self._lock:
            mine = [
                c
                for c in self._conversations.values()
                if c.owner == owner and search.lower() in c.title.lower()
            ]
        return sorted(mine, key=lambda c: -c.updated_at)

    def create(self, owner: str, system_prompt: str | None = None) -> Conversation:
        now = time.time()
        made = Conversation(f"c{next(self._ids)}", owner, "New chat", system_prompt or "", now, now)
        with self._lock:
            self._conversations[made.id], self._messages[made.id], self._selected[made.id] = made, {}, {}
        return made

    def view(self, owner: str, conversation_id: str) -> ChatView:
        with self._lock:
            conversation = self._mine(owner, conversation_id)
            messages, parent = [], None
            while (chosen := self._selected[conversation_id].get(parent)) is not None:
                messages.append(self._messages[conversation_id][chosen])
                parent = chosen
            siblings = {message.id: self._siblings(message) for message in messages}
            return ChatView(conversation, tuple(messages), siblings, self._jobs.get(conversation_id))

    def send(
        self,
        owner: str,
        text: str,
        *,
        conversation_id: str | None,
        leaf_id: str | None,
        sampling: SamplingSettings,
    ) -> Job:
        if not text.strip():
            raise EmptyMessage("There is nothing to send.")
        with self._lock:
            conversation_id = conversation_id or self.create(owner).id
            view = self.view(owner, conversation_id)
            if view.leaf_id != leaf_id:
                raise StaleView(
                    "This chat has moved on in another tab; nothing was sent, your text is still here."
                )
            self._refuse_while_writing(conversation_id)
            if not view.messages:
                title = " ".join(text.split())[:60]
                self._conversations[conversation_id] = replace(view.conversation, title=title)
            question = self._add(conversation_id, leaf_id, "user", text, "done")
            return self._begin(owner, question)

    def regenerate(self, owner: str, message_id: str, sampling: SamplingSettings) -> Job:
        with self._lock:
            message = self._message(owner, message_id)
            self._refuse_while_writing(message.conversation_id)
            if message.role == "assistant":
                message = self._messages[message.conversation_id][str(message.parent_id)]
            return self._begin(owner, message)

    def edit(self, owner: str, message_id: str, text: str, sampling: SamplingSettings) -> Job:
        with self._lock:
            message = self._message(owner, message_id)
            self._refuse_while_writing(message.conversation_id)
            return self._begin(
                owner, self._add(message.conversation_id, message.parent_id, "user", text, "done")
            )

    def select(self, owner: str, message_id: str, step: int) -> ChatView:
        with self._lock:
            message = self._message(owner, message_id)
            siblings = self._siblings(message)
            chosen = siblings.ids[(siblings.position + step) % len(siblings.ids)]
            self._selected[message.conversation_id][message.parent_id] = chosen
            return self.view(owner, message.conversation_id)

    def stop(self, owner: str, conversation_id: str) -> None:
        with self._lock:
            self._mine(owner, conversation_id)
            job = self._jobs.get(conversation_id)
        if job:
            job.request_stop()

    def rename(self, owner: str, conversation_id: str, title: str) -> Conversation:
        if not title.strip():
            raise EmptyMessage("A chat needs a title; the old one was kept.")
        return self._change(owner, conversation_id, title=title.strip())

    def set_system_prompt(self, owner: str, conversation_id: str, text: str) -> Conversation:
        return self._change(owner, conversation_id, system_prompt=text)

    def delete(self, owner: str, conversation_id: str) -> None:
        self.stop(owner, conversation_id)
        with self._lock:
            self._conversations.pop(conversation_id)

    def _change(self, owner: str, conversation_id: str, **fields: str) -> Conversation:
        with self._lock:
            changed = replace(self._mine(owner, conversation_id), **fields)  # pyright: ignore[reportArgumentType]
            self._conversations[conversation_id] = changed
            return changed

    def _mine(self, owner: str, conversation_id: str) -> Conversation:
        conversation = self._conversations.get(conversation_id)
        if conversation is None or conversation.owner != owner:
            raise NotFound("This chat is not there any more; nothing was changed.")
        return conversation

    def _message(self, owner: str, message_id: str) -> Message:
        for messages in self._messages.values():
            if message_id in messages:
                self._mine(owner, messages[message_id].conversation_id)
                return messages[message_id]
        raise NotFound("This message is not there any more; nothing was changed.")

    def _siblings(self, message: Message) -> Siblings:
        all_here = self._messages[message.conversation_id].values()
        ids = tuple(m.id for m in all_here if m.parent_id == message.parent_id)
        return Siblings(ids, ids.index(message.id))

    def _refuse_while_writing(self, conversation_id: str) -> None:
        if conversation_id in self._jobs:
            raise NothingToDo("A reply is still being written; stop it first. Your text is still here.")

    def _add(self, conversation_id: str, parent_id: str | None, role: str, text: str, status: str) -> Message:
        made = Message(f"m{next(self._ids)}", conversation_id, parent_id, role, text, status, time.time())  # pyright: ignore[reportArgumentType]
        self._messages[conversation_id][made.id] = made
        self._selected[conversation_id][parent_id] = made.id
        self._conversations[conversation_id] = replace(
            self._conversations[conversation_id], updated_at=made.created_at
        )
        return made

    def _begin(self, owner: str, question: Message) -> Job:
        reply = self._add(question.conversation_id, question.id, "assistant", "", "running")
        job = Job(owner, question.conversation_id, reply.id)
        self._jobs[question.conversation_id] = job
        self._waiting.append(job)
        threading.Thread(target=self._run, args=(job, question.text), daemon=True, name="fake worker").start()
        return job

    def _run(self, job: Job, question: str) -> None:
        while not self._turn.acquire(timeout=0.05):
            if job.stop_requested:
                return self._end(job, "", "stopped")
            with self._lock:
                ahead = self._waiting.index(job)
            if job.view.position != ahead:
                job.publish(state="queued", position=ahead)
        try:
            self._write(job, question)
        finally:
            self._turn.release()

    def _write(self, job: Job, question: str) -> None:
        for state, written in self._steps(job, question):
            if job.stop_requested or state in {"failed", "done"}:
                self._end(job, written, "stopped" if job.stop_requested else state)
                return

    def _steps(self, job: Job, question: str) -> Iterator[tuple[str, str]]:
        """Publish what a real reply would, step by step; yields (state, text so far)."""
        while self.status.state == "loading":
            job.publish(state="loading")
            time.sleep(0.1)
            yield "loading", ""
        commands = set(question.lower().replace(",", " ").replace(".", " ").split())
        num_to_read = 5310 if "read" in commands else 31
        for num_read in range(0, num_to_read, 256):
            job.publish(state="prefill", num_read=num_read, num_to_read=num_to_read)
            time.sleep(self._word_s * 2)
            yield "prefill", ""
        text = CODE if commands & {"code", "python"} else PROSE
        words, written = (text * (60 if "long" in commands else 1)).split(" "), ""
        for number, word in enumerate(words):
            if "fail" in commands and number == 12:
                yield "failed", written
            written += word if number == len(words) - 1 else word + " "
            job.publish(state="decode", text=written)
            time.sleep(self._word_s)
            yield "decode", written
        yield "done", written

    def _end(self, job: Job, text: str, status: str) -> None:
        error = (
            "The device had no memory left; your message is kept, please try a shorter one."
            if status == "failed"
            else None
        )
        stats = TurnStats(1235, 392, 812, 31, len(text.split()), {"new": 31}, 0.0, 0.12, 24.3)
        with self._lock:
            messages = self._messages[job.conversation_id]
            messages[job.reply_id] = replace(
                messages[job.reply_id],
                text=text,
                status=status,
                error=error,
                stats=stats.to_json(),  # pyright: ignore[reportArgumentType]
            )
            self._jobs.pop(job.conversation_id, None)
            self._waiting.remove(job)
        job.publish(state=status, text=text, error=error, stats=stats)

"""One inference thread and the queue in front of it.

The thread loads the model, then writes one reply at a time. The queue is fair between owners: each has a
line of its own and the lines take turns, so that ten messages of one person delay another by one reply.
Nothing that goes wrong in a reply ends the thread; a model that cannot be loaded fails every job with the
reason and leaves the app running.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from cache_store.conversations import Conversations
from cache_store.errors import StoreError
from cache_store.records import Conversation, Message
from chat.errors import ChatError, ModelError, ModelUnusable, QueueFull
from chat.failure import log_and_release, named, sentence_for
from chat.job import Job
from chat.reply_writer import Delta, Ended
from chat.reuse import Origin
from chat.session import ChatSession
from chat.turn import Reading

log = logging.getLogger(__name__)

MAX_WAITING = 64
"""Replies that may wait at once; more are refused before their message is stored."""


@dataclass(frozen=True, slots=True)
class Task:
    """A job and what it takes to do it."""

    job: Job
    conversation: Conversation
    reply: Message
    origin: Origin


@dataclass(frozen=True, slots=True)
class IdleWork:
    """Something that can wait until nobody needs the model. `do(session, goes_on)` asks `goes_on` between its
    steps and returns False when it gave up because of it; then it is done from its beginning later. One
    piece of work of a name waits at a time."""

    name: str
    do: Callable[[ChatSession, Callable[[], bool]], bool]


class FairQueue:
    """Tasks in one line per owner, the lines taking turns. Not locked: the worker holds its own lock."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[Task]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def push(self, task: Task) -> None:
        """Put a task at the end of its owner's line."""
        self._lines.setdefault(task.job.owner, deque()).append(task)

    def pop(self) -> Task:
        """The next task; its owner's line goes to the back. Raises IndexError when empty."""
        if not self._lines:
            raise IndexError("nothing is waiting")
        owner, line = self._lines.popitem(last=False)
        task = line.popleft()
        if line:
            self._lines[owner] = line
        return task

    def remove(self, job: Job) -> Task | None:
        """Take out a waiting task; None when it is not waiting."""
        for owner, line in self._lines.items():
            for task in line:
                if task.job is job:
                    line.remove(task)
                    if not line:
                        del self._lines[owner]
                    return task
        return None

    def in_order(self) -> list[Task]:
        """All tasks in the order in which they will be taken."""
        lines = [list(line) for line in self._lines.values()]
        longest = max(map(len, lines), default=0)
        return [line[turn] for turn in range(longest) for line in lines if turn < len(line)]


class Worker:
    """See the module. `load` builds the session and runs on the inference thread."""

    def __init__(self, load: Callable[[], ChatSession], store: Conversations) -> None:
        self._load = load
        self._store = store
        self._session: ChatSession | None = None
        self._load_error: ModelError | None = None
        self._queue = FairQueue()
        self._jobs: dict[str, Job] = {}
        self._running: Job | None = None
        self._opened: dict[str, Conversation] = {}
        self._idle_work: OrderedDict[str, IdleWork] = OrderedDict()
        self._idle = False
        self._closing = False
        self._changed = threading.Condition(threading.RLock())
        self._thread = threading.Thread(target=self._work, name="inference", daemon=True)

    def start(self) -> None:
        """Start the thread, which begins by loading the model."""
        self._thread.start()

    @property
    def session(self) -> ChatSession | None:
        """The session once the model is loaded."""
        return self._session

    @property
    def load_error(self) -> ModelError | None:
        """Why there is no session, once loading failed."""
        return self._load_error

    def wait_until_loaded(self, timeout_s: float | None = None) -> ChatSession:
        """Block until the model is loaded. Raises the ModelError that prevented it, or TimeoutError."""
        with self._changed:
            ready = self._changed.wait_for(lambda: self._session or self._load_error, timeout_s)
        if self._load_error is not None:
            raise self._load_error
        if not ready or self._session is None:
            raise TimeoutError(f"the model is not loaded after {timeout_s} s")
        return self._session

    def wait_until_idle(self, timeout_s: float | None = None) -> bool:
        """Block until nothing is waiting, neither a reply nor a chat to be warmed nor idle work; False on
        time-out."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._idle and not (self._jobs or self._opened or self._idle_work), timeout_s
            )

    def check_room(self) -> None:
        """Raises QueueFull, or the ModelError of a failed load: called before a message is stored."""
        if self._load_error is not None:
            raise self._load_error
        with self._changed:
            if len(self._queue) >= MAX_WAITING:
                raise QueueFull("Too many replies are waiting; your text is kept, send it again in a minute.")

    def submit(self, task: Task) -> None:
        """Put a task in its owner's line; while the app is closing it ends as stopped instead."""
        with self._changed:
            if self._closing:
                task.job.request_stop()
                self._end_unstarted(task)
                return
            self._queue.push(task)
            self._jobs[task.job.conversation_id] = task.job
            self._tell_positions()
            self._changed.notify_all()

    def job_of(self, conversation_id: str) -> Job | None:
        """The waiting or running job of a conversation."""
        with self._changed:
            return self._jobs.get(conversation_id)

    def jobs_of(self, owner: str) -> list[Job]:
        """The waiting and running jobs of one owner."""
        with self._changed:
            return [job for job in self._jobs.values() if job.owner == owner]

    def warm(self, conversation: Conversation) -> None:
        """Warm a conversation once nothing is waiting; of each owner only the one that was opened last."""
        with self._changed:
            self._opened[conversation.owner] = conversation
            self._changed.notify_all()

    def when_idle(self, work: IdleWork) -> None:
        """Do this once nothing else is waiting."""
        with self._changed:
            self._idle_work.setdefault(work.name, work)
            self._changed.notify_all()

    @property
    def idle_work(self) -> frozenset[str]:
        """The names of idle work that waits or is being done."""
        with self._changed:
            return frozenset(self._idle_work)

    def stop(self, conversation_id: str) -> None:
        """End a conversation's reply: at once when it waits, within one token when it is being written."""
        with self._changed:
            job = self._jobs.get(conversation_id)
            if job is None:
                return
            job.request_stop()
            waiting = self._queue.remove(job)
            if waiting is not None:
                del self._jobs[conversation_id]
                self._tell_positions()
        if waiting is not None:
            self._end_unstarted(waiting)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop what runs, end what waits as stopped, and wait for the thread."""
        with self._changed:
            self._closing = True
            for conversation_id in list(self._jobs):
                self.stop(conversation_id)
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _work(self) -> None:
        self._load_session()
        while (work := self._next()) is not None:
            if isinstance(work, Conversation):
                self._warm(work)
                continue
            if isinstance(work, IdleWork):
                self._do_idle_work(work)
                continue
            self._do(work)
            with self._changed:
                self._running = None
                if self._jobs.get(work.job.conversation_id) is work.job:
                    del self._jobs[work.job.conversation_id]
                self._tell_positions()
        self._save_rest()

    def _save_rest(self) -> None:
        try:
            if self._session is not None:
                self._session.save_rest()
        except Exception:  # caches are disposable; whatever else is closed after this must be
            log.exception("what was left of the caches could not be saved")

    def _next(self) -> Task | Conversation | IdleWork | None:
        """Wait for the next reply, or else for a conversation to warm, or else for idle work; None at the
        end."""
        with self._changed:
            self._idle = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_wanted() or self._idle_work)
            self._idle = False
            if len(self._queue):
                task = self._queue.pop()
                self._running = task.job
                self._tell_positions()
                return task
            if self._closing:
                return None
            if self._opened:
                return self._opened.pop(next(iter(self._opened)))
            return next(iter(self._idle_work.values()))

    def _is_wanted(self) -> bool:
        """Whether there is something that idle work must not delay."""
        with self._changed:
            return bool(len(self._queue) or self._opened or self._closing)

    def _do_idle_work(self, work: IdleWork) -> None:
        is_done = True
        try:
            if self._session is not None:
                is_done = work.do(self._session, lambda: not self._is_wanted())
        except Exception as error:  # nobody waits for it, and everybody needs this thread
            log_and_release(error, work.name)
        with self._changed:
            if is_done:
                del self._idle_work[work.name]
            self._changed.notify_all()

    def _warm(self, conversation: Conversation) -> None:
        if self._session is None:
            return
        try:
            self._session.warm(conversation)
        except Exception:  # a convenience must not end the thread that everybody's replies need
            log.exception("a chat could not be warmed")

    def _load_session(self) -> None:
        error: ModelError | None = None
        session: ChatSession | None = None
        try:
            session = self._load()
        except ModelError as expected:
            log.error("%s", expected)  # who started the app looks at the terminal
            error = expected
        except BaseException as unexpected:  # the page must say why, whatever it was
            log.exception("the model could not be loaded")
            error = ModelUnusable(
                f"The model could not be loaded ({named(unexpected)}); your chats are"
                " kept, start the app with another --model."
            )
        with self._changed:
            self._session, self._load_error = session, error
            self._changed.notify_all()

    def _do(self, task: Task) -> None:
        job = task.job
        if self._session is None:
            self._fail_unstarted(task, self._load_error or ModelError("No model is loaded."))
            return
        try:
            events = self._session.advance(
                task.conversation,
                task.reply,
                origin=task.origin,
                stop=lambda: job.stop_requested,
                queue_s=time.monotonic() - job.created_at,
            )
            for event in events:
                self._publish(job, event)
        except (
            BaseException
        ) as error:  # `advance` promises not to raise; a waiting page must not hang if it does
            log.exception("a reply ended without a result")
            sentence = sentence_for(error)
            self._finish_row(task, status="failed", finish_reason="error", error=sentence)
            self._free(job)
            job.publish(state="failed", error=sentence)

    def _publish(self, job: Job, event: Reading | Delta | Ended) -> None:
        match event:
            case Reading(num_read, num_to_read):
                job.publish(state="prefill", position=0, num_read=num_read, num_to_read=num_to_read)
            case Delta(text):
                job.publish(state="decode", text=job.view.text + text)
            case Ended(status, text, error, stats):
                self._free(job)
                job.publish(state=status, text=text, error=error, stats=stats)

    def _free(self, job: Job) -> None:
        """From here on the conversation takes a new message: told before anybody sees the job ended."""
        with self._changed:
            if self._jobs.get(job.conversation_id) is job:
                del self._jobs[job.conversation_id]

    def _tell_positions(self) -> None:
        loading = self._session is None and self._load_error is None
        ahead = 0 if self._running is None else 1
        for position, task in enumerate(self._queue.in_order(), start=ahead):
            task.job.publish(state="loading" if loading and position == 0 else "queued", position=position)

    def _end_unstarted(self, task: Task) -> None:
        self._finish_row(task, status="stopped", finish_reason="stopped", error=None)
        task.job.publish(state="stopped")

    def _fail_unstarted(self, task: Task, error: ChatError) -> None:
        self._finish_row(task, status="failed", finish_reason="error", error=str(error))
        self._free(task.job)
        task.job.publish(state="failed", error=str(error))

    def _finish_row(self, task: Task, *, status: str, finish_reason: str, error: str | None) -> None:
        reply, text = task.reply, task.job.view.text
        try:
            self._store.finish_reply(
                reply.id,
                token_ids=reply.token_ids if text == reply.text else (),
                text=text,
                status=status,  # pyright: ignore[reportArgumentType]
                finish_reason=finish_reason,
                error=error,
                stats={},
            )
        except StoreError as store_error:
            log.error("a reply could not be closed: %s", store_error)

"""Run the user's code in worker processes: code that hangs or crashes costs its own work only.

`WorkerPool.call` returns the result of a piece of work, a task, or raises TaskFailed with one of
these reasons:
  * `exception`: the code raised;
  * `timeout`: it took too long, or did not let its process go on. What it started ends with it;
  * `died`: its process ended (out of memory, `os._exit`), or wrote to the pool's pipe itself;
  * `bad_result`: it returned something that cannot be used.

A worker that is silent for `silence_s` while it has work is killed, and a killed or dead worker is
replaced. The task that it was executing fails. Its other tasks restart in another worker, where a
question that they repeat gets the same answer. Workers of a `sequential` pool execute one task
after the other.

Other pools are concurrent: their workers interleave many tasks, and mark in shared memory the task
that is executing (marks.py). If a worker dies with no mark or several, each task that may be the
cause is suspected, and fails when it is suspected too often. A worker that is late keeps the task
that it is executing; its others restart elsewhere before it is killed.

If a replacement cannot start, the pool shrinks; an empty pool raises RuntimeError. Nothing of a
process outlives the pool or the pool's own process (process.py).
"""

import asyncio
import hashlib
import logging
import math
import os
import pickle
import re
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import count
from textwrap import indent
from typing import Any

import msgspec

from areal_lite.system.processes import ending, visible
from areal_lite.workers import process

log = logging.getLogger(__name__)
_START_TIMEOUT_S = 120.0
_START_ATTEMPTS = 3
_CLOSE_S = 5.0
# Replies may have come while the event loop was busy: they are read before a time-out is believed.
_RECHECK_S = 0.02
LATE_S = 3.0  # a worker that executes many tasks at once gives a sign of life more often than this
# A task that was suspected this often fails. After this many restarts it stays with a late worker.
_MOST_SUSPECTED, _MOST_MOVED = 3, 2
_MOST_QUESTIONS = 10_000  # only an endless task asks more
# Workers may print a burst to the log, and then so much a second. Faster ones have to wait.
_OUTPUT_BYTES, _OUTPUT_BYTES_PER_S = 1 << 20, 1 << 16
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')
_DECODER = msgspec.msgpack.Decoder(process.ToPool)
Answering = Callable[[msgspec.Raw], Coroutine[Any, Any, msgspec.Raw]]
"""Answers a question of a task, or raises an error that the task is told."""
Question = tuple[bytes, asyncio.Task[msgspec.Raw]]
"""The digest of a question, and its answer."""


async def _refuse() -> msgspec.Raw:
    raise ValueError(f"it has asked {_MOST_QUESTIONS} questions")


class TaskFailed(Exception):
    """A task has no result; `reason` is one of the module's list."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(slots=True, kw_only=True, eq=False)
class Task:
    """A piece of work, with its body encoded, and the future of its result."""

    number: int
    body: msgspec.Raw
    limit_s: float
    result: asyncio.Future[msgspec.Raw]
    name: str
    answer: Answering | None  # answers its questions
    suspected: int = 0
    restarts: int = 0
    asked: list[Question] = field(default_factory=list)
    unclaimed: list[Question] = field(default_factory=list)  # not repeated since its restart

    def ask(self, body: msgspec.Raw) -> asyncio.Task[msgspec.Raw]:
        """Begin to answer a question. Raises ValueError if the task must not ask."""
        if self.answer is None:
            raise ValueError("it asked something")
        question = hashlib.blake2b(bytes(body), digest_size=16).digest()
        if known := next((one for one in self.unclaimed if one[0] == question), None):
            self.unclaimed.remove(known)
        elif len(self.asked) == _MOST_QUESTIONS:
            return asyncio.create_task(_refuse())
        else:
            known = question, asyncio.create_task(self.answer(body))
            self.asked.append(known)
        return known[1]


class WorkerProcess:
    """One worker process, forked by the pool's template.

    `tasks` were sent to it, in order; in a sequential pool the first of them is executing. `ready`
    resolves to an error message, or None if the worker can be used; `gone` resolves when the
    process has ended, with `status`. That is None if its keeper did not report any.
    """

    def __init__(self, pool: "WorkerPool") -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[str | None] = self._loop.create_future()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self.tasks: dict[int, Task] = {}
        self.facts: dict[str, Any] = {}
        self.oldest = process.Beat()
        self.started = False
        self._retired = False
        self._was_late = False  # since its last sign of life
        self.lingers = False  # it was late, and another one has its place
        self._received = bytearray()
        # When the current wait began: for Ready, or for a sign of life while it has tasks.
        self.waiting_since = self._loop.time()
        self._watchdog: asyncio.TimerHandle | None = None
        self._output_left, self._output_at = float(_OUTPUT_BYTES), self._loop.time()
        self._unsent = bytearray()
        self.status: int | None = None
        self._file = tempfile.TemporaryFile()
        self._file.truncate(process.MARKS_BYTES)
        (self._frames, frames), (self._control, control) = socket.socketpair(), socket.socketpair()
        printed, stderr = os.pipe()
        self._printed = open(printed, "rb", 0)
        with frames, control, open(stderr, "wb", 0) as output:
            pool.template.fork(control, frames, output, self._file)
        self._frames.setblocking(False)
        # The process has ended when all of these have.
        ends: dict[Any, Callable[[bytes], None]] = {
            self._control: self._on_status,
            self._frames: self._on_frames,
            self._printed: self._on_print,
        }
        self._readers = {end: partial(self._read, end, then) for end, then in ends.items()}
        for end, reader in self._readers.items():
            self._loop.add_reader(end, reader)
        self._pool.workers.append(self)
        self._watch()

    @property
    def usable(self) -> bool:
        out = self._retired or self.lingers or self._frames not in self._readers
        return self.started and not out

    @property
    def is_late(self) -> bool:
        """Return whether the process should have given a sign of life."""
        return bool(self.tasks) and self._loop.time() - self.waiting_since > LATE_S

    def send(self, task: Task) -> None:
        self.tasks[task.number] = task
        if len(self.tasks) == 1:
            self.waiting_since = self._loop.time()
            if self._watchdog is None:
                self._watch()
        # Others may end its process again and again, and it must end, too.
        limit_s = task.limit_s / (1 + task.restarts)
        self._write(process.Request(number=task.number, body=task.body, limit_s=limit_s))

    def _write(self, *messages: process.ToWorker) -> None:
        """Send as much as the socket takes, and the rest later."""
        self._unsent += b"".join(map(process.frame, messages))
        try:
            while self._unsent:
                del self._unsent[: self._frames.send(self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(self._frames, self._write)
            return
        except OSError:  # it has ended, which may come before its exit is known
            self._unsent.clear()
        if self._frames in self._readers:
            self._loop.remove_writer(self._frames)

    def cancel(self, task: Task) -> None:
        """Tell the process that nobody waits for its result of `task`."""
        if task.number in self.tasks:
            self._write(process.Cancel(number=task.number))

    def finish(self) -> asyncio.Future[None]:
        """Have the process end by itself, and return its `gone`. It gets no more tasks."""
        self._retire()
        with suppress(OSError):  # it has ended
            self._frames.shutdown(socket.SHUT_WR)
        return self.gone

    def stop(self, reason: str | None = None, detail: str = "") -> None:
        """Kill the process and everything that it started; its tasks go back to the pool.

        With a `reason`, the tasks that it executes fail for it.
        """
        self._retire(reason, detail)
        with suppress(OSError):  # it has ended
            self._control.shutdown(socket.SHUT_WR)

    def _read(self, end: Any, then: Callable[[bytes], None]) -> None:
        """Read from one of its ends, and report the end of the process after all of its output."""
        with suppress(ConnectionResetError):  # it did not read all that it was sent
            while data := os.read(end.fileno(), 1 << 18):
                then(data)
                # uvloop does not call again for a socket in error, whatever can be read from it.
                if end is self._printed or not end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    return
        self._loop.remove_reader(end)
        self._loop.remove_writer(end)
        del self._readers[end]
        end.close()
        self._hear()
        if not self._readers:
            how = "died with its keeper" if self.status is None else ending(self.status)
            self._retire("died", f"its process {how}")
            self._pool.workers.remove(self)
            self._file.close()
            self.gone.set_result(None)

    def _on_status(self, data: bytes) -> None:
        (self.status,) = process.STATUS.unpack(data)

    def _on_frames(self, data: bytes) -> None:
        if self._retired:
            return
        self._received += data
        try:
            for body in process.take_frames(self._received):
                self._on_message(_DECODER.decode(body))
                if self._retired:
                    return
            if self._pool.sequential and self._received and self.started and not self.tasks:
                raise ValueError("it sent something without a request")
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            self.stop("died", f"its process did not keep to the protocol: {error}")
        self._pool.dispatch()

    def _on_print(self, data: bytes) -> None:
        """Write what the code printed to the log, and stop reading while it prints too fast."""
        text = visible(data.decode(errors="replace")).removesuffix("\n")
        print(indent(text, "    "), file=sys.stderr, flush=True)  # no text can look like an entry
        now = self._loop.time()
        left = self._output_left + (now - self._output_at) * _OUTPUT_BYTES_PER_S
        self._output_left, self._output_at = min(left, _OUTPUT_BYTES) - len(data), now
        if self._output_left < 0 and self._control in self._readers:
            self._loop.remove_reader(self._printed)
            self._loop.call_later(-self._output_left / _OUTPUT_BYTES_PER_S, self._hear)

    def _hear(self) -> None:
        if reader := self._readers.get(self._printed):
            self._loop.add_reader(self._printed, reader)

    def _on_message(self, message: process.ToPool) -> None:
        """Take one message. Raises ValueError if it is out of order."""
        if isinstance(message, process.Ready) or not self.started:
            self._on_ready(message)
            return
        self.waiting_since = self._loop.time()  # the next task began when this one ended
        self._was_late = False
        if isinstance(message, process.Beat):
            self.oldest = message
            return
        due = list(self.tasks)[:1] if self._pool.sequential else self.tasks
        if message.number not in due:
            if self.lingers:
                return  # another worker has the task
            raise ValueError(f"it answered request {message.number}, which it does not have")
        if isinstance(message, process.Ask):
            task = self.tasks[message.number]
            task.ask(message.body).add_done_callback(partial(self._answer, message.call))
            return
        self._pool.settle(self.tasks.pop(message.number), message)
        is_stuck = isinstance(message, process.Failed) and message.is_stuck
        if is_stuck or (self.lingers and not self.tasks):
            self.stop()

    def _answer(self, call: int, answer: asyncio.Task[msgspec.Raw]) -> None:
        # A task that has ended may have left code behind that would wait for ever.
        error = "its episode has ended" if answer.cancelled() else answer.exception()
        failed = {"error": process.short_text("{}", error)}
        reply: dict[str, Any] = failed if error else {"body": answer.result()}
        self._write(process.Answer(call=call, **reply))

    def _on_ready(self, message: process.ToPool) -> None:
        if self.ready.done() or not isinstance(message, process.Ready):
            raise ValueError("it was ready before, or never")
        if self._watchdog:
            self._watchdog.cancel()
            self._watchdog = None
        self.started = message.error is None
        self.facts = message.facts
        self.ready.set_result(message.error)

    def _watch(self, overdue_since: float | None = None) -> None:
        """Kill the process if the current wait exceeds its limit at two checks in a row.

        The pipe is read between the two. `overdue_since` is the wait that the previous check found
        overdue. One timer serves many tasks: it is set again if the wait began after it was set.
        """
        self._watchdog = None
        if self.started and not self.tasks:
            return
        may_linger = self.started and not self._pool.sequential and not self._was_late
        limit_s = self._pool.silence_s if self.started else _START_TIMEOUT_S
        if may_linger:
            limit_s = min(LATE_S, limit_s)
        remaining_s = self.waiting_since + limit_s - self._loop.time()
        if remaining_s > 0:
            self._watchdog = self._loop.call_later(remaining_s, self._watch)
        elif overdue_since != self.waiting_since:
            self._watchdog = self._loop.call_later(_RECHECK_S, self._watch, self.waiting_since)
        elif may_linger:
            self._linger()
        else:
            what = "it ran" if self._pool.sequential else "it blocked its process"
            self.stop("timeout", f"{what} for longer than {limit_s:g} s")

    def _linger(self) -> None:
        """Have another worker take the place of this one, with the tasks that it is not executing.

        If it does not say which one it is executing, all stay.
        """
        self._was_late, marked = True, self._marked()
        if marked and not self.lingers:
            self.lingers = True
            others = [task for task in self.tasks.values() if task not in marked]
            moving = [task for task in others if task.restarts < _MOST_MOVED]
            for task in moving:
                self.cancel(task)
                del self.tasks[task.number]
            self._pool.on_retired(self, moving)
        limit_s = self._pool.silence_s - LATE_S
        self._watchdog = self._loop.call_later(limit_s, self._watch, self.waiting_since)

    def _retire(self, reason: str | None = None, detail: str = "") -> None:
        """Take the worker out of service; `reason` is as in `stop`."""
        if self._retired:
            return
        self._retired = True
        if self._watchdog:
            self._watchdog.cancel()
        if not self.ready.done():
            who = f"a worker of {self._pool.name}"
            self.ready.set_result(f"{who} cannot start: {detail}; see its error output")
        seconds = self._loop.time() - self.waiting_since
        if reason and (guilty := self._guilty()):
            detail += f" at {place}" if (place := self._last_place()) else ""
            for task in guilty:
                failed = process.Failed(
                    number=task.number, seconds=seconds, reason=reason, detail=detail
                )
                self._pool.settle(self.tasks.pop(task.number), failed)
        unfinished = list(self.tasks.values())
        self.tasks.clear()
        self._pool.on_retired(self, unfinished, replace=not self.lingers)

    def _guilty(self) -> list[Task]:
        """Return the tasks that end with the process."""
        if self._pool.sequential:
            return list(self.tasks.values())[:1]
        if len(marked := self._marked()) == 1:
            return list(marked)
        suspects = marked or self.tasks.values()
        for task in suspects:
            task.suspected += 1
        return [task for task in suspects if task.suspected == _MOST_SUSPECTED]

    def _marked(self) -> set[Task]:
        """Return the tasks that the process says it is executing."""
        marks = process.MARKS.unpack(os.pread(self._file.fileno(), process.MARKS_BYTES, 0))
        return {self.tasks[mark] for mark in marks if mark in self.tasks}

    def _last_place(self) -> str:
        """Return where the process was blocked or crashed, if it wrote that to its file."""
        dump = os.pread(self._file.fileno(), 1 << 16, process.MARKS_BYTES).decode(errors="replace")
        crashed = dump.partition("Current thread")[2].partition("\n\n")[0]
        stack = crashed or dump.rpartition("Thread 0x")[2]  # of the first thread
        places = [(file, int(line), name) for file, line, name in _FRAME.findall(stack)]
        return process.place_of(places)


@dataclass(eq=False, repr=False)
class WorkerPool:
    """A pool of `size` processes that execute tasks: `python -m module`, which loads `setup`."""

    name: str  # the code that it runs, in messages
    module: str
    setup: tuple[Any, ...]
    _: KW_ONLY
    size: int
    silence_s: float
    sequential: bool

    def __post_init__(self) -> None:
        self.template = process.Template(self.module, pickle.dumps((self.size, self.setup)))
        self.workers: list[WorkerProcess] = []
        self.facts: dict[str, Any] = {}  # what its workers serve
        self._queue: deque[Task] = deque()
        self._numbers = count(1)
        self._replacements: set[asyncio.Task[None]] = set()
        self._unusable: str | None = f"the workers of {self.name} have not been started"

    async def __aenter__(self) -> Any:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Wait until every worker is set up. Raises ValueError if one cannot be."""
        self._unusable = None
        try:
            await asyncio.gather(*(self._start_worker() for _ in range(self.size)))
        except BaseException:
            await self.close()
            raise
        self.facts = self.workers[0].facts

    async def close(self) -> None:
        """Kill all processes and wait for their end; unfinished tasks raise RuntimeError."""
        self._unusable = f"the workers of {self.name} are closed"
        workers = list(self.workers)
        if not self.sequential and workers:  # the user's code may have something to close
            await asyncio.wait([worker.finish() for worker in workers], timeout=_CLOSE_S)
        for worker in workers:
            worker.stop()
        self._fail_queue()
        await asyncio.gather(*self._replacements, *(worker.gone for worker in workers))
        self.template.end()

    async def call(
        self, body: Any, name: str = "", limit_s: float = math.inf, answer: Answering | None = None
    ) -> msgspec.Raw:
        """Return the result of a task, which may take `limit_s` in a concurrent worker.

        Raises TaskFailed if this task fails, RuntimeError if the pool cannot be used.
        """
        if self._unusable:
            raise RuntimeError(self._unusable)
        try:
            packed = process.pack(body)
        except (UnicodeEncodeError, OverflowError) as error:  # half a pair, or 65 bits
            raise TaskFailed("exception", f"the text cannot be encoded: {error}") from None
        task = Task(
            number=next(self._numbers),
            body=packed,
            limit_s=limit_s,
            result=asyncio.get_running_loop().create_future(),
            name=name,
            answer=answer,
        )
        self._queue.append(task)
        self.dispatch()
        try:
            return await task.result
        finally:
            for _, asked in task.asked:
                asked.cancel()
            if task.result.cancelled():
                for worker in self.workers:
                    worker.cancel(task)

    def depth(self) -> int:
        """Return how many tasks a worker may have at a time."""
        return sys.maxsize

    def dispatch(self) -> None:
        """Send waiting tasks to the least busy workers that are not late."""
        while self._queue:
            usable = (worker for worker in self.workers if worker.usable)
            worker = min(usable, key=lambda w: (w.is_late, len(w.tasks)), default=None)
            if worker is None or len(worker.tasks) >= self.depth():
                return
            if not (task := self._queue.popleft()).result.cancelled():
                worker.send(task)

    def settle(self, task: Task, reply: process.Done | process.Failed) -> None:
        if task.result.done():
            return  # the caller was cancelled
        if isinstance(reply, process.Done):
            task.result.set_result(reply.body)
        else:
            task.result.set_exception(TaskFailed(reply.reason, f"{self.name}: {reply.detail}"))

    def place(self, name: str) -> str:
        """Return where the task of this name waits, if its worker has said so."""
        for worker in self.workers:
            task = worker.tasks.get(worker.oldest.oldest)
            if task and task.name == name:
                return worker.oldest.where
        return ""

    def on_retired(self, worker: WorkerProcess, tasks: list[Task], replace: bool = True) -> None:
        """Take back the tasks that a worker had not finished; replace it if it ever worked."""
        self._queue.extendleft(reversed(tasks))
        for task in tasks:
            task.restarts += 1
            task.unclaimed = list(task.asked)
        if self._unusable:  # the last worker has ended: it was late, and has no successor
            self._fail_queue()
        if replace and worker.started and not self._unusable:
            replacing = asyncio.get_running_loop().create_task(self._replace())
            self._replacements.add(replacing)
            replacing.add_done_callback(self._replacements.discard)
            self.dispatch()

    async def _start_worker(self) -> None:
        attempts, error = _START_ATTEMPTS, self._unusable
        while attempts and not self._unusable:
            worker = WorkerProcess(self)
            if (error := await worker.ready) is None:
                return self.dispatch()
            await worker.gone
            attempts = attempts - 1 if worker.status is None else 0
        raise ValueError(error)

    async def _replace(self) -> None:
        try:
            await self._start_worker()
        except (ValueError, OSError) as error:
            if self._unusable:
                return  # close() stopped it while it started
            log.error("cannot replace a worker of %s: %s", self.name, error)
            self.size -= 1
            if self.size == 0:
                self._unusable = f"no worker of {self.name} is left, and none can start: {error}"
                self._fail_queue()

    def _fail_queue(self) -> None:
        while self._queue:
            if not (task := self._queue.popleft()).result.done():
                task.result.set_exception(RuntimeError(self._unusable))

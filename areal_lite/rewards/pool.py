"""Rewards computed in worker processes: a verifier that hangs or crashes costs one sample only.

`score` returns a finite float or raises RewardError with one of these reasons:
  * `exception`: the function raised;
  * `timeout`: it ran for longer than `timeout_s`. All that its process started is killed with it;
  * `died`: its process ended (out of memory, `os._exit`), or wrote to the pool's pipe itself;
  * `bad_result`: it returned something other than a finite number.

The time-out counts from the start of a sample's execution, however long the sample waited. Samples
behind it are executed elsewhere, once. A killed or dead process is replaced. If a replacement
cannot start, the pool shrinks; an empty pool raises RuntimeError. Nothing of a process outlives the
pool or the pool's own process (worker.py).

Start the pool in a thread that lasts: the kernel kills children with the thread that made them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import cast

import msgspec

from areal_lite.rewards.worker import Ready, Reply, Request, frame, take_frames
from areal_lite.system.processes import dying_with_me

log = logging.getLogger(__name__)
# Tells a reward function its own limit.
ENV_TIMEOUT_S = "AREAL_LITE_REWARD_TIMEOUT_S"
_START_TIMEOUT_S = 120.0
# Replies may have come while the event loop was busy: they are read before a time-out is believed.
_RECHECK_S = 0.02


@dataclass(slots=True)
class Sample:
    """A request, encoded, and the future of its reward."""

    number: int
    data: bytes
    result: asyncio.Future[float]


class WorkerProcess(asyncio.SubprocessProtocol):
    """One worker process.

    `samples` were sent to it, in order; the first of them is executing. `ready` resolves to an
    error message, or None if the worker can be used; `gone` resolves when the process has ended.
    """

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[str | None] = self._loop.create_future()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self.samples: deque[Sample] = deque()
        self.started = False
        self._retired = False
        self._received = bytearray()
        # When the current wait began: for Ready, or for the reply to the first sample.
        self._waiting_since = 0.0
        self._watchdog: asyncio.TimerHandle | None = None

    async def spawn(self) -> None:
        """Start the process. It dies with the calling thread."""
        await self._loop.subprocess_exec(
            lambda: self,
            *(sys.executable, "-m", "areal_lite.rewards.worker", self._pool.function),
            stderr=None,
            start_new_session=True,  # Ctrl-C reaches the pool's process only
            env={
                **os.environ,
                **dying_with_me(),
                ENV_TIMEOUT_S: str(self._pool.timeout_s),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
        )

    @property
    def usable(self) -> bool:
        return self.started and not self._retired and self._transport.get_returncode() is None

    def send(self, sample: Sample) -> None:
        self.samples.append(sample)
        if len(self.samples) == 1:
            self._waiting_since = self._loop.time()
            if self._watchdog is None:
                self._watch()
        self._stdin.write(sample.data)

    def stop(self) -> None:
        """Kill the process and everything that it started; its samples go back to the pool."""
        self._retire()
        self._kill()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._pool.workers.append(self)
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self._stdin = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))
        self._waiting_since = self._loop.time()
        self._watch()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if self._retired:
            return
        self._received += data
        try:
            for body in take_frames(self._received):
                self._on_message(body)
            if self._received and self.started and not self.samples:
                raise ValueError("it sent something without a request")
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            self._fail("died", f"its process did not keep to the protocol: {error}")
        self._pool.dispatch()

    def process_exited(self) -> None:
        if not self._stdin.is_closing():
            self._stdin.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the process, after all of its output."""
        self._retire("died", f"its process ended with status {self._transport.get_returncode()}")
        if not self.ready.done():
            self.ready.set_result(
                f"a worker of {self._pool.function} ended while it was starting;"
                " see its error output"
            )
        self._pool.workers.remove(self)
        self.gone.set_result(None)

    def _on_message(self, body: bytes) -> None:
        """Take one message. Raises ValueError if it is out of order."""
        if not self.started:
            self._on_ready(msgspec.msgpack.decode(body, type=Ready))
            return
        reply = msgspec.msgpack.decode(body, type=Reply)
        if not self.samples or reply.number != self.samples[0].number:
            raise ValueError(f"there is no request for its reply {reply.number}")
        self._waiting_since = self._loop.time()  # the next sample began when this one ended
        self._pool.settle(self.samples.popleft(), reply)

    def _on_ready(self, message: Ready) -> None:
        if self.ready.done():
            raise ValueError("it was ready before")
        if self._watchdog:
            self._watchdog.cancel()
            self._watchdog = None
        self.started = message.error is None
        self.ready.set_result(message.error)

    def _watch(self, overdue_since: float | None = None) -> None:
        """Kill the process if the current wait exceeds its limit at two checks in a row.

        The pipe is read between the two. `overdue_since` is the wait that the previous check found
        overdue. One timer serves many samples: it is set again if the wait began after it was set.
        """
        self._watchdog = None
        if self.started and not self.samples:
            return
        limit_s = self._pool.timeout_s if self.started else _START_TIMEOUT_S
        remaining_s = self._waiting_since + limit_s - self._loop.time()
        if remaining_s > 0:
            self._watchdog = self._loop.call_later(remaining_s, self._watch)
        elif overdue_since != self._waiting_since:
            self._watchdog = self._loop.call_later(_RECHECK_S, self._watch, self._waiting_since)
        else:
            self._fail("timeout", f"it ran for longer than {limit_s:g} s")

    def _fail(self, reason: str, detail: str) -> None:
        """End the process because of the sample that it executes, or of its start."""
        if not self.ready.done():
            self.ready.set_result(f"a worker could not load {self._pool.function}: {detail}")
        self._retire(reason, detail)
        self._kill()

    def _retire(self, reason: str | None = None, detail: str = "") -> None:
        """Take the worker out of service; with a `reason`, the executing sample fails for it."""
        if self._retired:
            return
        self._retired = True
        if self._watchdog:
            self._watchdog.cancel()
        if reason and self.samples:
            seconds = self._loop.time() - self._waiting_since
            sample = self.samples.popleft()
            reply = Reply(number=sample.number, seconds=seconds, reason=reason, detail=detail)
            self._pool.settle(sample, reply)
        self._pool.on_retired(self, list(self.samples))
        self.samples.clear()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):  # it has ended
            self._transport.terminate()


# A worker gets samples ahead only if they take less time than a switch between processes.
_PIPELINE_DEPTH = 8
_PIPELINE_BELOW_S = 1e-3


class RewardError(Exception):
    """One sample has no reward; `reason` is one of the module's list."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class RewardPool:
    """`workers` processes that call the reward function `module:function`."""

    def __init__(self, function: str, workers: int = 1, timeout_s: float = 15.0) -> None:
        self.function = function
        self.timeout_s = timeout_s
        self.workers: list[WorkerProcess] = []
        self._size = workers
        self._queue: deque[Sample] = deque()
        self._numbers = count()
        self._replacements: set[asyncio.Task[None]] = set()
        self._unusable: str | None = "the reward pool has not been started"
        # Moving average of execution times; assume slow samples at first.
        self._mean_s = 1.0

    async def __aenter__(self) -> RewardPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Wait until every worker has loaded the function. Raises ValueError if one cannot."""
        self._unusable = None
        try:
            outcomes = await asyncio.gather(
                *(self._start_worker() for _ in range(self._size)), return_exceptions=True
            )
            for error in filter(None, outcomes):
                raise error
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Kill all processes and wait for their end; unfinished samples raise RuntimeError."""
        self._unusable = "the reward pool is closed"
        workers = list(self.workers)
        for worker in workers:
            worker.stop()
        self._fail_queue()
        await asyncio.gather(*self._replacements, *(worker.gone for worker in workers))

    async def score(self, completion: str, answer: str) -> float:
        """Return the reward of a completion.

        Raises RewardError if this sample fails, RuntimeError if the pool cannot be used.
        """
        if self._unusable:
            raise RuntimeError(self._unusable)
        number = next(self._numbers)
        try:
            data = frame(Request(number, completion, answer))
        except UnicodeEncodeError as error:
            raise RewardError("exception", f"the text cannot be encoded: {error}") from None
        result = asyncio.get_running_loop().create_future()
        self._queue.append(Sample(number, data, result))
        self.dispatch()
        return await result

    def dispatch(self) -> None:
        """Send waiting samples to the least busy workers."""
        depth = _PIPELINE_DEPTH if self._mean_s < _PIPELINE_BELOW_S else 1
        while self._queue:
            usable = (worker for worker in self.workers if worker.usable)
            worker = min(usable, key=lambda w: len(w.samples), default=None)
            if worker is None or len(worker.samples) >= depth:
                return
            sample = self._queue.popleft()
            if not sample.result.cancelled():
                worker.send(sample)

    def settle(self, sample: Sample, reply: Reply) -> None:
        """Give a sample its result."""
        self._mean_s += 0.1 * (reply.seconds - self._mean_s)
        if sample.result.done():
            return  # the caller was cancelled
        if reply.reward is not None:
            sample.result.set_result(reply.reward)
        else:
            error = RewardError(str(reply.reason), f"{self.function}: {reply.detail}")
            sample.result.set_exception(error)

    def on_retired(self, worker: WorkerProcess, unbegun: list[Sample]) -> None:
        """Take back the samples that a worker had not begun; replace it if it ever worked."""
        self._queue.extendleft(reversed(unbegun))
        if worker.started and not self._unusable:
            task = asyncio.get_running_loop().create_task(self._replace())
            self._replacements.add(task)
            task.add_done_callback(self._replacements.discard)
            self.dispatch()

    async def _start_worker(self) -> None:
        worker = WorkerProcess(self)
        await worker.spawn()
        if self._unusable:
            worker.stop()
        error = await worker.ready
        if error:
            await worker.gone
            raise ValueError(error)
        self.dispatch()

    async def _replace(self) -> None:
        try:
            await self._start_worker()
        except (ValueError, OSError) as error:
            if self._unusable:
                return  # close() stopped it while it started
            log.error("cannot replace a reward worker: %s", error)
            self._size -= 1
            if self._size == 0:
                self._unusable = f"no reward worker is left, and a new one cannot start: {error}"
                self._fail_queue()

    def _fail_queue(self) -> None:
        while self._queue:
            sample = self._queue.popleft()
            if not sample.result.done():
                sample.result.set_exception(RuntimeError(self._unusable))

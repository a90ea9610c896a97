"""Rewards computed in processes that can be killed, so that a verifier that hangs or crashes costs one sample and not the run.

Contract: `score` returns a finite float or raises `RewardError` with a reason:

  * `exception`   the function raised;
  * `timeout`     it ran for longer than `timeout_s`: its process, and what that started, was killed and replaced;
  * `died`        its process ended under it (out of memory, `os._exit`), and was replaced;
  * `bad_result`  it returned something that is not a finite number.

Invariants: the time-out counts from when a sample begins to execute, however long it waited; only the sample that was executing fails
with its process, those behind it are executed elsewhere; a process outlives neither the pool nor the process that owns it. A process that
cannot even start is not replaced, and a pool with none left raises RuntimeError: that is the run's failure, not a sample's.
Nothing here blocks the event loop. Start the pool in a thread that lasts as long as it: the kernel ties children to the thread that made them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec

from areal_lite.rewards.worker import Ready, Reply, Request, frame, take_frames
from areal_lite.system.processes import dying_with_me

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
# A worker is sent the next sample before it has finished one only while samples are shorter than a switch between processes is worth.
_PIPELINE_DEPTH = 8
_PIPELINE_BELOW_S = 1e-3
# Replies that came while the loop was busy are read before a time-out is believed.
_SECOND_LOOK_S = 0.02


class RewardError(Exception):
    """One sample has no reward; `reason` is `exception`, `timeout`, `died` or `bad_result`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass
class RewardStats:
    """Totals since the pool was made. `seconds`: of execution, failed samples included, summed over the workers."""

    scored: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    killed: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Sample:
    data: bytes
    result: asyncio.Future[float]


class RewardPool:
    """`workers` processes that call the reward function named `module:callable`; see the module's docstring."""

    def __init__(self, function: str, workers: int = 1, timeout_s: float = 15.0) -> None:
        if workers < 1:
            raise ValueError(f"reward.workers={workers}: at least one is needed")
        if timeout_s <= 0:
            raise ValueError(f"reward.timeout_s={timeout_s} must be positive")
        self.function = function
        self.timeout_s = timeout_s
        self.stats = RewardStats()
        self._size = workers
        self.workers: list[_Worker] = []
        self._queue: deque[_Sample] = deque()
        self._replacements: set[asyncio.Task[None]] = set()
        self._unusable: str | None = "the reward pool has not been started"
        self._mean_s = 1.0  # of an execution, over the last ones: slow until proven fast

    async def __aenter__(self) -> RewardPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Return when every worker has loaded the function. Raises ValueError, with no process left, if one cannot."""
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
        """Kill all processes and wait for their end. Samples that have no result yet get a RuntimeError."""
        self._unusable = "the reward pool is closed"
        workers = list(self.workers)
        for worker in workers:
            worker.stop()
        self._fail_queue()
        await asyncio.gather(*self._replacements, *(worker.gone for worker in workers))

    async def score(self, completion: str, answer: str) -> float:
        """The reward of a completion. Raises RewardError for a failure of this sample, RuntimeError for one of the pool."""
        if self._unusable:
            raise RuntimeError(self._unusable)
        sample = _Sample(
            frame(Request(completion, answer)), asyncio.get_running_loop().create_future()
        )
        self._queue.append(sample)
        self.dispatch()
        return await sample.result

    def dispatch(self) -> None:
        """Send waiting samples to the least busy workers."""
        depth = _PIPELINE_DEPTH if self._mean_s < _PIPELINE_BELOW_S else 1
        while self._queue:
            worker = min(
                (w for w in self.workers if w.usable), key=lambda w: len(w.samples), default=None
            )
            if worker is None or len(worker.samples) >= depth:
                return
            sample = self._queue.popleft()
            if not sample.result.cancelled():
                worker.send(sample)

    def settle(self, sample: _Sample, reply: Reply) -> None:
        """Give a sample its result."""
        self.stats.seconds += reply.seconds
        self._mean_s += 0.1 * (reply.seconds - self._mean_s)
        if reply.reason is None:
            self.stats.scored += 1
        else:
            self.stats.failed[reply.reason] += 1
        if sample.result.done():
            return  # whoever waited for it was cancelled
        if reply.reason is None:
            sample.result.set_result(reply.reward)
        else:
            sample.result.set_exception(
                RewardError(reply.reason, f"{self.function}: {reply.detail}")
            )

    def retire(self, worker: _Worker, unbegun: list[_Sample]) -> None:
        """A worker is of no more use: take back the samples that it had not begun, and start another one if it ever worked."""
        self._queue.extendleft(reversed(unbegun))
        if worker.started and not self._unusable:
            task = asyncio.get_running_loop().create_task(self._replace())
            self._replacements.add(task)
            task.add_done_callback(self._replacements.discard)
            self.dispatch()

    async def _start_worker(self) -> None:
        worker = _Worker(self)
        await asyncio.get_running_loop().subprocess_exec(
            lambda: worker,
            *(sys.executable, "-m", "areal_lite.rewards.worker", self.function),
            stderr=None,
            start_new_session=True,  # a process group of its own: killed whole, and deaf to a Ctrl-C that its owner handles
            env={
                **os.environ,
                **dying_with_me(),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
        )
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
            logger.error("cannot replace a reward worker: %s", error)
            self._size -= 1
            if self._size == 0 and not self._unusable:
                self._unusable = f"no reward worker is left, and a new one cannot start: {error}"
                self._fail_queue()

    def _fail_queue(self) -> None:
        while self._queue:
            sample = self._queue.popleft()
            if not sample.result.done():
                sample.result.set_exception(RuntimeError(self._unusable))


class _Worker(asyncio.SubprocessProtocol):
    """One process. `samples` are those that were sent to it, in order; the first of them is executing.

    It ends in two steps: first it is retired (no more use: stopped, timed out or dead), then `gone` (its process has been waited for).
    """

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[str | None] = (
            self._loop.create_future()
        )  # what is wrong with it, None if nothing
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self.samples: deque[_Sample] = deque()
        self.started = False
        self._retired = False
        self._received = bytearray()
        self._due_since = 0.0  # when what is expected of it next (to be ready, or a reply) began
        self._watchdog: asyncio.TimerHandle | None = None

    @property
    def usable(self) -> bool:
        return self.started and not self._retired and self._transport.get_returncode() is None

    def send(self, sample: _Sample) -> None:
        self.samples.append(sample)
        if len(self.samples) == 1:
            self._due_since = self._loop.time()
            if self._watchdog is None:
                self._look()
        self._stdin.write(sample.data)

    def stop(self) -> None:
        """End the process and all that it started; its samples go back to the pool."""
        self._retire()
        self._kill_group()

    def connection_made(self, transport: asyncio.SubprocessTransport) -> None:
        self._transport = transport
        self._pool.workers.append(self)
        self._stdin = transport.get_pipe_transport(0)
        self._due_since = self._loop.time()
        self._look()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if self._retired:
            return
        self._received += data
        for body in take_frames(self._received):
            if self.started:
                self._due_since = self._loop.time()  # the next one began when this one ended
                self._pool.settle(self.samples.popleft(), msgspec.msgpack.decode(body, type=Reply))
            else:
                error = msgspec.msgpack.decode(body, type=Ready).error
                self._watchdog.cancel()
                self._watchdog = None
                self.started = error is None
                self.ready.set_result(error)
        self._pool.dispatch()

    def process_exited(self) -> None:
        self._kill_group()  # what it has started may still hold its pipes, and would outlive it
        if not self._stdin.is_closing():
            self._stdin.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The process has ended and all that it wrote has been read."""
        self._retire("died", f"its process ended with status {self._transport.get_returncode()}")
        if not self.ready.done():
            self.ready.set_result(
                f"a worker of {self._pool.function} ended while it was starting; see its error output"
            )
        self._pool.workers.remove(self)
        self.gone.set_result(None)

    def _look(self, doubted: float | None = None) -> None:
        """Kill the worker if what is expected of it is overdue at two looks in a row, between which its pipe was read.

        One timer serves many samples: when it is early for the one that is executing, it is set anew.
        """
        self._watchdog = None
        if self.started and not self.samples:
            return
        limit_s = self._pool.timeout_s if self.started else START_TIMEOUT_S
        early = self._due_since + limit_s - self._loop.time()
        if early > 0:
            self._watchdog = self._loop.call_later(early, self._look)
        elif doubted != self._due_since:
            self._watchdog = self._loop.call_later(_SECOND_LOOK_S, self._look, self._due_since)
        else:
            if not self.ready.done():
                self.ready.set_result(
                    f"a worker could not load {self._pool.function} within {limit_s:g} s"
                )
            self._pool.stats.killed += 1
            self._retire("timeout", f"it ran for longer than {limit_s:g} s")
            self._kill_group()

    def _retire(self, reason: str | None = None, detail: str = "") -> None:
        """Out of service, for good: the sample that was executing fails for `reason` if there is one, the others go back to the pool."""
        if self._retired:
            return
        self._retired = True
        if self._watchdog:
            self._watchdog.cancel()
        if reason and self.samples:
            self._pool.settle(
                self.samples.popleft(),
                Reply(self._loop.time() - self._due_since, None, reason, detail),
            )
        self._pool.retire(self, list(self.samples))
        self.samples.clear()

    def _kill_group(self) -> None:
        try:
            os.killpg(self._transport.get_pid(), signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing of it is left

"""Rewards computed in worker processes: a verifier that hangs or crashes costs one sample only.

`score` returns a finite float or raises RewardError with one of these reasons:
  * `exception`: the function raised;
  * `timeout`: it ran for longer than `timeout_s`. Its process and everything that it started are
    killed;
  * `died`: its process ended (out of memory, `os._exit`), or wrote to the pool's pipe itself;
  * `bad_result`: it returned something other than a finite number.

Invariants:
  * the time-out counts from the start of a sample's execution, however long the sample waited;
  * only the executing sample fails with its process; samples behind it are executed elsewhere,
    once;
  * a process outlives neither the pool nor the process that owns the pool, and nor does what it
    started, nor its temporary files (keeper.py);
  * a killed or dead process is replaced. If a replacement cannot start, the pool shrinks; an empty
    pool raises RuntimeError;
  * nothing blocks the event loop.

Start the pool in a thread that lasts: the kernel kills children with the thread that made them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from itertools import count

from areal_lite.rewards.messages import Reply, Request, frame
from areal_lite.rewards.worker_process import Sample, WorkerProcess

log = logging.getLogger(__name__)

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
        if workers < 1:
            raise ValueError(f"reward.workers={workers}: at least one is needed")
        if timeout_s <= 0:
            raise ValueError(f"reward.timeout_s={timeout_s} must be positive")
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
        """Wait until every worker has loaded the function.

        Raises ValueError if one cannot, and leaves no process.
        """
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

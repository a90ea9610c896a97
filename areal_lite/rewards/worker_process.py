"""The pool's handle of one worker process: sends samples, enforces time-outs, notices death.

The process that the pool starts is the worker's keeper (keeper.py).

A worker process ends in two steps. First it is retired: it gets no more samples, and those that it
has not begun go back to the pool. Then it is gone: the process has ended and its output has been
read.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, cast

import msgspec

from areal_lite.rewards.messages import Ready, Reply, take_frames
from areal_lite.system.processes import dying_with_me

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


class WorkerOwner(Protocol):
    """The part of RewardPool that its worker processes use."""

    function: str
    timeout_s: float
    workers: list[WorkerProcess]  # those whose process runs

    def dispatch(self) -> None: ...

    def settle(self, sample: Sample, reply: Reply) -> None: ...

    def on_retired(self, worker: WorkerProcess, unbegun: list[Sample]) -> None: ...


class WorkerProcess(asyncio.SubprocessProtocol):
    """One worker process.

    `samples` were sent to it, in order; the first of them is executing. `ready` resolves to an
    error message, or None if the worker can be used; `gone` resolves when the process has ended.
    """

    def __init__(self, owner: WorkerOwner) -> None:
        self._owner = owner
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
            *(sys.executable, "-m", "areal_lite.rewards.worker", self._owner.function),
            stderr=None,
            start_new_session=True,  # Ctrl-C reaches its owner only
            env={
                **os.environ,
                **dying_with_me(),
                ENV_TIMEOUT_S: str(self._owner.timeout_s),
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
        self._owner.workers.append(self)
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
        self._owner.dispatch()

    def process_exited(self) -> None:
        if not self._stdin.is_closing():
            self._stdin.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the process, after all of its output."""
        self._retire("died", f"its process ended with status {self._transport.get_returncode()}")
        if not self.ready.done():
            self.ready.set_result(
                f"a worker of {self._owner.function} ended while it was starting;"
                " see its error output"
            )
        self._owner.workers.remove(self)
        self.gone.set_result(None)

    def _on_message(self, body: bytes) -> None:
        """Take one message. Raises ValueError if it is not the one that must come now."""
        if not self.started:
            self._on_ready(msgspec.msgpack.decode(body, type=Ready))
            return
        reply = msgspec.msgpack.decode(body, type=Reply)
        if not self.samples or reply.number != self.samples[0].number:
            raise ValueError(f"there is no request for its reply {reply.number}")
        self._waiting_since = self._loop.time()  # the next sample began when this one ended
        self._owner.settle(self.samples.popleft(), reply)

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
        limit_s = self._owner.timeout_s if self.started else _START_TIMEOUT_S
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
            self.ready.set_result(f"a worker could not load {self._owner.function}: {detail}")
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
            self._owner.settle(sample, reply)
        self._owner.on_retired(self, list(self.samples))
        self.samples.clear()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):  # it has ended
            self._transport.terminate()

"""Trainer ranks <-> controller over ZeroMQ: msgpack messages, arrays as raw frames, no pickle.

A request is one frame (`_Envelope`), a reply one frame (`_Reply`) and, for a batch, the frames of TrainBatch. Address and a random token
are in `<run_dir>/controller.json`, readable by its owner alone; a message without the token is refused. Loopback is bound, or, for a run on
several machines, the address of this one.

    batch(step, rank, world)   this rank's shard of the batch that the step from version `step` to `step + 1` trains on
    begin_push(version)        new weights are about to be pushed to the servers named; in mode `none`, once nothing is in flight
    pushed(version, failed)    the servers have them, but for those named
    evaluate(version)          accuracy on held-out problems
    finish()                   the end of training: totals; the controller exits
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from areal_lite.rollout.server import ServerInfo
from areal_lite.trajectory import TrainBatch

log = logging.getLogger(__name__)
ADDRESS_FILE = "controller.json"


class Batch(msgspec.Struct, tag="batch", frozen=True):
    """`catch_ups`: how often this rank has been told to push again what it pushed last. An answer without frames says: once more."""

    step: int
    rank: int
    world: int
    catch_ups: int = 0

    def __str__(self) -> str:
        return f"the batch of step {self.step} (rank {self.rank} of {self.world})"


class BeginPush(msgspec.Struct, tag="begin_push", frozen=True):
    version: int

    def __str__(self) -> str:
        return f"leave to push version {self.version}"


class Pushed(msgspec.Struct, tag="pushed", frozen=True):
    version: int
    failed: list[str]

    def __str__(self) -> str:
        return f"the controller to note that version {self.version} was pushed"


class Evaluate(msgspec.Struct, tag="evaluate", frozen=True):
    version: int

    def __str__(self) -> str:
        return f"the evaluation at version {self.version}"


class Finish(msgspec.Struct, tag="finish", frozen=True):
    def __str__(self) -> str:
        return "the totals of the run"


Request = Batch | BeginPush | Pushed | Evaluate | Finish


class _Envelope(msgspec.Struct):
    token: str
    id: int
    request: Request


class _Reply(msgspec.Struct):
    id: int
    error: str | None = None
    body: dict[str, Any] = {}


class _Address(msgspec.Struct):
    url: str
    token: str
    pid: int
    place: str  # where `pid` is a process: _place()


Answer = tuple[dict[str, Any], Sequence[Any]]  # body, frames of a batch
Handler = Callable[[Request], Awaitable[Answer]]


class WireServer:
    """The controller's end: answers each request with what `handler` returns, many at a time.

    Whatever goes wrong over a request, its caller hears at once. What is not a ValueError or RuntimeError of the handler, such as an answer
    that cannot be encoded, also ends `serve`, for whoever runs it.
    """

    def __init__(self, run_dir: Path, handler: Handler, host: str = "127.0.0.1"):
        self._handler = handler
        self._token = secrets.token_hex(16)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._pending: set[tuple[bytes, int]] = set()
        self.finished = asyncio.Event()  # `finish` was answered
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self._file = run_dir / ADDRESS_FILE
        _write_private(
            self._file,
            msgspec.json.encode(
                _Address(f"tcp://{host}:{port}", self._token, os.getpid(), _place())
            ),
        )

    async def serve(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as handlers:
            while True:
                identity, *frames = await self._socket.recv_multipart()
                try:
                    (raw,) = frames
                    envelope = msgspec.msgpack.decode(raw, type=_Envelope)
                except (ValueError, msgspec.MsgspecError) as error:
                    log.warning("ignored a message that is not of our protocol: %s", error)
                    continue
                if not secrets.compare_digest(envelope.token.encode(), self._token.encode()):
                    await self._send(
                        identity,
                        _Reply(
                            envelope.id, error=f"wrong token: read {ADDRESS_FILE} of this run again"
                        ),
                    )
                    continue
                self._pending.add((identity, envelope.id))
                handlers.create_task(
                    self._answer(identity, envelope), name=f"answer {envelope.request}"
                )

    async def _answer(self, identity: bytes, envelope: _Envelope) -> None:
        request, number = envelope.request, envelope.id
        try:
            body, frames = await self._handler(request)
        except (ValueError, RuntimeError) as error:
            await self._refuse(identity, number, str(error))
            return
        except Exception as error:
            await self._refuse(
                identity,
                number,
                f"asked for {request}, the controller failed: {type(error).__name__}: {error}",
            )
            raise
        try:
            await self._send(identity, _Reply(number, body=body), frames)
        except Exception as error:  # nothing of it was sent
            await self._refuse(
                identity,
                number,
                f"the controller cannot send {request}: {type(error).__name__}: {error}",
            )
            raise
        self._pending.discard((identity, number))
        if isinstance(request, Finish):
            self.finished.set()

    async def _refuse(self, identity: bytes, number: int, error: str) -> None:
        self._pending.discard((identity, number))
        await self._send(identity, _Reply(number, error=error))

    async def _send(self, identity: bytes, reply: _Reply, frames: Sequence[Any] = ()) -> None:
        await self._socket.send_multipart(
            [identity, msgspec.msgpack.encode(reply), *frames], copy=False
        )

    async def close(self, error: str | None = None) -> None:
        """Whoever still waits gets `error`; what was sent is delivered (within 5 s)."""
        self._file.unlink(missing_ok=True)
        for identity, request_id in self._pending:
            await self._send(
                identity, _Reply(request_id, error=error or "the controller has stopped")
            )
        self._socket.close(linger=5000)
        await asyncio.get_running_loop().run_in_executor(None, self._context.term)


async def run_until(event: asyncio.Event, *coroutines: Coroutine[Any, Any, None]) -> None:
    """Run the coroutines side by side until `event`, then cancel them. If one fails, the others are cancelled and its error is raised, in
    an ExceptionGroup."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(c) for c in coroutines]
        await event.wait()
        for task in running:
            task.cancel()


class ControllerClient:
    """The trainer's end: blocking calls, one at a time, from one thread.

    Raises RuntimeError with the controller's own words, or when its process is gone; TimeoutError, which names what was waited for,
    after `timeout_s`.
    """

    def __init__(self, run_dir: Path | str, timeout_s: float):
        self._timeout_s = timeout_s
        self._address = _read_address(Path(run_dir) / ADDRESS_FILE, timeout_s)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = (
            0  # a request that nobody will read must not keep the process from ending
        )
        self._socket.connect(self._address.url)
        self._last_id = 0
        self._catch_ups = 0

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()

    def batch(
        self, step: int, rank: int, world: int, catch_up: Callable[[], object] = lambda: None
    ) -> tuple[TrainBatch, dict[str, Any]]:
        """This rank's shard and facts about the whole step's batch. The same again for each call until the next version was pushed.

        While there is no batch `catch_up` is called, on every rank equally often and in the same order with the batches, for a push of
        version `step` again: servers came or came back that have older weights. `begin_push` says which.
        """
        while True:
            body, frames = self._call(Batch(step, rank, world, self._catch_ups))
            if frames:
                return TrainBatch.from_frames(frames), body
            self._catch_ups += 1
            catch_up()

    def begin_push(self, version: int) -> dict[str, Any]:
        """`servers`: list of ServerInfo to push to (maybe none: they will catch up); `drained`: how many requests in flight were waited for (mode `none`, else 0)."""
        body, _ = self._call(BeginPush(version))
        body["servers"] = [ServerInfo(**server) for server in body["servers"]]
        return body

    def pushed(self, version: int, failed: Sequence[str] = ()) -> None:
        """All servers but those named in `failed` have `version`: admission opens for it, and the batch that led to it counts as used."""
        self._call(Pushed(version, list(failed)))

    def evaluate(self, version: int) -> dict[str, Any]:
        """`greedy` and `sampled` accuracy over `problems` held-out problems, and the `versions` that answered."""
        return self._call(Evaluate(version))[0]

    def finish(self) -> dict[str, Any]:
        """The run's totals. The controller exits after this."""
        return self._call(Finish())[0]

    def _call(self, request: Request) -> tuple[dict[str, Any], list[memoryview]]:
        self._last_id += 1
        self._socket.send(
            msgspec.msgpack.encode(_Envelope(self._address.token, self._last_id, request))
        )
        deadline = time.monotonic() + self._timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if not self._socket.poll(min(left, 1.0) * 1000):
                if (
                    self._address.place == _place()
                    and not _alive(self._address.pid)
                    and not self._socket.poll(0)
                ):
                    who = f"the controller (process {self._address.pid})"
                    raise RuntimeError(
                        f"{who} died while the trainer waited for {request}: see its log"
                    )
                continue
            head, *frames = self._socket.recv_multipart(copy=False)
            reply = msgspec.msgpack.decode(head.buffer, type=_Reply)
            if reply.id != self._last_id:
                continue  # the late answer to a call that timed out
            if reply.error is not None:
                raise RuntimeError(reply.error)
            return reply.body, [frame.buffer for frame in frames]
        raise TimeoutError(
            f"waited {self._timeout_s:.0f} s for {request}: the controller's log says what it is waiting for"
        )


def _place() -> str:
    """The machine, and the container on it, whose process numbers we know."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _read_address(path: Path, timeout_s: float) -> _Address:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"waited {timeout_s:.0f} s for {path}, which the controller writes when it is up: see its log"
            )
        time.sleep(0.05)
    return msgspec.json.decode(path.read_bytes(), type=_Address)


def _write_private(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)

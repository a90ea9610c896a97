"""TODO docstring."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from areal_lite.controller.messages import (
    ADDRESS_FILE,
    Address,
    Batch,
    BeginPush,
    Envelope,
    Evaluate,
    Finish,
    Pushed,
    Reply,
    Request,
    process_namespace,
)
from areal_lite.servers.registry import ServerInfo
from areal_lite.trajectory import TrainBatch


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
            msgspec.msgpack.encode(Envelope(self._address.token, self._last_id, request))
        )
        deadline = time.monotonic() + self._timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if not self._socket.poll(min(left, 1.0) * 1000):
                if (
                    self._address.place == process_namespace()
                    and not _alive(self._address.pid)
                    and not self._socket.poll(0)
                ):
                    who = f"the controller (process {self._address.pid})"
                    raise RuntimeError(
                        f"{who} died while the trainer waited for {request}: see its log"
                    )
                continue
            head, *frames = self._socket.recv_multipart(copy=False)
            reply = msgspec.msgpack.decode(head.buffer, type=Reply)
            if reply.id != self._last_id:
                continue  # the late answer to a call that timed out
            if reply.error is not None:
                raise RuntimeError(reply.error)
            return reply.body, [frame.buffer for frame in frames]
        raise TimeoutError(
            f"waited {self._timeout_s:.0f} s for {request}: the controller's log says what it is waiting for"
        )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _read_address(path: Path, timeout_s: float) -> Address:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"waited {timeout_s:.0f} s for {path}, which the controller writes when it is up: see its log"
            )
        time.sleep(0.05)
    return msgspec.json.decode(path.read_bytes(), type=Address)

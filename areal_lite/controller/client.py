"""The trainer's client of the controller."""

import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from areal_lite.controller.protocol import (
    HEARTBEAT_MS,
    SILENCE_MS,
    Address,
    AwaitEvaluation,
    BatchReady,
    BeginPush,
    Envelope,
    Evaluate,
    Evaluation,
    EvaluationEnded,
    Failed,
    Finish,
    PullBatch,
    Pushed,
    PushTargets,
    Recorded,
    Reply,
    Request,
    Response,
    Resync,
    RunTotals,
    StepDone,
)
from areal_lite.run_dir.paths import CONTROLLER_FILE
from areal_lite.system import heartbeat
from areal_lite.system.processes import process_namespace
from areal_lite.train_batch import TrainBatch

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Response)
Frames = list[memoryview]

_POLL_S = 1.0
# Another controller starts within a minute, and loads prompts and store before it answers.
_SUCCESSOR_S = 600.0


class ControllerClient:
    """Blocking calls to the controller, one at a time, from one thread.

    * Every call raises RuntimeError with the controller's error message.
    * If the connection is lost, libzmq connects again, and the call sends its request again: the
      reply may have been on its way. The controller answers it once (protocol.py).
    * If the controller is killed, the call waits for the one that takes its place, and asks it. It
      raises RuntimeError if none does within ten minutes.
    * After `timeout_s` seconds it raises TimeoutError, which names the request.
    """

    def __init__(self, run_dir: Path | str, timeout_s: float):
        self._timeout_s = timeout_s
        self._file = Path(run_dir) / CONTROLLER_FILE
        self._context = zmq.Context()
        self._connect(_read_address(self._file, timeout_s))
        self._last_id = 0
        self._resyncs = 0

    def _connect(self, address: Address) -> None:
        self._address = address
        # When its process was found dead, in seconds of the monotonic clock.
        self._died_at: float | None = None
        self._socket = self._context.socket(zmq.DEALER)
        # By this name the controller knows the client after a loss of the connection. libzmq keeps
        # names that begin with a zero for itself.
        self._socket.routing_id = b"c" + secrets.token_bytes(16)
        # An unread request must not keep this process from exiting.
        self._socket.linger = 0
        self._socket.heartbeat_ivl = HEARTBEAT_MS
        self._socket.heartbeat_timeout = SILENCE_MS
        self._connections = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._connected = False
        self._socket.curve_serverkey = address.key.encode()
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.connect(address.url)

    def _disconnect(self) -> None:
        self._socket.disable_monitor()
        self._connections.close(linger=0)
        self._socket.close(linger=0)

    def close(self) -> None:
        self._disconnect()
        self._context.term()

    def batch(
        self, step: int, rank: int, world: int, resync: Callable[[], object] = lambda: None
    ) -> tuple[TrainBatch, dict[str, Any]]:
        """Wait for this rank's shard of a batch. A repeated call returns the same shard.

        Args:
            step: completed steps; the batch becomes unavailable when the step is complete.
            rank, world: data-parallel rank and number of ranks.
            resync: pushes version `step` to the stale servers. It is called while there is no batch
                and servers started late or came back. Every rank calls it equally often and in the
                same order relative to the batches.

        Returns:
            The shard, and facts about the batch of all ranks.
        """
        while True:
            request = PullBatch(step, rank, world, self._resyncs)
            response, frames = self._call(request, BatchReady, Resync)
            if isinstance(response, BatchReady):
                return TrainBatch.from_frames(frames), response.info
            self._resyncs += 1
            resync()

    def step_done(self, step: int) -> None:
        """Report that `step` steps are complete and that no push follows the last one.

        The batch of the last step counts as used.
        """
        self._call(StepDone(step), Recorded)

    def begin_push(self, version: int) -> PushTargets:
        """Announce a push of `version` and return the servers to push to."""
        return self._call(BeginPush(version), PushTargets)[0]

    def pushed(self, version: int, failed: Sequence[str] = ()) -> None:
        """Report that every target of the push except `failed` now serves `version`.

        Admission opens for `version`, and the batches that led to it count as used.
        """
        self._call(Pushed(version, list(failed)), Recorded)

    def evaluate(self, version: int) -> dict[str, Any]:
        """Evaluate the held-out problems and return one line of evals.jsonl."""
        return self._call(Evaluate(version), Evaluation)[0].record

    def await_evaluation(self, version: int, resync: Callable[[], object]) -> None:
        """Wait until the evaluation of the last version has ended. Its result is not returned.

        Every rank calls it. `resync` is as in `batch`: it pushes `version` to the stale servers.
        """
        while True:
            request = AwaitEvaluation(version, self._resyncs)
            response, _ = self._call(request, EvaluationEnded, Resync)
            if isinstance(response, EvaluationEnded):
                return
            self._resyncs += 1
            resync()

    def finish(self) -> dict[str, Any]:
        """End the run and return its totals. The controller exits afterwards."""
        return self._call(Finish(), RunTotals)[0].totals

    def _call(self, request: Request, *expected: type[R]) -> tuple[R, Frames]:
        """Send a request and wait for its reply, which is one of the `expected` responses."""
        self._last_id += 1
        frame = msgspec.msgpack.encode(Envelope(self._last_id, request))
        self._socket.send(frame)
        deadline = time.monotonic() + self._timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if not self._socket.poll(1 + int(1000 * min(left, _POLL_S))):
                heartbeat.beat()  # the wait has a limit of its own
                if successor := self._successor(request):
                    self._disconnect()
                    self._connect(successor)
                    self._socket.send(frame)
                elif self._was_reconnected():
                    log.warning("the connection to the controller was lost: asking again")
                    self._socket.send(frame)
                continue
            head, *frames = self._socket.recv_multipart(copy=False)
            reply = msgspec.msgpack.decode(head.buffer, type=Reply)
            if reply.id != self._last_id:
                continue  # the late reply to a call that timed out
            if isinstance(reply.response, Failed):
                raise RuntimeError(reply.response.error)
            assert isinstance(reply.response, expected), f"{request}: got {reply.response}"
            return reply.response, [frame.buffer for frame in frames]
        raise TimeoutError(
            f"waited {self._timeout_s:.0f} s for {request}: "
            "the controller's log says what it is waiting for"
        )

    def _was_reconnected(self) -> bool:
        """Return whether the connection was made again since the last look."""
        again = False
        while self._connections.poll(0):
            recv_monitor_message(self._connections)
            again, self._connected = again or self._connected, True
        return again

    def _successor(self, request: Request) -> Address | None:
        """Return the address of the controller that took the place of this one, if there is one.

        Raises RuntimeError if the new controller continues another trainer's run.
        """
        address = None
        with suppress(FileNotFoundError):
            address = msgspec.json.decode(self._file.read_bytes(), type=Address)
        if address is None or address.key == self._address.key:
            self._check_alive(request)
            return None
        if not address.takes_over:
            raise RuntimeError(
                f"the controller was started anew while the trainer waited for {request}: start "
                "the trainer again, too"
            )
        log.warning("another controller took over: asking it for %s", request)
        return address

    def _check_alive(self, request: Request) -> None:
        """Raise RuntimeError if the controller's process died ten minutes ago."""
        now, pid = time.monotonic(), self._address.pid
        if self._address.namespace != process_namespace() or _alive(pid):
            return
        if self._died_at is None:
            self._died_at = now
            log.warning("the controller (process %d) died: waiting for another one", pid)
        if now - self._died_at >= _SUCCESSOR_S:
            raise RuntimeError(
                f"the controller (process {pid}) died while the trainer waited for {request}, and "
                "none took its place: see its log"
            )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _read_address(path: Path, timeout_s: float) -> Address:
    """Wait until the controller has written its address, and return it."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"waited {timeout_s:.0f} s for {path}, which the controller writes when it "
                "is up: see its log"
            )
        heartbeat.beat()
        time.sleep(0.05)
    return msgspec.json.decode(path.read_bytes(), type=Address)

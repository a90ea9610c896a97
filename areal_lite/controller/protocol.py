"""Calls from the trainer's ranks to the controller: msgpack over ZeroMQ, no pickle.

`ControllerClient` has the calls. The last argument of `pull` and `await_evaluation` counts the
`Resync` that the client has had. In place of its result, these may ask for another one: push the
present version to the stale servers, and call again.

A call is one frame (`Call`). A reply is one frame (`Reply`), plus the frames of a batch. It has an
error if the call failed.

A client repeats a call after a loss of its connection. The server knows it by the client's name and
the call's number, and answers it once. If the controller is killed, the client waits for the next
one and asks that (batches.py).

Connections are encrypted (CurveZMQ, https://rfc.zeromq.org/spec/26), and only for clients that know
the controller's random key: libzmq refuses all others before the controller sees a byte. Address
and key are in `<run_dir>/controller.json`, which only its owner can read. The controller listens on
loopback, or on this machine's address for a run on several machines.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from areal_lite.run_dir.paths import CONTROLLER_FILE
from areal_lite.run_dir.store_format import StoreError
from areal_lite.servers.registry import ServerInfo
from areal_lite.system import heartbeat
from areal_lite.system.files import write_atomically
from areal_lite.system.processes import process_namespace
from areal_lite.train_batch import TrainBatch

# The types of the arguments of each method, and what its client waits for.
_METHODS: dict[str, tuple[Any, str]] = {
    "begin": (tuple[int], "the controller to begin at step {0}"),
    "pull": (tuple[int, int, int, int], "the batch of step {0} (rank {1} of {2})"),
    "step_done": (tuple[int], "the controller to record that {0} steps are complete"),
    "begin_push": (tuple[int], "permission to push version {0}"),
    "pushed": (tuple[int, list[str]], "the controller to record the push of version {0}"),
    "evaluate": (tuple[int], "the evaluation at version {0}"),
    "await_evaluation": (tuple[int, int], "the end of the evaluation at version {0}"),
    "finish": (tuple[()], "the totals of the run"),
}
_EVALUATIONS = ("evaluate", "await_evaluation")


class Call(msgspec.Struct, frozen=True):
    """A call of one of the controller's methods. No other call of its client has the number."""

    number: int
    method: str
    arguments: list[Any] = []

    def __str__(self) -> str:
        return _METHODS[self.method][1].format(*self.arguments)


class Reply(msgspec.Struct):
    """The answer to the call with the same number: a result, `resync`, or an error."""

    number: int
    result: Any = None
    resync: bool = False
    error: str | None = None


class PushTargets(msgspec.Struct):
    """The servers to push to, possibly none: servers that start later are resynced then."""

    servers: list[ServerInfo]
    drained: int = 0  # requests in flight that were waited for (interrupt mode `none`)


class Resync(Exception):
    """The trainer waits and some servers are stale: push the current version to them first."""


class Address(msgspec.Struct):
    """The content of controller.json."""

    url: str
    key: str  # CurveZMQ's public key of the controller. It is given to this run's clients only.
    pid: int
    namespace: str  # where `pid` is valid: process_namespace()
    takes_over: bool = False  # from a controller that was killed, and answers the same trainer


HEARTBEAT_MS = 30_000  # each side of a connection sends something so often

SILENCE_MS = 120_000  # a peer that is gone without a word is noticed after this time

log = logging.getLogger(__name__)

_LINGER_MS = 5000

_MAX_CALL_BYTES = 1 << 20  # a call has less than 1 kB, and replies have no limit
_MAX_WAITING_CALLS = 1000
_MAX_CLIENTS = 4096  # whose newest reply is kept: more than a trainer has ranks
# A connection without the key ends after this time, so that no client can use up the descriptors.
_HANDSHAKE_MS = 5000

_LOG_EVERY = 1000


class TrainerReplaced(Exception):
    """A trainer began again, under a controller that has answered the one before it."""


class MessageServer:
    """Answers calls by the methods of `controller`, many at the same time.

    * A message that cannot be decoded is dropped. A repeated call is handled once.
    * The caller hears of every error at once.
    * A ValueError or RuntimeError of a method only fails its call, a StoreError excepted.
    * TrainerReplaced ends `serve`, like `finish`. The next controller answers the call.
    * Any other error also ends `serve`, for example a result that cannot be encoded.
    """

    def __init__(
        self, run_dir: Path, controller: Any, host: str = "127.0.0.1", takes_over: bool = False
    ):
        """Listen on `host`, and write the address to the run directory."""
        self._controller = controller
        self._malformed = 0
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        key, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_server = True
        self._socket.maxmsgsize = _MAX_CALL_BYTES
        self._socket.rcvhwm = _MAX_WAITING_CALLS
        self._socket.handshake_ivl = _HANDSHAKE_MS
        self._socket.heartbeat_ivl = HEARTBEAT_MS
        self._socket.heartbeat_timeout = SILENCE_MS
        # A client that connects again, under its name, takes over from its lost connection.
        self._socket.router_handover = True
        # The number of each client's newest call, and the reply to it. A batch in a reply is one
        # that the controller keeps anyway.
        self._newest: dict[bytes, tuple[int, list[Any] | None]] = {}
        # Set once `finish` was answered, or the trainer was replaced.
        self.finished = asyncio.Event()
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self._file = run_dir / CONTROLLER_FILE
        address = Address(
            url=f"tcp://{host}:{port}",
            key=key.decode(),
            pid=os.getpid(),
            namespace=process_namespace(),
            takes_over=takes_over,
        )
        write_atomically(self._file, msgspec.json.encode(address), private=True)

    async def serve(self) -> None:
        """Receive calls and start a task for each. Runs until cancelled."""
        async with asyncio.TaskGroup() as handlers:
            while True:
                client, *frames = await self._socket.recv_multipart()
                call = self._decode(frames)
                if call and not await self._is_repeated(client, call.number):
                    handlers.create_task(self._answer(client, call), name=f"answer {call}")

    async def _is_repeated(self, client: bytes, number: int) -> bool:
        """Return whether a call came before. If it was answered, send that reply again."""
        newest, reply = self._newest.pop(client, (0, None))
        self._newest[client] = (number, None) if number > newest else (newest, reply)
        if len(self._newest) > _MAX_CLIENTS:  # each evaluation is a client of its own
            del self._newest[next(iter(self._newest))]
        if number == newest and reply:
            await self._socket.send_multipart(reply, copy=False)
        return number <= newest

    def _decode(self, frames: list[bytes]) -> Call | None:
        """Return the call in `frames`; None if they hold none, which is counted and logged."""
        try:
            (raw,) = frames
            call = msgspec.msgpack.decode(raw, type=Call)
            msgspec.convert(call.arguments, _METHODS[call.method][0])
            return call
        except Exception as error:  # decoders raise more than ValueError, such as RecursionError
            self._malformed += 1
            if self._malformed == 1 or self._malformed % _LOG_EVERY == 0:
                kind = type(error).__name__
                log.warning("dropped malformed message %d: %s: %s", self._malformed, kind, error)
            return None

    async def _answer(self, client: bytes, call: Call) -> None:
        """Handle one call and send its reply. Raises errors that must end the server."""
        has_result = False
        try:
            result = await getattr(self._controller, call.method)(*call.arguments)
            has_result = True
            result, frames = result if isinstance(result, tuple) else (result, ())
            reply = Reply(call.number, result)
            await self._send(client, reply, frames)  # may raise before it sends anything
        except Resync:
            await self._send(client, Reply(call.number, resync=True))
        except TrainerReplaced:
            self.finished.set()
            return
        except Exception as error:
            refuses = not has_result and isinstance(error, ValueError | RuntimeError)
            if refuses:
                text = str(error)
            else:
                asked = f"asked for {call}, the controller failed"
                what = f"the controller cannot send {call}" if has_result else asked
                text = f"{what}: {type(error).__name__}: {error}"
            await self._send(client, Reply(call.number, error=text))
            if not refuses or isinstance(error, StoreError):
                raise
        if has_result and call.method == "finish":
            self.finished.set()

    async def _send(self, client: bytes, reply: Reply, frames: Sequence[Any] = ()) -> None:
        message = [client, msgspec.msgpack.encode(reply), *frames]
        if self._newest.get(client, (0, None))[0] == reply.number:
            self._newest[client] = reply.number, message
        await self._socket.send_multipart(message, copy=False)

    async def close(self, error: str = "") -> None:
        """Answer every open call with `error`, if any, and deliver the replies within 5 s."""
        self._file.unlink(missing_ok=True)
        for client, (number, reply) in list(self._newest.items()):
            if error and not reply:
                await self._send(client, Reply(number, error=error))
        self._socket.close(linger=_LINGER_MS)
        await asyncio.get_running_loop().run_in_executor(None, self._context.term)


async def run_until(event: asyncio.Event, *coroutines: Coroutine[Any, Any, None]) -> None:
    """Run the coroutines until `event` is set, then cancel them, or until one of them fails."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(coroutine) for coroutine in coroutines]
        await event.wait()
        for task in running:
            task.cancel()


_POLL_S = 1.0
# Another controller starts within a minute, and loads prompts and store before it answers.
_SUCCESSOR_S = 600.0


class ControllerClient:
    """Blocking calls to the controller, one at a time, from one thread.

    * Every call raises RuntimeError with the controller's error message, or if no other controller
      takes the place of a killed one within ten minutes.
    * After `timeout_s` seconds it raises TimeoutError, which names the call. An evaluation may
      take any time while the controller is there: each of its episodes has a limit.
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
        self._socket.linger = 0  # an unread call must not keep this process from exiting
        self._socket.heartbeat_ivl = HEARTBEAT_MS
        self._socket.heartbeat_timeout = SILENCE_MS
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._connections = self._socket.get_monitor_socket(events)
        self._connected = self._was_connected = False
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
        """Wait for this rank's shard of the batch of `step`, and for facts about the whole batch.

        A repeated call returns the same shard, until the step is complete. `resync` pushes version
        `step` to the stale servers. It is called while there is no batch and servers started late
        or came back: on every rank equally often, and in the same order relative to the batches.
        """
        asked = "pull", step, rank, world
        info, frames = self._call_with_resyncs(resync, dict[str, Any], *asked)
        return TrainBatch.from_frames(frames), info

    def begin(self, step: int) -> None:
        """Wait for a controller for a trainer that starts from `step`. Rank 0 alone calls it."""
        self._call(None, "begin", step)

    def step_done(self, step: int) -> None:
        """Report that `step` steps are complete and that no push follows the last one."""
        self._call(None, "step_done", step)

    def begin_push(self, version: int) -> PushTargets:
        """Announce a push of `version` and return the servers to push to."""
        return self._call(PushTargets, "begin_push", version)[0]

    def pushed(self, version: int, failed: Sequence[str] = ()) -> None:
        """Report that every target of the push except `failed` now serves `version`."""
        self._call(None, "pushed", version, list(failed))

    def evaluate(self, version: int) -> dict[str, Any]:
        """Evaluate the held-out problems and return one line of evals.jsonl."""
        return self._call(dict[str, Any], "evaluate", version)[0]

    def await_evaluation(self, version: int, resync: Callable[[], object]) -> None:
        """Wait, on every rank, for the end of the last evaluation; `resync` is as in `batch`."""
        self._call_with_resyncs(resync, None, "await_evaluation", version)

    def finish(self) -> dict[str, Any]:
        """End the run and return its totals. The controller exits afterwards."""
        return self._call(dict[str, Any], "finish")[0]

    def _call_with_resyncs(
        self, resync: Callable[[], object], kind: Any, method: str, *arguments: int
    ) -> tuple[Any, list[memoryview]]:
        """Call `resync` as often as the controller asks for it instead of answering."""
        while True:
            with suppress(Resync):
                return self._call(kind, method, *arguments, self._resyncs)
            self._resyncs += 1
            resync()

    def _call(self, kind: Any, method: str, *arguments: Any) -> tuple[Any, list[memoryview]]:
        """Call a method; return its result, of the type `kind`, and its frames. Raises Resync."""
        self._last_id += 1
        call = Call(self._last_id, method, list(arguments))
        frame = msgspec.msgpack.encode(call)
        self._socket.send(frame)
        deadline = time.monotonic() + self._timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if not self._socket.poll(1 + int(1000 * min(left, _POLL_S))):
                heartbeat.beat()  # the wait has a limit of its own
                if successor := self._successor(call):
                    self._disconnect()
                    self._connect(successor)
                    self._socket.send(frame)
                elif self._was_reconnected():
                    log.warning("the connection to the controller was lost: asking again")
                    self._socket.send(frame)
                if self._connected and method in _EVALUATIONS:
                    deadline = time.monotonic() + self._timeout_s
                continue
            head, *frames = self._socket.recv_multipart(copy=False)
            reply = msgspec.msgpack.decode(head.buffer, type=Reply)
            if reply.number != call.number:
                continue  # the late reply to a call that timed out
            if reply.error is not None:
                raise RuntimeError(reply.error)
            if reply.resync:
                raise Resync
            return msgspec.convert(reply.result, kind), [frame.buffer for frame in frames]
        raise TimeoutError(
            f"waited {self._timeout_s:.0f} s for {call}: "
            "the controller's log says what it is waiting for"
        )

    def _was_reconnected(self) -> bool:
        """Return whether the connection was made again since the last look."""
        again = False
        while self._connections.poll(0):
            event = recv_monitor_message(self._connections)["event"]
            self._connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self._connected:
                again, self._was_connected = again or self._was_connected, True
        return again

    def _successor(self, call: Call) -> Address | None:
        """Return the address of a successor, if any. Raises RuntimeError if its trainer is new."""
        address = None
        with suppress(FileNotFoundError):
            address = msgspec.json.decode(self._file.read_bytes(), type=Address)
        if address is None or address.key == self._address.key:
            self._check_alive(call)
            return None
        if not address.takes_over and call.method != "begin":
            raise RuntimeError(
                f"the controller was started anew while the trainer waited for {call}: start "
                "the trainer again, too"
            )
        log.warning("another controller took over: asking it for %s", call)
        return address

    def _check_alive(self, call: Call) -> None:
        """Raise RuntimeError if the controller's process died ten minutes ago."""
        now, pid = time.monotonic(), self._address.pid
        if self._address.namespace != process_namespace() or psutil.pid_exists(pid):
            return
        if self._died_at is None:
            self._died_at = now
            log.warning("the controller (process %d) died: waiting for another one", pid)
        if now - self._died_at >= _SUCCESSOR_S:
            raise RuntimeError(
                f"the controller (process {pid}) died while the trainer waited for {call}, and "
                "none took its place: see its log"
            )


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

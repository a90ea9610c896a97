"""The worker's side: a process that runs code of the user, and the process that keeps it.

Standard input and output carry frames: a 4-byte little-endian length and that many bytes of
msgpack. A worker gets a `Request` with its setup, answers `Ready`, and from then on answers each
`Request` with `Done` or `Failed`. Its code may `Ask` the pool for something meanwhile. What the
code itself prints goes to standard error, and its standard input is empty.

The pool starts a keeper, and the keeper forks the worker, so that nothing of the worker outlives
it. A process that loses its parent becomes the keeper's child, even with a session of its own
(PR_SET_CHILD_SUBREAPER). When the worker ends, when the pool sends SIGTERM, or when the pool's
process ends, the keeper kills all of them, removes their temporary files and ends with the worker's
status. The kernel reports the end of the pool's process by SIGCONT, because that also reaches a
keeper that is stopped.

The workers of a pool may allocate half of the machine's memory, or 4 GiB each if that is more. The
kernel kills them before others when memory is short. If the keeper is killed, the worker dies with
it.
"""

import ctypes
import math
import os
import pickle
import resource
import signal
import struct
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from areal_lite.system.files import remove_folder
from areal_lite.system.processes import ENV_DIE_WITH_PARENT

T = TypeVar("T")
NUM_MARKS = 64
MARKS = struct.Struct(f"{NUM_MARKS}q")
MARKS_BYTES = MARKS.size
ENV_MARKS = "AREAL_LITE_WORKER_MARKS"
"""The descriptor of a worker's file: its marks (marks.py), and the stacks of a blocked process."""
_LENGTH = struct.Struct("<I")


class _Message(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """A message between a pool and a worker."""


class Request(_Message):
    """Work to do. `number` is unique in a pool; 0 is the setup.

    `limit_s` bounds the time that its code takes, not the time until the pool answers.
    """

    number: int
    body: msgspec.Raw
    limit_s: float = math.inf


class Answer(_Message):
    """The answer to `Ask` number `call`, or the `error` that prevented it."""

    call: int
    body: msgspec.Raw = msgspec.Raw(b"\xc0")  # nil
    error: str | None = None


class Cancel(_Message):
    """Nobody waits for request `number` any more."""

    number: int


class Ready(_Message):
    """The worker is set up. `error` says why it cannot work; `facts` describe what it serves."""

    error: str | None = None
    facts: dict[str, Any] = {}


class Done(_Message):
    """The result of request `number`, after `seconds`."""

    number: int
    seconds: float
    body: msgspec.Raw


class Failed(_Message):
    """Request `number` has no result for one of TaskFailed's reasons.

    `is_stuck`: its code goes on, and only the end of the process can end it.
    """

    number: int
    seconds: float
    reason: str
    detail: str
    is_stuck: bool = False


class Ask(_Message):
    """A question of request `number` to the pool. `call` is unique in a worker."""

    number: int
    call: int
    body: msgspec.Raw


class Beat(_Message):
    """The worker's event loop turns. Request `oldest` has run longest, and waits at `where`."""

    oldest: int = 0
    where: str = ""


ToWorker = Request | Answer | Cancel
ToPool = Ready | Done | Failed | Ask | Beat


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).data
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"cannot send {type(value)}")


def _decode_array(kind: type, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


def pack(value: Any) -> msgspec.Raw:
    """Encode a value: a struct, dataclass or container, also of arrays."""
    return msgspec.Raw(msgspec.msgpack.encode(value, enc_hook=_encode_array))


def unpack(body: msgspec.Raw, kind: type[T]) -> T:
    """Decode a value of type `kind`. Raises msgspec.MsgspecError for another type."""
    return msgspec.msgpack.decode(body, type=kind, dec_hook=_decode_array)


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message as one frame."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def take_frames(buffer: bytearray) -> Iterator[bytes]:
    """Remove the complete frames from the front of `buffer` and yield their bodies."""
    start = 0
    while len(buffer) - start >= _LENGTH.size:
        end = start + _LENGTH.size + _LENGTH.unpack_from(buffer, start)[0]
        if len(buffer) < end:
            break
        yield bytes(buffer[start + _LENGTH.size : end])
        start = end
    del buffer[:start]


class Pipes:
    """The pipes to the pool, under descriptors that no child process inherits."""

    def __init__(self) -> None:
        self.input, self.output = os.dup(0), os.dup(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._buffer = bytearray()

    def receive(self) -> list[ToWorker] | None:
        """Wait for messages; None when the pool has closed its end."""
        if not (received := os.read(self.input, 1 << 20)):
            return None
        self._buffer += received
        return [self._decoder.decode(body) for body in take_frames(self._buffer)]

    def send(self, message: ToPool) -> None:
        rest = memoryview(frame(message))
        while rest:
            rest = rest[os.write(self.output, rest) :]


def short_text(template: str, *values: object) -> str:
    """Format a short text that can be encoded: an object may describe itself in any way."""
    try:
        return template.format(*values)[:500].encode(errors="replace").decode()
    except BaseException as error:
        return f"its description raises {type(error).__name__}"


_LIBRARIES = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))
_OWN = str(Path(__file__).parents[1])


def place_of(places: list[tuple[str, int, str]]) -> str:
    """Return the innermost of (file, line, function) in code of the user, or else in ours."""
    own = [place for place in places if not place[0].startswith(("<", *_LIBRARIES))]
    users = [place for place in own if not place[0].startswith(_OWN)]
    found = next(iter(users or own or places), None)
    return "" if found is None else f"{found[0]}:{found[1]} in {found[2]}"


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MEMORY_SHARE, _LEAST_MEMORY = 0.5, 4 << 30
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD, signal.SIGCONT)


def start_worker(load: Callable[..., T]) -> tuple[Pipes, T]:
    """Fork the worker, and return there its pipes and what `load` makes of the pool's setup.

    If `load` raises, the pool is told why, and the worker ends.
    """
    _fork()
    pipes = Pipes()
    while not (messages := pipes.receive()):
        if messages is None:
            sys.exit()
    (request,) = messages  # the pool sends the next after Ready
    assert isinstance(request, Request)
    workers, setup = pickle.loads(unpack(request.body, bytes))  # of the pool's own process
    _limit_memory(workers)
    try:
        return pipes, load(*setup)
    except Exception as error:  # a module of the user may raise anything
        pipes.send(Ready(error=short_text("{}", error)))
        sys.exit()


def _fork() -> None:
    """Fork, and return in the child, the worker, which has a temporary folder of its own.

    This process keeps it and does not return.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    owner = int(os.environ.get(ENV_DIE_WITH_PARENT, os.getppid()))
    _die_with_parent(signal.SIGCONT, owner)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    folder = Path(tempfile.mkdtemp(prefix="areal-lite-worker-"))
    keeper = os.getpid()
    worker = os.fork()
    if worker:
        os.closerange(0, 2)  # the pipes end with the worker
        status = _wait(worker, owner)
        _kill_all(worker)
        remove_folder(folder)
        os._exit(status if status >= 0 else 128 - status)
    _die_with_parent(signal.SIGKILL, keeper)
    os.setpgid(0, 0)  # what it sends to its process group must not reach the keeper
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def _wait(worker: int, owner: int) -> int:
    """Return the worker's exit code, or minus SIGTERM when that arrives or the owner has ended."""
    while signal.sigwait(_SIGNALS) != signal.SIGTERM and os.getppid() == owner:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == worker:
                    return os.waitstatus_to_exitcode(ended[1])
    return -signal.SIGTERM


def _kill_all(worker: int) -> None:
    """Kill the worker and all that it started, one generation after the other."""
    with suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                import psutil  # most keepers have nothing left to kill

                for child in psutil.Process().children():  # none is reaped meanwhile
                    os.kill(child.pid, signal.SIGKILL)
                os.waitpid(-1, 0)


def _limit_memory(workers: int) -> None:
    memory = _MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = int(min(memory, max(memory / workers, _LEAST_MEMORY)))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or limit < most:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _die_with_parent(number: int, parent: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent died before the request
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)

"""The worker's side: a process that runs code of the user, and the processes that it comes from.

A socket carries frames: a 4-byte little-endian length and that many bytes of msgpack. A worker
sends `Ready`, and from then on answers each `Request` with `Done` or `Failed`. Its code may `Ask`
the pool for something meanwhile. What the code prints goes to a pipe, and its input is empty.

A pool starts one template. It loads the libraries, which takes a third of a second, and forks for
each worker. It has no code of the user, no event loop, and no thread when it forks. If it ends, its
workers go on, and the pool starts another one.

The template forks a keeper, and the keeper forks the worker, so that nothing of the worker outlives
it. A process that loses its parent becomes the keeper's child, even with a session of its own
(PR_SET_CHILD_SUBREAPER). When the worker ends, or the pool's end of the control socket is closed,
the keeper kills all of them, removes their temporary files and sends the worker's status. The
kernel reports that by SIGCONT (F_SETSIG), because that also reaches a keeper that is stopped.

The workers of a pool may allocate half of the machine's memory, or 2 GiB each if that is more. The
kernel kills them before others when memory is short. If the keeper is killed, the worker dies with
it.
"""

import ctypes
import fcntl
import gc
import math
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from select import select
from typing import IO, Any, NoReturn, TypeVar

import msgspec
import numpy as np

from areal_lite.system.files import remove_folder
from areal_lite.system.processes import die_with_parent, dying_with_me

T = TypeVar("T")
NUM_MARKS = 64
MARKS = struct.Struct(f"{NUM_MARKS}q")
MARKS_BYTES = MARKS.size
STATUS = struct.Struct("i")  # the message of a keeper: the worker's exit status
_LENGTH = struct.Struct("<I")


class _Message(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """A message between a pool and a worker."""


class Request(_Message):
    """Work to do."""

    number: int  # unique in a pool
    body: msgspec.Raw
    limit_s: float = math.inf  # of its code, without the time until the pool answers


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
    """Request `number` has no result for one of TaskFailed's reasons."""

    number: int
    seconds: float
    reason: str
    detail: str
    is_stuck: bool = False  # its code goes on, and only the end of the process can end it


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
    """The socket to the pool, and the worker's file. No child process inherits their descriptors.

    The file has the marks (marks.py), and then the stacks of a blocked process.
    """

    def __init__(self, frames: int, printed: int, file: int) -> None:
        self.frames, self.file = socket.socket(fileno=frames), file
        for standard, other in enumerate((os.open(os.devnull, os.O_RDONLY), printed, printed)):
            os.dup2(other, standard)
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._buffer = bytearray()

    def receive(self) -> list[ToWorker] | None:
        """Wait for messages; None when the pool has closed its end."""
        if not (received := self.frames.recv(1 << 20)):
            return None
        self._buffer += received
        return [self._decoder.decode(body) for body in take_frames(self._buffer)]

    def send(self, message: ToPool) -> None:
        self.frames.sendall(frame(message))


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


class Template:
    """The pool's side of its template: `python -m module`, which ends with the calling thread."""

    def __init__(self, module: str, setup: bytes) -> None:
        self._module, self._setup = module, setup
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, *ends: socket.socket | IO[bytes]) -> None:
        """Ask for a worker that has these ends. They are closed if the process ends before."""
        running = self._process
        if running is None or running.poll() is not None:
            self.end()
            running = self._process = self._start()
        running.send_signal(signal.SIGCONT)  # code of the user may have stopped it
        with suppress(OSError):
            socket.send_fds(self._requests, [b"\0"], [end.fileno() for end in ends])

    def _start(self) -> subprocess.Popen[bytes]:
        self._requests, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, sys.path))
        with theirs, tempfile.TemporaryFile() as file:
            file.write(self._setup)
            file.seek(0)
            return subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno())],
                stdin=file,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C reaches the pool's process only
                env={**os.environ, **dying_with_me(), "PYTHONPATH": path},
            )

    def end(self) -> None:
        """End the process. Its workers go on."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._requests.close()


_PR_SET_CHILD_SUBREAPER = 36
_MEMORY_SHARE, _LEAST_MEMORY = 0.5, 2 << 30
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD, signal.SIGCONT)


def start_worker(prepare: Callable[..., Callable[[], T]]) -> tuple[Pipes, T]:
    """Be a template, and return in each worker its pipes and what it loads.

    The template calls `prepare` with the pool's setup. Each worker calls what that returns. If this
    raises, the pool is told why, and the worker ends.
    """
    die_with_parent()
    workers, setup = pickle.load(sys.stdin.buffer)  # of the pool's own process
    load = prepare(*setup)
    pipes = Pipes(*_fork(socket.socket(fileno=int(sys.argv[1]))))
    _limit_memory(workers)
    try:
        return pipes, load()
    except Exception as error:  # a module of the user may raise anything
        pipes.send(Ready(error=short_text("{}", error)))
        sys.exit()


def _fork(requests: socket.socket) -> list[int]:
    """Fork a keeper for each request, and return in its worker only, the descriptors of `Pipes`."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the keepers
    gc.freeze()  # a collection would copy the pages of all objects
    while True:
        _, ends, *_ = socket.recv_fds(requests, 1, 4, socket.MSG_CMSG_CLOEXEC)
        if not ends:
            os._exit(0)  # the pool has ended
        if not os.fork():
            break
        for end in ends:
            os.close(end)
    requests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    os.setsid()
    control, *pipes = ends
    keeper = os.getpid()
    fcntl.fcntl(control, fcntl.F_SETOWN, keeper)
    fcntl.fcntl(control, fcntl.F_SETSIG, signal.SIGCONT)
    fcntl.fcntl(control, fcntl.F_SETFL, os.O_ASYNC)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = Path(tempfile.mkdtemp(prefix="areal-lite-worker-"))
    if worker := os.fork():
        for pipe in pipes:
            os.close(pipe)  # they end with the worker
        _keep(worker, control, folder)
    os.close(control)
    die_with_parent(keeper)
    os.setpgid(0, 0)  # what it sends to its process group must not reach the keeper
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    if "numpy.random" in sys.modules:  # the fork seeds Python's own generator, but not this one
        np.random.seed()
    return pipes


def _keep(worker: int, control: int, folder: Path) -> NoReturn:
    """Wait for the end of the worker, or until the pool wants it, and end all that it started."""
    status = None
    # The pool sends nothing on the control socket: if that can be read, its other end is closed.
    while status is None and not select([control], [], [], 0)[0]:
        if signal.sigwait(_SIGNALS) == signal.SIGTERM:
            break
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = ended[1] if ended[0] == worker else status
    _kill_all(worker)
    remove_folder(folder)
    code = os.waitstatus_to_exitcode(signal.SIGTERM if status is None else status)
    with suppress(OSError):  # the pool has ended
        os.write(control, STATUS.pack(code if code >= 0 else 128 - code))
    os._exit(0)


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

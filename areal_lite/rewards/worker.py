"""A process that computes rewards: `python -m areal_lite.rewards.worker module:function`.

Standard input and output carry frames: a 4-byte little-endian length and that many bytes of
msgpack. A worker sends one `Ready`, then one `Reply` per `Request`, in order and with its number.
The function's own output goes to standard error, and its standard input is empty.

The pool starts a keeper, and the keeper forks the worker, so that nothing of the worker outlives
it. A process that loses its parent becomes the keeper's child, even one in a session of its own
(PR_SET_CHILD_SUBREAPER). When the worker ends, when the pool sends SIGTERM, or when the pool's
process ends, the keeper kills all of them, removes their temporary files and ends with the worker's
status. The kernel reports the end of the pool's process by SIGCONT, because that also reaches a
keeper that is stopped.

The worker may allocate half of the machine's memory, and the kernel kills it before others when
memory is short. If the keeper is killed, the worker dies with it.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import math
import os
import resource
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from numbers import Real
from pathlib import Path

import msgspec

from areal_lite.extensions import load_object
from areal_lite.rewards.folders import remove_folder
from areal_lite.system.processes import ENV_DIE_WITH_PARENT

_LENGTH = struct.Struct("<I")


class Ready(msgspec.Struct, array_like=True):
    """A worker has started. `error` says why it cannot use the function."""

    error: str | None = None


class Request(msgspec.Struct, array_like=True):
    """A completion to score against its answer. `number` differs for each request of a pool."""

    number: int
    completion: str
    answer: str


class Reply(msgspec.Struct, array_like=True, kw_only=True):
    """The result of request `number` after `seconds`: `reward`, or one of RewardError's reasons."""

    number: int
    seconds: float
    reward: float | None = None
    reason: str | None = None
    detail: str = ""


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


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MEMORY_SHARE = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD, signal.SIGCONT)


def fork_worker() -> None:
    """Fork, and return in the child, the worker, which has a temporary folder of its own.

    This process keeps it and does not return.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    owner = int(os.environ.get(ENV_DIE_WITH_PARENT, os.getppid()))
    _die_with_parent(signal.SIGCONT, owner)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    folder = Path(tempfile.mkdtemp(prefix="areal-lite-reward-worker-"))
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
    _limit_memory()


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


def _limit_memory() -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(memory * _MEMORY_SHARE)
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


RewardFunction = Callable[[str, str], float | Awaitable[float]]


def load_reward_function(name: str) -> RewardFunction:
    """Import the reward function `module:name`.

    Raises ValueError if it cannot be imported or cannot be called as f(completion, answer).
    """
    if not name:
        raise ValueError(
            "reward.function is not set: name what scores a completion: module:function, "
            "f(completion, answer) -> float, such as areal_lite.rewards.exact:exact_reward"
        )
    function = load_object("reward.function", name)
    try:
        inspect.signature(function).bind("completion", "answer")
    except TypeError as error:
        raise ValueError(
            f"reward.function={name} is called as f(completion, answer): {error}"
        ) from None
    return function


def answer_check(name: str) -> Callable[[str], object] | None:
    """Return what checks an answer for a verifier of this package: `check_answer` of its module.

    It raises ValueError for an answer that no completion can match. None for any other function.
    """
    module, _, _ = name.partition(":")
    if not module.startswith("areal_lite.rewards."):
        return None
    return getattr(importlib.import_module(module), "check_answer", None)


def execute(function: RewardFunction, request: Request, runner: asyncio.Runner) -> Reply:
    """Call the function, which may be async; whatever it raises becomes a reply."""
    started = time.perf_counter()
    reply = Reply(number=request.number, seconds=0.0)
    try:
        reward = function(request.completion, request.answer)
        if inspect.iscoroutine(reward):
            reward = runner.run(reward)
    except BaseException as error:  # KeyboardInterrupt and CancelledError too
        reply.reason = "exception"
        reply.detail = _text("{}: {}", type(error).__name__, error)
    else:
        reply.reward = _finite(reward)
        if reply.reward is None:
            reply.reason = "bad_result"
            reply.detail = _text("{!r:.100} is not a finite number", reward)
    reply.seconds = time.perf_counter() - started
    return reply


def _finite(reward: object) -> float | None:
    try:
        value = float(reward) if isinstance(reward, Real) else math.nan
    except Exception:  # too large for a float
        return None
    return value if math.isfinite(value) else None


def _text(template: str, *values: object) -> str:
    """Format a short text that can be encoded: an object may describe itself in any way."""
    try:
        return template.format(*values)[:500].encode(errors="replace").decode()
    except Exception as error:
        return f"its description raises {type(error).__name__}"


def main() -> None:
    """Answer requests until standard input ends."""
    fork_worker()
    pid = os.getpid()
    # The duplicates are not inherited by processes that the function starts.
    requests = os.dup(0)
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    try:
        function = load_reward_function(sys.argv[1])
    except ValueError as error:
        _write(replies, Ready(str(error)))
        return
    _write(replies, Ready())
    decoder = msgspec.msgpack.Decoder(Request)
    buffer = bytearray()
    # One event loop for all samples, so that an async function may keep its connections.
    with asyncio.Runner() as runner:
        while received := os.read(requests, 1 << 20):
            buffer += received
            for body in take_frames(buffer):
                reply = execute(function, decoder.decode(body), runner)
                if os.getpid() != pid:
                    os._exit(0)  # the function forked, and this is the child
                _write(replies, reply)


def _write(fd: int, message: msgspec.Struct) -> None:
    rest = memoryview(frame(message))
    while rest:
        rest = rest[os.write(fd, rest) :]


if __name__ == "__main__":
    main()

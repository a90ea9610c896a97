"""Python that a model wrote, run in a process that can do no harm: `await run_python(code)`.

The kernel confines it, for any user and without namespaces (confine.py). docs/workflows.md
(Programs and the sandbox) says what it guarantees, and what is not covered. Where the kernel cannot
confine (Linux before 5.13, Landlock disabled, not Linux) nothing runs and SandboxError is raised.
"""

import asyncio
import errno
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import sysconfig
import tempfile
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_lite.rewards.sandbox import confine
from areal_lite.rewards.sandbox.system_calls import CALLS, number_of
from areal_lite.system.files import remove_folder

_START_TIMEOUT_S = 30.0
_PACKAGES = str(Path(__file__).parents[3])
# The interpreter is isolated: it does not know our package.
_PROGRAM = """
import sys
sys.path.append(sys.argv[1])
from areal_lite.rewards.sandbox import confine
sys.path.pop()
confine.main(sys.argv[2])
"""
_SYSTEM_FILES = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/etc/ld.so.cache",
    "/usr/share/zoneinfo",
    "/dev/urandom",
    "/dev/zero",
)


class SandboxError(RuntimeError):
    """The sandbox itself failed; this says nothing about the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program. The kernel's memory for it, mainly page tables, comes on top."""

    time_s: float = 5.0  # of the wall clock, from the start of execution
    memory_mb: int = 512  # of address space
    file_mb: int = 4  # of each file
    files: int = 256  # creations of files and folders in all
    threads: int = 64  # that live at the same time
    output_bytes: int = 1 << 20  # of standard output and of standard error


_DEFAULT = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a program."""

    ended: str  # `exit`, `timeout`, or `output` (too much of it)
    status: int | None  # for `exit` only; negative for a signal
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.ended == "exit" and self.status == 0


_RECEIVE, _SEND = 0xC0502100, 0xC0182101
# The id and the thread, flags, the number of the call; the rest of struct seccomp_notif.
_NOTIFICATION = struct.Struct("=QIIi60x")
_RESPONSE = struct.Struct("=QqiI")  # the id, the value, minus the error, flags
_CONTINUE = 1
_MOST_ANSWERS = 5000  # 0.1 s of the event loop
_CLONE = next(number_of(call, os.uname().machine) for call in CALLS if call.name == "clone")


class _Supervisor:
    """Bounds the number of threads, files and folders of one program, on the running event loop.

    The kernel has no such limit for every user. It asks here about each creation
    (seccomp_unotify(2)), and the program waits for the answer. A yes lets the call continue as it
    is: the kernel has read the numbers among its arguments, which decide, and the program cannot
    change them.

    Of `threads`, which live at the same time, the bound is not sharp: threads that create others at
    the same moment can reach twice as many. `files` is the number of creations in all; a file that
    is removed still counts, and so does an opening that would create a file if there were none.
    Answers take time from the event loop, so a program that asks too often is killed.
    """

    def __init__(self, listener: int, pid: int, limits: Limits) -> None:
        self._listener = listener
        self._pid = pid
        self._answers_left = _MOST_ANSWERS
        self._threads = limits.threads
        self._files_left = limits.files
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listener, self._answer)

    def close(self) -> None:
        """Stop answering. From now on the kernel refuses every question."""
        self._loop.remove_reader(self._listener)
        os.close(self._listener)

    def _answer(self) -> None:
        if not (events := self._poll.poll(0)):
            return
        if not events[0][1] & select.POLLIN:  # the program has ended
            self._loop.remove_reader(self._listener)
            return
        notification = bytearray(_NOTIFICATION.size)
        with suppress(FileNotFoundError):  # the call was interrupted
            fcntl.ioctl(self._listener, _RECEIVE, notification)
            self._answers_left -= 1
            if self._answers_left < 0:
                os.kill(self._pid, signal.SIGKILL)  # it waits, so the number is still its own
                return
            number, _, _, call = _NOTIFICATION.unpack(notification)
            error = self._refusal(call)
            flags = 0 if error else _CONTINUE
            fcntl.ioctl(self._listener, _SEND, _RESPONSE.pack(number, 0, -error, flags))

    def _refusal(self, call: int) -> int:
        """Return the error number for a creation, or 0 to allow it."""
        if call == _CLONE:
            with suppress(OSError):
                if len(os.listdir(f"/proc/{self._pid}/task")) < self._threads:
                    return 0
            return errno.EAGAIN
        self._files_left -= 1
        return 0 if self._files_left >= 0 else errno.EDQUOT


async def run_python(code: str, stdin: str = "", limits: Limits = _DEFAULT) -> Outcome:
    """Run `code` as a program, which dies with the calling thread. Raises SandboxError."""
    channel, theirs = socket.socketpair()
    with channel, theirs:
        scratch = Path(tempfile.mkdtemp(prefix="areal-lite-sandbox-"))
        try:
            (scratch / "program.py").write_bytes(code.encode(errors="replace"))
            process = await _start(scratch, stdin, limits, theirs)
            try:
                await _wait_until_ready(process)
                # The program sent the descriptor before it was ready.
                _, (listener,), *_ = socket.recv_fds(channel, 64, 1, socket.MSG_CMSG_CLOEXEC)
                with closing(_Supervisor(listener, process.pid, limits)):
                    return await _watch(process, limits)
            finally:
                await _end(process)
        finally:
            await asyncio.to_thread(remove_folder, scratch)


async def _start(
    scratch: Path, stdin: str, limits: Limits, channel: socket.socket
) -> asyncio.subprocess.Process:
    """Start the program. It reads `stdin` from a file that has no name any more."""
    options = ("-I", "-S", "-B", "-X", "utf8")
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    settings = _settings(limits) | {"channel": channel.fileno()}
    given = scratch / "stdin"
    given.write_bytes(stdin.encode(errors="replace"))
    with given.open("rb") as readable:
        given.unlink()
        return await asyncio.create_subprocess_exec(
            *(sys.executable, *options, "-c", _PROGRAM, _PACKAGES, json.dumps(settings)),
            cwd=scratch,
            env={"HOME": str(scratch), "TMPDIR": str(scratch), **threads},
            pass_fds=(channel.fileno(),),
            stdin=readable,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    # `wait` also waits for the end of the pipes, and a full pipe ends only when it is read.
    await asyncio.gather(*(stream.read() for stream in _streams(process)))
    await process.wait()


async def _watch(process: asyncio.subprocess.Process, limits: Limits) -> Outcome:
    """Collect the output of the program until it ends or exceeds a limit."""
    collected = bytearray(), bytearray()
    ended = "exit"
    status = None

    async def collect(stream: asyncio.StreamReader, into: bytearray) -> None:
        while data := await stream.read(1 << 16):
            if len(into) <= limits.output_bytes:
                into += data
            else:  # the stream ends with the program
                with suppress(ProcessLookupError):
                    process.kill()

    try:
        async with asyncio.timeout(limits.time_s):
            await asyncio.gather(*map(collect, _streams(process), collected))
            status = await process.wait()
    except TimeoutError:
        ended = "timeout"
    if max(map(len, collected)) > limits.output_bytes:
        ended, status = "output", None
    stdout, stderr = (
        bytes(output[: limits.output_bytes]).decode(errors="replace") for output in collected
    )
    return Outcome(ended=ended, status=status, stdout=stdout, stderr=stderr)


async def _wait_until_ready(process: asyncio.subprocess.Process) -> None:
    stdout, stderr = _streams(process)
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            if await stdout.read(1) != confine.READY:
                message = (await stderr.read()).decode(errors="replace").strip()
                raise SandboxError(message or "sandbox: it ended before the program began")
    except TimeoutError:
        raise SandboxError(f"sandbox: not ready within {_START_TIMEOUT_S:g} s") from None


def _streams(
    process: asyncio.subprocess.Process,
) -> tuple[asyncio.StreamReader, asyncio.StreamReader]:
    assert process.stdout and process.stderr
    return process.stdout, process.stderr


def _settings(limits: Limits) -> dict[str, Any]:
    paths = sysconfig.get_paths()
    packages = list(dict.fromkeys((paths["purelib"], paths["platlib"])))
    libraries = [paths["stdlib"], paths["platstdlib"], os.path.join(sys.base_prefix, "lib")]
    return {
        "parent": os.getpid(),
        "readable": [*packages, *libraries, *_SYSTEM_FILES],
        "packages": packages,
        "memory_bytes": limits.memory_mb << 20,
        "file_bytes": limits.file_mb << 20,
        # Stops a busy process even if we cannot.
        "cpu_s": int(limits.time_s) + 2,
    }

"""Python that a model wrote, run in a process that can do no harm: `await run_python(code)`.

Guaranteed, by the kernel, for any user and without namespaces (areal_lite/rewards/sandbox/confine.py):

  * files: it reads the interpreter's libraries and its own scratch folder, and writes nothing but that folder, which is removed afterwards;
  * no network and no other socket (so no asyncio either); no new process, so no fork bomb and nobody who outlives it; no signals to others;
  * memory (address space), processor time, size of a file and number of open files are limited; so is what it may print;
  * it is killed when its wall-clock time is over, measured from when it begins to execute, and when the process that started it dies;
  * it sees no environment variable, no argument and no open file of ours.

Not guaranteed: anything against a hole in the kernel's system calls that are left (areal_lite/rewards/sandbox/confine.py lists them); the sum of
the files that it writes while it runs (each is limited); that it learns nothing of the names and sizes of files elsewhere (`stat` works).
Where the kernel cannot confine (Linux before 5.13, Landlock not enabled, not Linux) nothing runs: SandboxError.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from areal_lite.rewards.sandbox.confine import READY

_START_TIMEOUT_S = 30.0
_CONFINE = Path(__file__).with_name("confine.py")
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
    """The sandbox itself failed: this says nothing about the program."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`time_s`: wall clock, from the start of execution. `output_bytes`: of standard output and of standard error, each."""

    time_s: float = 5.0
    memory_mb: int = 512
    file_mb: int = 16
    output_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """`ended`: `exit` (with `status`, negative for a signal), `timeout` or `output` (it printed more than it may)."""

    ended: str
    status: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def ok(self) -> bool:
        return self.ended == "exit" and self.status == 0


async def run_python(code: str, stdin: str = "", limits: Limits = Limits()) -> Outcome:
    """Run `code` as a program of its own. Raises SandboxError if it could not be begun. Call it from a thread that lasts: the main one."""
    scratch = Path(tempfile.mkdtemp(prefix="areal-lite-sandbox-"))
    try:
        (scratch / "program.py").write_bytes(code.encode(errors="replace"))
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-I",
                "-S",
                "-B",
                "-X",
                "utf8",
                str(_CONFINE),
                json.dumps(_settings(limits)),
            ),
            cwd=scratch,
            env={
                "HOME": str(scratch),
                "TMPDIR": str(scratch),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            return await _watch(process, stdin.encode(errors="replace"), limits)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            process.stdin.close()
            await asyncio.gather(
                process.stdout.read(), process.stderr.read()
            )  # asyncio waits for the end of pipes, also of full ones
            await process.wait()
    finally:
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)


async def _watch(process: asyncio.subprocess.Process, stdin: bytes, limits: Limits) -> Outcome:
    await _wait_ready(process)
    started = time.monotonic()
    feeding = asyncio.ensure_future(_feed(process.stdin, stdin))
    stdout, stderr = bytearray(), bytearray()
    readers = [
        asyncio.ensure_future(_collect(stream, into, limits.output_bytes))
        for stream, into in ((process.stdout, stdout), (process.stderr, stderr))
    ]
    ended, status = "exit", None
    try:
        async with asyncio.timeout(limits.time_s):
            await asyncio.gather(*readers)
            status = await process.wait()
    except TimeoutError:
        ended = "timeout"
    except _TooMuch:
        ended = "output"
    finally:
        for task in (feeding, *readers):
            task.cancel()
        await asyncio.wait((feeding, *readers))
    texts = (
        bytes(data[: limits.output_bytes]).decode(errors="replace") for data in (stdout, stderr)
    )
    return Outcome(ended, status, *texts, time.monotonic() - started)


async def _wait_ready(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            if await process.stdout.read(1) != READY:
                raise SandboxError(
                    (await process.stderr.read()).decode(errors="replace").strip()
                    or "sandbox: it ended before the program began"
                )
    except TimeoutError:
        raise SandboxError(f"sandbox: not ready within {_START_TIMEOUT_S:g} s") from None


class _TooMuch(Exception):
    pass


async def _collect(stream: asyncio.StreamReader, into: bytearray, limit: int) -> None:
    """Read to the end. Raises _TooMuch."""
    while data := await stream.read(1 << 16):
        into += data
        if len(into) > limit:
            raise _TooMuch


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(ConnectionError):  # a program need not read its input
        stream.write(data)
        await stream.drain()
        stream.close()


def _settings(limits: Limits) -> dict:
    paths = sysconfig.get_paths()
    packages = list(dict.fromkeys((paths["purelib"], paths["platlib"])))
    libraries = [paths["stdlib"], paths["platstdlib"], os.path.join(sys.base_prefix, "lib")]
    return {
        "parent": os.getpid(),
        "readable": [*dict.fromkeys((*packages, *libraries, *_SYSTEM_FILES))],
        "packages": packages,
        "memory_bytes": limits.memory_mb << 20,
        "file_bytes": limits.file_mb << 20,
        "cpu_s": int(limits.time_s)
        + 2,  # a process that does not wait is stopped even if we cannot do it
    }

"""Child processes that do not outlive their parent, their logs, the environment, time."""

import ctypes
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ENV_DIE_WITH_PARENT = "AREAL_LITE_DIE_WITH_PARENT"
_PR_SET_PDEATHSIG = 1
LONGEST_BACK_OFF_S = 60.0
_TAIL_BYTES = 1 << 18
_START_S = time.time() - time.monotonic()
_ODD = re.compile(r"[^ -~\n\t\xa0\u3000]")


def visible(text: str) -> str:
    """Return text for a terminal, with codes for what would act there, or hide.

    Text of a model could write to the clipboard, move the cursor, reorder a line or smuggle tags.
    """

    def shown(match: re.Match[str]) -> str:
        plain = match[0].isprintable() and match[0] < "\U000e0000"
        return match[0] if plain else match[0].encode("unicode_escape").decode()

    return _ODD.sub(shown, text)


def log_entry(text: str) -> str:
    """Return text for a log. Further lines are indented: no text can look like an entry."""
    return visible(text).replace("\n", "\n    ")


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return log_entry(super().format(record))


def die_with_parent(pid: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent `pid` dies for any reason (Linux only).

    None: if the parent asked for it. A user's own `areal-lite train &` outlives the shell.
    """
    parent = pid or os.environ.get(ENV_DIE_WITH_PARENT)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # the parent died before the request
        os.kill(os.getpid(), signal.SIGKILL)


def run_role(work: Callable[[Path], None], *errors: type[Exception]) -> int:
    """Do the work of a role in the run directory that argv names; return its exit status.

    It logs to stderr. An error of one of `errors`, which users can mend, has no traceback there.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    try:
        work(Path(sys.argv[1]))
    except Exception as error:
        logging.getLogger("__main__").error("%s", error, exc_info=not isinstance(error, errors))
        return 1
    return 0


def dying_with_me() -> dict[str, str]:
    """Return the environment that makes a child process end with this one.

    The kernel watches the thread that starts the child: that thread must live as long.
    """
    return {ENV_DIE_WITH_PARENT: str(os.getpid())}


def tail(path: Path, lines: int = 20, start: int = 0) -> str:
    """Return the last lines of a log file, from byte `start` on and at most 256 KiB."""
    if not path.exists():
        return "(no log)"
    with open(path, "rb") as log:
        log.seek(max(start, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return visible("\n".join(log.read().decode(errors="replace").splitlines()[-lines:]))


def ending(status: int) -> str:
    """Say how a process with this exit status ended; negative: the signal."""
    if status != -signal.SIGKILL:
        return f"exited with status {status}"
    return "was killed (exit status -9; the kernel does that where memory is full)"


def process_namespace() -> str:
    """Return a name of the machine and container in which this process's id is valid."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the cores that this process may use at once, also in a container with a limit."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # another system, or "max": no limit
        limit_us, period_us = map(int, quota.read_text().split())
        cores = min(cores, max(1, limit_us // period_us))
    return cores


def start_daemon(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run `function` on a daemon thread, which never keeps the process alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # the caller of `future.result` gets it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=getattr(function, "__name__", "call")).start()
    return future


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set one variable in a block, and restore it afterwards."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def handling(handler: Callable[[int, Any], object], *signals: int) -> Iterator[None]:
    """Handle signals in a block, but not SIGHUP under `nohup`."""
    under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    caught = [number for number in signals if number != signal.SIGHUP or not under_nohup]
    previous = {number: signal.signal(number, handler) for number in caught}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


def steady_time() -> float:
    """Return the wall-clock time in seconds, without changes of the clock since the start."""
    return _START_S + time.monotonic()


def back_off_s(failures: int) -> float:
    """Return the wait after so many failures in a row, in seconds: 0, 1, 2, 4 and so on."""
    return min(2.0 ** min(failures - 2, 6), LONGEST_BACK_OFF_S) if failures > 1 else 0.0

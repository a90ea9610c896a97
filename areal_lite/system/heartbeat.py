"""The heartbeat of a process, for the supervisor that started it.

A process says which phase it is in (`enter`) and that it makes progress (`beat`), in a file that
the supervisor names in the environment: its text is the phase, its modification time that of the
newest heartbeat. On SIGUSR2 a process prints the Python stacks of all its threads to its log.
Without a supervisor, a process that hangs ends itself (`limit`).
"""

import faulthandler
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from areal_lite.system.files import write_atomically

ENV_HEARTBEAT = "AREAL_LITE_HEARTBEAT"
STACK_SIGNAL = signal.SIGUSR2

_INTERVAL_S = 1.0


@dataclass
class _Heartbeat:
    """The heartbeat file, None until `start`, and the time of the newest one in seconds."""

    file: Path | None = None
    newest_at: float = 0.0
    limit_s: float | None = None  # without one

    def renew(self) -> None:
        self.newest_at = time.monotonic()
        if self.limit_s:
            # A thread of C, which needs nothing of what may hang.
            faulthandler.dump_traceback_later(self.limit_s, exit=True)


_own = _Heartbeat()


def start(phase: str) -> None:
    """Begin the heartbeat of this process, in `phase`, and print stacks on STACK_SIGNAL.

    Only the process that a supervisor started calls it, and not its children.
    """
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    if name := os.environ.get(ENV_HEARTBEAT):
        _own.file = Path(name)
    enter(phase)


def limit(seconds: float) -> None:
    """End this process, with its stacks in its log, after `seconds` without a heartbeat.

    A supervisor does so itself: it knows which of its processes wait for each other.
    """
    if not _own.file:
        _own.limit_s = seconds
        _own.renew()


def enter(phase: str) -> None:
    """Say that `phase` begins, such as "training step 3"."""
    _own.renew()
    if _own.file:
        with suppress(OSError):  # a full disk must not end a run because of this file
            write_atomically(_own.file, phase, durable=False)


def beat() -> None:
    """Say that the phase makes progress. It is cheap: it counts at most once a second."""
    if time.monotonic() - _own.newest_at >= _INTERVAL_S:
        _own.renew()
        if _own.file:
            with suppress(OSError):
                os.utime(_own.file)


def read(file: Path) -> tuple[str, int] | None:
    """Return the phase and the time in ns of the newest heartbeat; None before the first one."""
    try:
        return file.read_text(), file.stat().st_mtime_ns
    except OSError:
        return None

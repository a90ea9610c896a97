"""Signs of life of a process, for the supervisor that started it.

A process says which phase it is in (`enter`) and that it goes on (`beat`). The supervisor names the
file for this in the environment: its text is the phase, its time is that of the newest sign.
Without a supervisor nothing is written.

On SIGUSR2 a process prints the Python stacks of all its threads to its log, even while it waits for
a lock or inside a library.
"""

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from areal_lite.system.files import write_atomically

ENV_HEARTBEAT = "AREAL_LITE_HEARTBEAT"
STACK_SIGNAL = signal.SIGUSR2

_INTERVAL_S = 1.0


class _Heart:
    """The file of this process, None until `start`, and when it was touched last."""

    file: Path | None = None
    touched_at = 0.0


def start(phase: str) -> None:
    """Begin to give signs of life, in `phase`, and print stacks on STACK_SIGNAL.

    Only the process that a supervisor started calls it, and not its children.
    """
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    if name := os.environ.get(ENV_HEARTBEAT):
        _Heart.file = Path(name)
    enter(phase)


def enter(phase: str) -> None:
    """Say that `phase` begins, such as "training step 3"."""
    if _Heart.file:
        _Heart.touched_at = time.monotonic()
        with suppress(OSError):  # a full disk must not end a run because of this file
            write_atomically(_Heart.file, phase, durable=False)


def beat() -> None:
    """Say that the phase makes progress. It is cheap: a file is touched at most once a second."""
    if _Heart.file and time.monotonic() - _Heart.touched_at >= _INTERVAL_S:
        _Heart.touched_at = time.monotonic()
        with suppress(OSError):
            os.utime(_Heart.file)


def read(file: Path) -> tuple[str, int] | None:
    """Return the phase and the time of the newest sign in ns; None before the first one."""
    try:
        return file.read_text(), file.stat().st_mtime_ns
    except OSError:
        return None

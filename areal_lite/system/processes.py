"""Child processes: none outlives the process that started it."""

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

ENV_DIE_WITH_PARENT = "AREAL_LITE_DIE_WITH_PARENT"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies for any reason (Linux only).

    It does nothing unless the parent asked for it through the environment: a user's own
    `areal-lite train &` outlives the shell.
    """
    parent = os.environ.get(ENV_DIE_WITH_PARENT)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # the parent died before the request
        os.kill(os.getpid(), signal.SIGKILL)


def dying_with_me() -> dict[str, str]:
    """Return the environment that makes a child process end with this one.

    The kernel watches the thread that starts the child: that thread must live as long.
    """
    return {ENV_DIE_WITH_PARENT: str(os.getpid())}


def tail(path: Path, lines: int = 20) -> str:
    """Return the last lines of a log file."""
    if not path.exists():
        return "(no log)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def process_namespace() -> str:
    """Return a name of the machine and container in which this process's id is valid."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"

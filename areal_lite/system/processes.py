"""What every process that we start has in common: it does not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

ENV_DIE_WITH_PARENT = "AREAL_LITE_DIE_WITH_PARENT"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, however the parent dies (Linux).

    Only when the parent asked for it through the environment: a user's own `areal-lite train &` outlives the shell.
    """
    parent = os.environ.get(ENV_DIE_WITH_PARENT)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before we could ask
        os.kill(os.getpid(), signal.SIGKILL)


def dying_with_me() -> dict[str, str]:
    """What to add to the environment of a process that shall end with this one. The thread that starts it must live as long."""
    return {ENV_DIE_WITH_PARENT: str(os.getpid())}


def tail(path: Path, lines: int = 20) -> str:
    """The last lines of a log file."""
    return (
        "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
        if path.exists()
        else "(no log)"
    )

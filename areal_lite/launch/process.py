"""What every process that we start has in common: it does not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

ENV_DIE_WITH_PARENT = "AREAL_LITE_DIE_WITH_PARENT"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, however the parent dies (Linux).

    Only when the parent asked for it through the environment: a user's own `areal-lite train &` outlives the shell.
    """
    if os.environ.get(ENV_DIE_WITH_PARENT) != "1" or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # the parent died before we could ask
        os.kill(os.getpid(), signal.SIGKILL)

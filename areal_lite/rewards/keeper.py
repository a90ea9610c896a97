"""A process that keeps a reward worker, so that nothing of the worker outlives it.

The pool starts the keeper, and the keeper forks the worker. A process that loses its parent becomes
the keeper's child, even one in a session of its own (PR_SET_CHILD_SUBREAPER). When the worker ends,
when the pool sends SIGTERM, or when the pool's process ends, the keeper kills all of them, removes
their temporary files and ends with the worker's status. The kernel reports the end of the pool's
process by SIGCONT, because that also reaches a keeper that is stopped.

The worker may allocate half of the machine's memory, and the kernel kills it before others when
memory is short. If the keeper is killed, the worker dies with it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from areal_lite.rewards.folders import remove_folder
from areal_lite.system.processes import ENV_DIE_WITH_PARENT

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MEMORY_SHARE = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD, signal.SIGCONT)


def fork_worker() -> None:
    """Fork, and return in the child, the worker. This process keeps it and does not return.

    The worker's temporary files are in a folder of its own.
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
                for child in _children():
                    os.kill(child, signal.SIGKILL)
                os.waitpid(-1, 0)


def _children() -> list[int]:
    """Return the numbers of the keeper's children. None is reaped meanwhile."""
    import psutil  # most keepers have nothing left to kill

    return [child.pid for child in psutil.Process().children()]


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

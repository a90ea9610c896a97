"""Tell which processes run, also while they end."""

from collections.abc import Iterable

import psutil


def running(pids: Iterable[int]) -> list[psutil.Process]:
    """Return the processes that run. A zombie does not run."""
    found = []
    for pid in pids:
        try:  # a process may end at any moment, also between two questions
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found

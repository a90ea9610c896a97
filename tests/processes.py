"""Which processes run, also while they end."""

from collections.abc import Iterable

import psutil


def running(pids: Iterable[int]) -> list[int]:
    """Return the process ids that run. A zombie does not run."""
    return [pid for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it may end at any moment: asking first whether it exists races
        return False

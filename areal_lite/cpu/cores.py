"""The cores that others leave idle, for the training steps of a machine without a GPU.

Servers, controller and the user's programs come first: a training step gets the cores that they
did not use during the one before it, so it gives them back one step after they need them. It also
gets a core that they hardly used, if it is faster with it: every operator waits for the thread on
that core.

Weights do not depend on the number of threads, bit by bit, where the kernels of this package
attend: they have one thread, oneDNN divides products by rows and columns, torch by elements and
rows. Where torch attends (cpu/trainer.py), another number of threads rounds otherwise.
"""

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from areal_lite.system.processes import usable_cores

log = logging.getLogger(__name__)
_STAT = Path("/proc/stat")
# user, system, irq, softirq and steal of a line of /proc/stat; what is nice gives way
_BUSY = (0, 2, 5, 6, 7)


class Usage(NamedTuple):
    """Seconds of processor time up to now."""

    clock: float  # a steady clock
    own: float  # this process
    busy: float  # all processes, on the cores that this one may use

    @classmethod
    def now(cls, stat: Path = _STAT) -> "Usage":
        """Read it from the kernel."""
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = [line.split() for line in stat.read_text().splitlines()]
        ticks = sum(int(line[1 + i]) for line in lines if line[0] in cores for i in _BUSY)
        return cls(time.monotonic(), time.process_time(), ticks / os.sysconf("SC_CLK_TCK"))


def threads_left(before: Usage, after: Usage, cores: int, ranks: int) -> int:
    """Return the threads with which a step of each of `ranks` alike processes is fastest.

    An operator is as slow as its slowest thread, which has the free share of a core.
    """
    elapsed = max(after.clock - before.clock, 1e-3)
    others = (after.busy - before.busy - ranks * (after.own - before.own)) / elapsed
    free = (cores - max(others, 0.0)) / ranks
    whole = max(1, int(free))
    more = whole + 1 if ranks * (whole + 1) <= cores else whole
    return more if more * (1 - ranks * (more - free)) > whole else whole


class FreeCores:
    """The threads of a rank's training steps; the first step has one."""

    def __init__(self) -> None:
        self._threads = 1
        self._ranks = 0  # of this machine; 0 before the first step

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Compute on the free cores inside the block. OMP_NUM_THREADS, if set, decides instead."""
        if not self._ranks:  # all ranks ask, wherever the environment decides
            self._ranks = _ranks_of_this_machine()
        if "OMP_NUM_THREADS" in os.environ or not _STAT.exists():
            yield
            return
        torch.set_num_threads(self._threads)
        before = Usage.now()
        try:
            yield
        finally:
            torch.set_num_threads(1)
        cores = usable_cores()
        threads = threads_left(before, Usage.now(), cores, self._ranks)
        if threads != self._threads:
            log.info("the next training step has %d of %d cores", threads, cores)
        self._threads = threads


def _ranks_of_this_machine() -> int:
    names: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    return names.count(socket.gethostname())

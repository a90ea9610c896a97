"""Where a run that was killed or stopped goes on (`resume=auto` on the same run directory), and how it is stopped. Imports no torch.

Everything goes on from S, the step of the newest complete checkpoint, 0 without one, which is also a version of the weights:

* the trainer takes up the checkpoint: weights, optimizer, schedule, random state (trainer/loop.py); what was logged after S is cut off;
* the store (`Store.recover`) gives back what finished and was not used before step S, if weights up to S sampled it; what is in flight, or was
  sampled by weights that are lost, is dropped, and its prompts come again;
* the controller goes on at version S with the prompt sampler, the counters and the waiting groups that the store tells of. Servers start with
  version 0 and get no request before the trainer has caught them up.

A file `stop` in the run directory asks a run to end: the trainer finishes its step, saves a checkpoint and ends well. The file stays, to tell
that there are steps left, until the next start. The supervisor makes it on SIGUSR1, and then exits with STOPPED.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHECKPOINTS = "checkpoints"
MARKER = "metadata.json"  # Megatron writes it last
STOPPED = os.EX_TEMPFAIL  # exit status: to be started again
_STOP = "stop"
# Of an earlier start: addresses of processes that are gone, and what is true at the end of a run only.
_STALE = (
    "controller.json",
    "openai_endpoint.json",
    "servers/*",
    "controller_totals.json",
    "summary.json",
    _STOP,
)


def complete(folder: Path) -> list[int]:
    """The steps of which `folder` holds a checkpoint, ascending."""
    found = (
        (
            re.fullmatch(r"step-(\d+)", path.name)
            for path in folder.iterdir()
            if (path / MARKER).is_file()
        )
        if folder.is_dir()
        else ()
    )
    return sorted(int(match[1]) for match in found if match)


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`."""
    steps = complete(folder)
    return folder / f"step-{steps[-1]}" if steps else None


def start_version(run_dir: Path) -> int:
    """The step, and version of the weights, from which the run goes on."""
    return max(complete(run_dir / CHECKPOINTS), default=0)


def stop_requested(run_dir: Path) -> bool:
    return (run_dir / _STOP).exists()


def withdraw_stop(run_dir: Path) -> None:
    """There are no steps left to stop before."""
    (run_dir / _STOP).unlink(missing_ok=True)


def forget_start(run_dir: Path) -> None:
    """Remove what an earlier start left that a role could take for this one's."""
    for pattern in _STALE:
        for path in run_dir.glob(pattern):
            path.unlink()


@contextmanager
def sole_run(run_dir: Path) -> Iterator[None]:
    """This process alone runs what is in `run_dir`, and SIGUSR1 asks it to stop. Raises ValueError while another process does."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / "lock", "w") as lock:  # a lock ends with its process, however that ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"run_dir={run_dir}: a run is going on there, end it first or choose another folder"
            ) from None
        previous = signal.signal(signal.SIGUSR1, lambda *_: (run_dir / _STOP).touch())
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, previous)

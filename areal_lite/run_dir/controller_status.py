"""Keep the controller's state in a small file, which it replaces every second.

The panel of `areal-lite train` reads it. The file exists while the controller runs.
"""

from enum import StrEnum
from pathlib import Path

import msgspec

from areal_lite.run_dir.paths import CONTROLLER_STATUS_FILE
from areal_lite.system.files import read_regular, write_atomically


class TrainerPhase(StrEnum):
    """The phase of the trainer, as its requests tell the controller."""

    LOADING = "loading"  # it has not asked for a batch yet
    WAITING = "waiting"  # it has asked for a batch that is not complete
    TRAINING = "training"
    PUSHING = "pushing"


class ControllerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The groups and requests of the controller, and the state of trainer and servers."""

    version: int  # the servers', the step of the last push
    step: int  # completed training steps
    trainer: TrainerPhase
    batch_step: int | None  # the step, from 0, whose batch was asked for and is not complete
    missing_groups: int  # that a batch still needs
    held_by: int | None = None  # the running group that a whole batch may not pass (buffer.window)
    queued_groups: int  # finished ones that wait for the trainer
    running_groups: int  # that are being generated
    capacity: int | None  # groups that may start now; None without a bound
    in_flight: int  # trajectories that are being generated
    concurrency_limit: int  # trajectories that may be generated at a time
    requests: int  # that the servers hold
    servers_ready: int  # that take requests
    servers_announced: int  # that are up
    evaluating: list[int]  # versions
    evaluated: str = ""  # how many completions of the evaluations are scored, of how many
    longest_wait: str = ""  # the episode that has been played longest, if it is conspicuous

    @property
    def can_admit(self) -> bool:
        return self.capacity is None or self.capacity > 0


def write_status(run_dir: Path, status: ControllerStatus) -> None:
    """Replace the status of a run. A crash of the machine may lose it."""
    write_atomically(run_dir / CONTROLLER_STATUS_FILE, msgspec.json.encode(status), durable=False)


def read_status(run_dir: Path) -> ControllerStatus | None:
    """Return the status of a run; None while no controller runs, or if it cannot be read."""
    try:
        raw = read_regular(run_dir / CONTROLLER_STATUS_FILE)
        return msgspec.json.decode(raw, type=ControllerStatus)
    except (OSError, ValueError, RecursionError):
        return None

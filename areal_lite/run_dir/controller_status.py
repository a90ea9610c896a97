"""Keep the controller's state in a small file, which it replaces every second.

The panel of `areal-lite train` reads it. The file exists while the controller runs.
"""

from enum import StrEnum
from pathlib import Path

import msgspec

from areal_lite.run_dir.paths import CONTROLLER_STATUS_FILE
from areal_lite.system.files import write_atomically


class TrainerPhase(StrEnum):
    """The phase of the trainer, as its requests tell the controller."""

    LOADING = "loading"  # it has not asked for a batch yet
    WAITING = "waiting"  # it has asked for a batch that is not complete
    TRAINING = "training"
    PUSHING = "pushing"


class ControllerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The groups and requests of the controller, and the state of trainer and servers.

    Args:
        version: the servers' version, the step of the last push.
        step: completed training steps.
        trainer: what the trainer does.
        batch_step: the step, from 0, whose batch was asked for and is not complete.
        missing_groups: groups that a batch still needs.
        held_by: the running group that a whole batch may not pass (`buffer.window`).
        queued_groups: finished groups that wait for the trainer.
        running_groups: groups that are being generated.
        capacity: groups that may start now; None without a bound.
        in_flight: trajectories that are being generated.
        concurrency_limit: trajectories that may be generated at a time.
        requests: requests that the servers hold.
        servers_ready: servers that take requests.
        servers_announced: servers that are up.
        evaluating: the versions that are being evaluated.
    """

    version: int
    step: int
    trainer: TrainerPhase
    batch_step: int | None
    missing_groups: int
    held_by: int | None = None
    queued_groups: int
    running_groups: int
    capacity: int | None
    in_flight: int
    concurrency_limit: int
    requests: int
    servers_ready: int
    servers_announced: int
    evaluating: list[int]

    @property
    def can_admit(self) -> bool:
        """Return whether a group may start now."""
        return self.capacity is None or self.capacity > 0


def write_status(run_dir: Path, status: ControllerStatus) -> None:
    """Replace the status of a run. A crash of the machine may lose it."""
    path = run_dir / CONTROLLER_STATUS_FILE
    write_atomically(path, msgspec.json.encode(status), durable=False)


def read_status(run_dir: Path) -> ControllerStatus | None:
    """Return the status of a run; None while no controller runs, or if it cannot be read."""
    try:
        raw = (run_dir / CONTROLLER_STATUS_FILE).read_bytes()
        return msgspec.json.decode(raw, type=ControllerStatus)
    except (OSError, ValueError, RecursionError):
        return None


def remove_status(run_dir: Path) -> None:
    """Remove the status: the controller ends."""
    (run_dir / CONTROLLER_STATUS_FILE).unlink(missing_ok=True)

"""Train without servers, to find out whether the trainer is at fault.

`areal-lite train debug=train_only:RUN_DIR` starts the trainer only. It trains on the batches of a
stored run, the same ones each time (stored_run.py).
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from areal_lite.config import TrainConfig, save_config
from areal_lite.launch.roles import Placement, Roles
from areal_lite.tools.report.run_watch import CONSOLE
from areal_lite.tools.stored_run import check_stored_run


def train_only(
    config: TrainConfig, run_dir: Path, placement: Placement, report_steps: Callable[[], None]
) -> None:
    """Train on the batches of a stored run. Raises RoleFailed when a role fails.

    `report_steps` is called several times a second.
    """
    save_config(config, run_dir)
    with Roles(run_dir) as roles:
        controller = roles.start_module("controller", "areal_lite.tools.stored_run")
        ranks = roles.start_ranks("areal_lite.trainer.loop", config.trainer, placement.trainer)
        with CONSOLE.watch(config, run_dir) as show:

            def watch() -> None:
                show()
                report_steps()

            roles.wait([*ranks, controller], watch=watch)


class DebugMode(NamedTuple):
    """Half of a run. `check` raises ValueError if it cannot run with these settings."""

    check: Callable[[TrainConfig], None]
    run: Callable[[TrainConfig, Path, Placement, Callable[[], None]], None]


def _check_training(config: TrainConfig) -> None:
    if config.eval.problems or config.buffer.replay.capacity:
        raise ValueError(
            "debug=train_only has no servers: set eval.problems=0 and buffer.replay.capacity=0"
        )
    check_stored_run(config)


TRAIN_ONLY = DebugMode(_check_training, train_only)

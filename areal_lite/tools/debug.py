"""Run one half of a training run, to find out which half is at fault.

* `areal-lite train debug=rollout_only` starts servers and controller only. They write
  trainer.steps x trainer.batch_groups groups, sampled by the initial model, to the store.
* `areal-lite train debug=train_only:RUN_DIR` starts the trainer only. It trains on the batches of a
  stored run, the same ones each time (stored_run.py).
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from areal_lite.config import TrainConfig, save_config
from areal_lite.controller.protocol import ControllerClient
from areal_lite.launch.roles import Placement, Roles
from areal_lite.launch.server_pool import train_pool
from areal_lite.run_dir.paths import STORE_FILE, TOTALS_FILE
from areal_lite.run_dir.reader import RunReader
from areal_lite.system.files import write_json
from areal_lite.tools.report.run_watch import CONSOLE
from areal_lite.tools.stored_run import check_stored_run

_POLL_INTERVAL_S = 0.5


def rollout_only(
    config: TrainConfig, run_dir: Path, placement: Placement, report_steps: Callable[[], None]
) -> None:
    """Generate all groups of a run without training. Raises RoleFailed when a role fails.

    The version stays 0, so the staleness bound is raised until all groups are admitted.
    """
    groups = config.trainer.steps * config.trainer.batch_groups
    config.buffer.max_staleness, config.buffer.window = config.trainer.steps - 1, None
    save_config(config, run_dir)
    servers = dict(enumerate(placement.servers))
    with train_pool(config, run_dir, servers) as pool, Roles(run_dir) as roles:
        controller = roles.start_module("controller", "areal_lite.controller.service")
        pool.wait_ready(roles.check)
        client = ControllerClient(run_dir, config.sync.timeout_s)
        store = RunReader(run_dir / STORE_FILE)

        def done() -> int:
            return store.counts()["finished"]

        with CONSOLE.count(f"rollouts · {run_dir}", "group", groups, done) as show:
            while done() < groups:
                roles.check()
                pool.check()
                show()
                time.sleep(_POLL_INTERVAL_S)
        store.close()
        write_json(run_dir / TOTALS_FILE, client.finish())
        client.close()
        roles.wait([controller])


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


def _check_rollouts(config: TrainConfig) -> None:
    if replay := config.buffer.replay.capacity:
        raise ValueError(
            "debug=rollout_only stores a number of groups, and "
            f"buffer.replay.capacity={replay} generates without end: set it to 0"
        )


def _check_training(config: TrainConfig) -> None:
    if config.eval.problems or config.buffer.replay.capacity:
        raise ValueError(
            "debug=train_only has no servers: set eval.problems=0 and buffer.replay.capacity=0"
        )
    check_stored_run(config)


ROLLOUT_ONLY = DebugMode(_check_rollouts, rollout_only)
TRAIN_ONLY = DebugMode(_check_training, train_only)

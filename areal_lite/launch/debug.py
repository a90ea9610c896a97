"""Half of a training run at a time, `areal-lite train debug=…`, to find out which half is at fault.

rollout_only                      servers and controller: trainer.steps x trainer.batch_groups groups of the model go to the store
train_only debug_run=RUN_DIR      the trainer alone, on the batches of a stored run: the same ones each time (controller/stored_run.py)
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from areal_lite.config import TrainConfig, save_config
from areal_lite.controller.client import ControllerClient
from areal_lite.launch.placement import Placement
from areal_lite.launch.roles import Roles
from areal_lite.launch.server_pool import train_pool
from areal_lite.report.progress import Progress
from areal_lite.run_dir.store import STORE_FILE, Store
from areal_lite.system.files import write_json

_LOOK_EVERY_S = 0.5


def rollout_only(config: TrainConfig, run_dir: Path, placement: Placement) -> None:
    """Nothing is trained, so the version stays 0, and admission must have room for all. Raises RoleFailed."""
    groups = config.trainer.steps * config.trainer.batch_groups
    config.buffer.max_staleness = config.trainer.steps - 1
    save_config(config, run_dir)
    with (
        train_pool(config, run_dir, dict(enumerate(placement.servers))) as pool,
        Roles(run_dir) as roles,
    ):
        controller = roles.start(
            "controller", [sys.executable, "-m", "areal_lite.controller.service", str(run_dir)]
        )
        pool.wait_ready(roles.check)
        client = ControllerClient(run_dir, config.sync.timeout_s)
        store, progress = Store(run_dir / STORE_FILE, read_only=True), Progress(groups, "group")
        while (done := store.counts()["finished"]) < groups:
            roles.check()
            pool.check()
            progress.update(done)
            time.sleep(_LOOK_EVERY_S)
        progress.update(done)
        progress.close()
        store.close()
        write_json(run_dir / "controller_totals.json", client.finish())
        client.close()
        roles.wait([controller])


def train_only(config: TrainConfig, run_dir: Path, placement: Placement) -> None:
    """Raises RoleFailed."""
    save_config(config, run_dir)
    with Roles(run_dir) as roles:
        recorded = roles.start(
            "controller", [sys.executable, "-m", "areal_lite.controller.stored_run", str(run_dir)]
        )
        ranks = roles.start_ranks(
            "trainer", "areal_lite.trainer.loop", run_dir, config.trainer, placement.trainer
        )
        roles.wait([*ranks, recorded])

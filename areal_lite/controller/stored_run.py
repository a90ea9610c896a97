"""A stored run in the controller's place, `python -m areal_lite.controller.stored_run RUN_DIR`: the same batches again, and no servers.

For `debug=train_only`. The batch of step k is what step k of the run in `debug_run` was trained on, dealt and masked by the same code, so
that with equal settings the trainer gets equal bytes. Of a run that trained on nothing (`debug=rollout_only`) it is the next
`trainer.batch_groups` groups in the order of finishing, unmasked. Pushes reach nobody.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from areal_lite.config import TrainConfig, load_config
from areal_lite.controller.batch_stats import batch_stats
from areal_lite.controller.message_server import MessageServer, run_until
from areal_lite.controller.messages import (
    Answer,
    BatchReady,
    BeginPush,
    Finish,
    PullBatch,
    Pushed,
    PushRecorded,
    PushTargets,
    Request,
    RunTotals,
)
from areal_lite.controller.queue import BatchAssignment, GroupQueue
from areal_lite.run_dir.paths import CONFIG_FILE, STORE_FILE
from areal_lite.run_dir.store import Store
from areal_lite.system.processes import die_with_parent

log = logging.getLogger(__name__)


def bound_of(run_dir: Path) -> int:
    """`buffer.max_staleness` of a stored run. Raises ValueError if its batches cannot be made again."""
    path = run_dir / CONFIG_FILE
    if not path.is_file() or not (run_dir / STORE_FILE).is_file():
        raise ValueError(
            f"debug_run={run_dir}: give the directory of a run, with its config.yaml and {STORE_FILE}"
        )
    config = OmegaConf.load(path)
    if OmegaConf.select(config, "buffer.replay.capacity"):
        raise ValueError(
            f"debug_run={run_dir}: its batches were drawn from a replay buffer, and draws are not stored"
        )
    return OmegaConf.select(config, "buffer.max_staleness")


class StoredRunController:
    """Answers a trainer as the controller would."""

    def __init__(self, config: TrainConfig):
        self._config, self._run = config, Path(config.debug_run)
        self._store = Store(self._run / STORE_FILE, read_only=True)
        self._trained = self._store.counts()["used"] > 0
        self._max_staleness: int | None = bound_of(self._run) if self._trained else None
        self._finished = (group for group, _ in self._store.finished_groups())
        self._step, self._deal = -1, None

    async def handle(self, request: Request) -> Answer:
        """Raises ValueError for a batch that the run does not have."""
        match request:
            case PullBatch(step, rank, world):
                deal = self._dealt(step, world)
                return BatchReady(self._info(deal, step)), deal.shards[rank].to_frames()
            case BeginPush():
                return PushTargets([]), ()
            case Pushed():
                return PushRecorded(), ()
            case Finish():
                return RunTotals(
                    {
                        "groups": self._store.counts(),
                        "trajectories_lost": self._store.missing_trajectories(),
                        "drained": 0,
                    }
                ), ()
        raise ValueError(f"{request} needs servers, and a stored run has none")

    def _dealt(self, step: int, world: int) -> BatchAssignment:
        if step != self._step:
            count = self._config.trainer.batch_groups
            groups = (
                self._store.used_groups(step)
                if self._trained
                else list(itertools.islice(self._finished, count))
            )
            if len(groups) != count:
                raise ValueError(
                    f"debug_run={self._run} has {len(groups)} groups for step {step}, not trainer.batch_groups={count}"
                )
            queue = GroupQueue(self._max_staleness, "mask")
            for group in groups:
                queue.put(group)
            self._step, self._deal = step, queue.take(len(groups), step, world)
        return self._deal

    def _info(self, deal: BatchAssignment, step: int) -> dict[str, Any]:
        return batch_stats(deal.groups, step, self._max_staleness) | {
            "masked_tokens": deal.masked_tokens
        }


async def serve(run_dir: Path) -> None:
    """Until the trainer has finished, SIGTERM or an error, which is raised."""
    wire = MessageServer(run_dir, StoredRunController(load_config(run_dir)).handle)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, wire.finished.set)
    try:
        await run_until(wire.finished, wire.serve())
    finally:
        await wire.close()


def main() -> int:
    die_with_parent()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        asyncio.run(serve(Path(sys.argv[1])))
    except ValueError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

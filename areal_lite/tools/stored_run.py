"""Train without servers on the batches of a stored run: `debug=train_only:RUN_DIR`.

`python -m areal_lite.tools.stored_run RUN_DIR` is the process in the place of the controller.

* The batch of step k is the one that step k of the stored run trained on. The same code shards
  and masks it, so the trainer gets equal bytes if the settings are equal.
* The draws of a replay buffer are in the store, too.
* Pushes have no targets.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from areal_lite.config import TrainConfig, load_config, save_config, stored_settings, value_of
from areal_lite.controller import protocol
from areal_lite.controller.batches import batch_stats, source_stats
from areal_lite.controller.buffer import BatchAssignment, GroupQueue, drawn_batch
from areal_lite.launch.roles import Placement, Roles
from areal_lite.run_dir.paths import CONFIG_FILE, STORE_FILE
from areal_lite.run_dir.reader import RunReader
from areal_lite.run_dir.resume import lock_controller
from areal_lite.run_dir.store_format import NOT_KEPT, TOKENS, WITH_ROUTES
from areal_lite.system.processes import die_with_parent, run_role
from areal_lite.trajectory import Group, Trajectory


class StoredBatches(RunReader):
    """The store of a run, with the batches of its steps."""

    def used_groups(self, step: int) -> list[Group]:
        """Return the groups that `step` used. Raises ValueError if their tokens are not kept."""
        return self._groups("state = 'used' AND step = ?", step)

    def drawn(self, step: int) -> list[list[list[Trajectory]]]:
        """Return the episodes of each group that `step` drew from the replay buffer, in order.

        Raises ValueError if their tokens are not kept.
        """
        drawn: dict[int, dict[int, list[Trajectory]]] = {}
        for row in self._rows(
            f"SELECT {WITH_ROUTES}, draw, position, prompt_id, state, kept_bytes "
            f"FROM draws JOIN trajectories USING (group_id, sample_index) {TOKENS} "
            "JOIN groups USING (group_id) WHERE draws.step = ? "
            "ORDER BY draw, position, trace_index",
            (step,),
        ):
            self._check_kept(row)
            trajectory = self._trajectory(row, row["prompt_id"])
            drawn.setdefault(row["draw"], {}).setdefault(row["position"], []).append(trajectory)
        return [list(episodes.values()) for episodes in drawn.values()]

    def last_step_without_tokens(self, steps: int) -> int | None:
        """Return the last of the first `steps` steps whose tokens are not all kept, or None."""
        ((last,),) = self._query(
            "SELECT max(step) FROM (SELECT step, kept_bytes FROM groups WHERE state = 'used' "
            "UNION ALL SELECT draws.step, kept_bytes FROM draws JOIN groups USING (group_id)) "
            "WHERE kept_bytes = 0 AND step < ?",
            (steps,),
        )
        return last


def stored_max_staleness(run_dir: Path) -> int | None:
    """Read the bound on staleness of a stored run; None if replay drew its batches.

    Raises ValueError if `run_dir` is not a run.
    """
    if not all(os.path.isfile(run_dir / file) for file in (CONFIG_FILE, STORE_FILE)):
        raise ValueError(
            f"debug=train_only:{run_dir}: give the directory of a run, with its {CONFIG_FILE} "
            f"and {STORE_FILE}"
        )
    config = stored_settings(run_dir)
    replays = value_of(config, "buffer.replay.capacity")
    return None if replays else value_of(config, "buffer.max_staleness")


def stored_run(config: TrainConfig) -> Path:
    """Return the folder in `debug=train_only:RUN_DIR`. Raises ValueError if there is none."""
    if not (run_dir := config.debug.partition(":")[2]):
        raise ValueError("debug=train_only needs a stored run: write debug=train_only:RUN_DIR")
    return Path(run_dir)


def check(config: TrainConfig) -> None:
    """Check that the stored run is one and still has the tokens that the steps need.

    Raises ValueError if not.
    """
    if config.eval.problems or config.buffer.replay.capacity:
        raise ValueError(
            "debug=train_only has no servers: set eval.problems=0 and buffer.replay.capacity=0"
        )
    run_dir = stored_run(config)
    stored_max_staleness(run_dir)
    store = StoredBatches(run_dir / STORE_FILE)
    last = store.last_step_without_tokens(config.trainer.steps)
    store.close()
    if last is not None:
        raise ValueError(
            f"debug=train_only:{run_dir}: {NOT_KEPT} for steps up to {last + 1}, which the "
            f"trainer.steps={config.trainer.steps} need: give a run with a larger store.max_gib"
        )


def run(
    config: TrainConfig, run_dir: Path, placement: Placement, report_steps: Callable[[], None]
) -> None:
    """Train on the batches of a stored run. Raises RoleFailed when a role fails.

    `report_steps` is called several times a second.
    """
    from areal_lite.tools.report.run_watch import CONSOLE  # of this process alone

    save_config(config, run_dir)
    with Roles(run_dir) as roles:
        controller = roles.start_module("controller", __name__)
        ranks = roles.start_ranks("areal_lite.trainer.loop", config.trainer, placement.trainer)
        with CONSOLE.watch(config, run_dir) as show:

            def watch() -> None:
                show()
                report_steps()

            roles.wait([*ranks, controller], watch=watch)


class StoredRunController:
    """Has the methods of the controller that a trainer calls, besides evaluations."""

    def __init__(self, config: TrainConfig):
        self._config = config
        self._run_dir = stored_run(config)
        self._store = StoredBatches(self._run_dir / STORE_FILE)
        self._max_staleness = stored_max_staleness(self._run_dir)
        self._source_names = list(value_of(stored_settings(self._run_dir), "data.sources") or {})
        # The batch that was assigned last, and its step.
        self._step = -1
        self._assignment: BatchAssignment | None = None

    async def pull(
        self, step: int, rank: int, world: int, resyncs: int
    ) -> tuple[dict[str, Any], Sequence[bytes | memoryview]]:
        """Return as the controller does. Raises ValueError for a batch that the run lacks."""
        assignment = self._assign(step, world)
        info = {
            **batch_stats(assignment.groups, step, self._max_staleness),
            **source_stats(assignment.groups, self._source_names),
            "masked_tokens": assignment.masked_tokens,
        }
        return info, assignment.shards[rank].to_frames()

    async def begin_push(self, version: int) -> protocol.PushTargets:
        return protocol.PushTargets([])

    async def begin(self, *_: object) -> None:
        """Record nothing: the stored run has its steps."""

    step_done = pushed = begin

    async def finish(self) -> dict[str, Any]:
        """Return the totals of the stored run."""
        lost = self._store.missing_trajectories()
        return {"groups": self._store.counts(), "trajectories_lost": lost, "drained": 0}

    def _assign(self, step: int, world: int) -> BatchAssignment:
        if self._assignment is None or step != self._step:
            drawn = self._store.drawn(step)
            batch = drawn_batch(drawn, step, world) if drawn else self._taken(step, world)
            batch.join_routes()
            self._step, self._assignment = step, batch
        return self._assignment

    def _taken(self, step: int, world: int) -> BatchAssignment:
        """Take the groups of a step from a queue, as its run did. Raises ValueError."""
        count, groups = self._config.trainer.batch_groups, self._store.used_groups(step)
        if len(groups) != count:
            raise ValueError(
                f"debug=train_only:{self._run_dir} has {len(groups)} groups for step {step}, "
                f"not trainer.batch_groups={count}"
            )
        queue = GroupQueue(self._max_staleness)
        for group in groups:
            queue.put(group)
        assignment = queue.take(count, step, world)
        assert assignment is not None
        return assignment


async def serve(run_dir: Path) -> None:
    """Answer the trainer until `finish` or SIGTERM. Raises the error of any part."""
    server = protocol.MessageServer(run_dir, StoredRunController(load_config(run_dir)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.finished.set)
    try:
        await protocol.run_until(server.finished, server.serve())
    finally:
        await server.close()


def main() -> int:
    """Serve the stored run and return the exit status."""
    die_with_parent()

    def work(run_dir: Path) -> None:
        with lock_controller(run_dir):
            asyncio.run(serve(run_dir))

    return run_role(work, ValueError)


if __name__ == "__main__":
    sys.exit(main())

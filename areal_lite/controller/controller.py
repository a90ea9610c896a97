"""The controller: prompts -> trajectories -> batches, which the trainer pulls.

    prompts -> Dispatcher (dispatcher.py) -> GroupQueue or ReplayBuffer -> BatchAssignment -> ranks
                    ^ admission                                                 |
                    +------------------ version (begin_push, pushed) <----------+

* Generation continues while the trainer works. Only admission (`admission.py`) makes it wait.
* The controller's version v is the trainer's: the number of completed training steps.
* A batch is assigned once. Every rank can pull its shard of it any number of times.
* A group becomes used when the push that follows its step is recorded.
* An error in any part ends the process, and every open request gets its message.

`controller/service.py` runs it, `controller/messages.py` defines the requests.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_lite.config import TrainConfig
from areal_lite.controller.dependencies import Dependencies
from areal_lite.controller.dispatcher import Dispatcher
from areal_lite.controller.evaluation import EvalRecord, evaluate
from areal_lite.controller.loop_lag import LoopLag
from areal_lite.controller.messages import (
    Answer,
    BatchReady,
    BeginPush,
    Evaluate,
    Evaluation,
    Finish,
    PullBatch,
    Pushed,
    PushRecorded,
    PushTargets,
    Request,
    Resync,
    RunTotals,
)
from areal_lite.controller.queue import BatchAssignment, GroupQueue
from areal_lite.controller.replay import ReplayBuffer
from areal_lite.controller.run_stats import batch_info, run_totals, status_line
from areal_lite.run_dir.paths import CHECKPOINTS_DIR, HF_DIR
from areal_lite.run_dir.store import Store
from areal_lite.servers.client import Client
from areal_lite.servers.fleet import Fleet
from areal_lite.servers.registry import ServerInfo
from areal_lite.trajectory import Group, InterruptMode

log = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0
_EVALUATION_CHECK_S = 0.5


@dataclass(frozen=True, slots=True)
class _AssignedBatch:
    """The batch of one step, and its facts for the metrics."""

    assignment: BatchAssignment
    info: dict[str, Any]


class Controller:
    """Answers the trainer's requests, and runs the dispatcher and the fleet."""

    def __init__(
        self,
        config: TrainConfig,
        dependencies: Dependencies,
        client: Client,
        announced: Callable[[], list[ServerInfo]],
        mark_unhealthy: Callable[[ServerInfo, str], None] = lambda server, reason: None,
    ):
        """`announced` and `mark_unhealthy` are as in Fleet."""
        assert dependencies.store is not None
        self.config = config
        self._dependencies = dependencies
        self._store = dependencies.store
        self._clock = dependencies.clock
        self.version = 0
        # Set, and replaced by a new one, when a batch may have become ready.
        self._changed = asyncio.Event()
        self.fleet = Fleet(
            client, announced, self._notify, mark_unhealthy, config.server.health_interval_s
        )
        self.queue = _make_queue(config)
        self.dispatcher = Dispatcher(config, dependencies, self.fleet, self._deliver)
        # Requests that were waited for, over all pushes in mode `none`.
        self.drained = 0
        self._lag = LoopLag()
        # By step. A task ends when the batch is assigned.
        self._assignments: dict[int, asyncio.Task[_AssignedBatch]] = {}
        self._pushing = False
        # How many resyncs were requested, the event of the next one, and whether one is pending.
        self._resyncs = 0
        self._resync_requested = asyncio.Event()
        self._resyncing = False
        self._generation: asyncio.Task[None] | None = None

    def recover(self, store: Store, version: int) -> None:
        """Resume at `version` with the content of `store`, which may be empty. Call before `run`.

        Nothing else may use the store yet. Raises ValueError if the run began with another data
        set. See run_dir/resume.py.
        """
        self.dispatcher.recover(store, version)
        self.version = self.fleet.router.version = version
        if isinstance(self.queue, ReplayBuffer):
            for group, used in store.finished_groups():
                self.queue.put(group, used)
        else:
            for group in store.waiting_groups():
                self.queue.put(group)

    async def run(self) -> None:
        """Run all parts until cancelled. Raises the error of any part."""
        async with asyncio.TaskGroup() as tasks:
            self._generation = tasks.create_task(self.dispatcher.run())
            tasks.create_task(self.fleet.watch())
            tasks.create_task(self._lag.watch())
            if self.config.rollout.adapt_concurrency:
                tasks.create_task(self.dispatcher.adapt())
            tasks.create_task(self._log_status())

    async def handle(self, request: Request) -> Answer:
        """Answer one request of a trainer rank. Raises ValueError or RuntimeError to refuse it."""
        match request:
            case PullBatch():
                return await self._pull_batch(request)
            case BeginPush(version):
                return await self._begin_push(version), ()
            case Pushed(version, failed):
                return await self._record_push(version, failed), ()
            case Evaluate(version):
                return Evaluation(dict(await self._evaluate(version))), ()
            case Finish():
                return RunTotals(await self._finish()), ()

    def _deliver(self, group: Group) -> None:
        """Queue a finished group, which may complete a batch."""
        self.queue.put(group)
        self._notify()

    def _notify(self) -> None:
        """Wake everything that waits for a batch.

        The event is replaced: clearing a shared event would lose wake-ups.
        """
        self._changed.set()
        self._changed = asyncio.Event()

    async def _pull_batch(self, request: PullBatch) -> Answer:
        """Wait for the batch of a step, or for a resync request that this rank has not had yet.

        All ranks see the same order of batches and resyncs.
        """
        self._check_pull(request)
        step, rank, world = request.step, request.rank, request.world
        if step not in self._assignments:
            self._assignments[step] = asyncio.create_task(self._assign(step, world))
        task = self._assignments[step]
        if await self._resync_comes_first(request.resyncs, task):
            return Resync(), ()
        try:
            # Shielded: all ranks share the task, so a rank that goes away must not cancel it.
            batch = await asyncio.shield(task)
        except (ValueError, RuntimeError):
            # The next request tries again.
            self._assignments.pop(step, None)
            raise
        shards = batch.assignment.shards
        if len(shards) != world:
            raise ValueError(
                f"{request}, but that batch was assigned to {len(shards)} ranks already"
            )
        return BatchReady(batch.info), shards[rank].to_frames()

    def _check_pull(self, request: PullBatch) -> None:
        if request.step < self.version:
            raise ValueError(
                f"{request} was asked for, but version {self.version} was pushed already"
            )
        if not 0 <= request.rank < request.world:
            raise ValueError(f"{request}: the rank must be at least 0 and less than the world size")

    async def _resync_comes_first(self, resyncs: int, task: asyncio.Task[Any]) -> bool:
        """Wait until `task` is done or a resync is requested; tell whether the rank must resync.

        `resyncs` is the number of resyncs that the rank has had.
        """
        while resyncs >= self._resyncs and not task.done():
            requested = asyncio.ensure_future(self._resync_requested.wait())
            await asyncio.wait({task, requested}, return_when=asyncio.FIRST_COMPLETED)
            requested.cancel()
        return resyncs < self._resyncs

    async def _assign(self, step: int, world: int) -> _AssignedBatch:
        """Wait until the batch of `step` is complete, and assign it to `world` ranks.

        It waits for groups, and for version `step`: a rank may ask for the next batch before rank 0
        has reported the push. A delivered group, a server and a recorded push unblock it.
        """
        started = self._clock()
        while step >= self.version:
            changed = self._changed
            if step == self.version:
                if assignment := await self._take_batch(step, world):
                    return _AssignedBatch(assignment, self._info(assignment, step, started))
                self._request_resync()
            await changed.wait()
        raise ValueError(
            f"version {self.version} was pushed before the batch of step {step} was complete"
        )

    async def _take_batch(self, step: int, world: int) -> BatchAssignment | None:
        """Drop overdue groups, then take a batch; None while there are too few groups.

        With a fixed lag a batch is only taken when nothing more can be generated before the step.
        """
        for group in self.queue.drop_overdue(self.version):
            await self.dispatcher.drop(group, f"overdue at step {step}")
        if self.config.buffer.fixed_lag and not self.dispatcher.admission.drained:
            return None
        return self.queue.take(self.config.trainer.batch_groups, self.version, world)

    def _request_resync(self) -> None:
        """Let the trainer, which is waiting anyway, push its version to the stale servers."""
        if self.fleet.router.stale and not self._resyncing:
            self._resyncing = True
            self._resyncs += 1
            self._resync_requested.set()
            self._resync_requested = asyncio.Event()

    async def _begin_push(self, version: int) -> PushTargets:
        """Start a push.

        A new version goes to every server. The current version goes to stale servers only, and the
        others keep generating. In mode `none` this waits until no request is in flight.
        """
        is_new = version > self.version
        mode = self.config.rollout.interrupt
        drained = 0
        if is_new and mode in (InterruptMode.NONE, InterruptMode.ABORT):
            self.fleet.pause_dispatch()
        if is_new and mode == InterruptMode.NONE:
            drained = await self.fleet.gate.drain()
            self.drained += drained
        router = self.fleet.router
        servers = list(router.servers.values()) if is_new else router.stale
        self.fleet.begin_push(version, servers)
        self._pushing = True
        return PushTargets(servers, drained)

    async def _record_push(self, version: int, failed: list[str]) -> PushRecorded:
        """End a push: open admission for `version`, and mark the batches before it as used."""
        if not self._pushing or version < self.version:
            raise ValueError(
                f"version {version} was pushed without permission: call begin_push first "
                f"(now at version {self.version})"
            )
        self.version = version
        self.fleet.finish_push(version, failed)
        self._pushing = False
        self._resyncing = False
        self.dispatcher.on_version(version)
        self._notify()
        done = [s for s, task in self._assignments.items() if s < version and task.done()]
        for step in done:
            assignment = self._assignments.pop(step).result().assignment
            await self._store.submit(Store.use, assignment.group_ids, step)
        return PushRecorded()

    async def _evaluate(self, version: int) -> EvalRecord:
        """Evaluate on the servers, while training continues.

        Raises RuntimeError if it cannot end: after the last step no push brings the weights to a
        server that comes back.
        """
        evaluation = asyncio.ensure_future(
            evaluate(self.config, self._dependencies, self.fleet, self.dispatcher.workflow, version)
        )
        try:
            while not evaluation.done():
                await asyncio.wait([evaluation], timeout=_EVALUATION_CHECK_S)
                after_last_step = self.version == self.config.trainer.steps
                if after_last_step and self.fleet.no_ready_server and not evaluation.done():
                    raise RuntimeError(self._lost_evaluation(version))
            return evaluation.result()
        finally:
            evaluation.cancel()

    def _lost_evaluation(self, version: int) -> str:
        failure = self.fleet.gate.last_failure
        model = Path(self.config.run_dir) / CHECKPOINTS_DIR / HF_DIR
        return (
            f"the evaluation at version {version} is lost: no server is left that has the last "
            f"weights{f' ({failure})' if failure else ''}, and after the last step they are pushed "
            "to no other. Training is complete and its weights are saved: to evaluate them, "
            f"areal-lite eval model={model}"
        )

    async def _finish(self) -> dict[str, Any]:
        """Stop generation and return the totals of the run."""
        if self._generation is not None:
            self._generation.cancel()
        await self.fleet.abort_all()
        by_state = await self._store.submit(Store.counts)
        missing = await self._store.submit(Store.missing_trajectories)
        lost = self.dispatcher.counts["groups"] - sum(by_state.values()) + missing
        return {
            "groups": by_state,
            "trajectories_lost": lost,
            "drained": self.drained,
            **run_totals(self.dispatcher, self.queue, self.fleet),
        }

    def _info(self, assignment: BatchAssignment, step: int, started: float) -> dict[str, Any]:
        """Describe the batch and the run, for the metrics."""
        return {
            **batch_info(assignment, step, self.dispatcher, self.queue),
            "wait_s": self._clock() - started,
            "loop_lag_p99_s": self._lag.take_p99(),
        }

    async def _log_status(self) -> None:
        """Log one line every 10 s."""
        while True:
            await asyncio.sleep(_LOG_INTERVAL_S)
            pending = [step for step, task in self._assignments.items() if not task.done()]
            log.info("%s", status_line(self.dispatcher, self.queue, self.fleet, pending))


def _make_queue(config: TrainConfig) -> GroupQueue | ReplayBuffer:
    if config.buffer.replay.capacity:
        return ReplayBuffer(config.buffer.replay, config.rollout.group_size, config.seed)
    return GroupQueue(config.buffer.max_staleness, config.buffer.overdue)

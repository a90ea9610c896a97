"""The controller: prompts -> trajectories -> batches, which the trainer pulls.

    prompts -> Dispatcher (dispatcher.py) -> GroupQueue or ReplayBuffer -> Batches -> ranks
                    ^ admission                                                         |
                    +------------ step_done, or begin_push and pushed <-----------------+

* Generation continues while the trainer works. Only admission (buffer.py) makes it wait.
* The router's version is that of the last push: the number of completed steps of its weights.
* A group becomes used when the end of its step is recorded, with a push or without one.
* An error in any part ends the process, and every open request gets its message.

`controller/service.py` runs it, `controller/protocol.py` defines the requests.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from areal_lite.config import TrainConfig
from areal_lite.controller.batches import Batches, begin_handover, read_handover, record_handover
from areal_lite.controller.buffer import ReplayBuffer
from areal_lite.controller.dispatcher import Dispatcher
from areal_lite.controller.evaluation import Evaluator
from areal_lite.controller.metrics import (
    REQUEST_COUNTS,
    controller_status,
    run_totals,
    unrecorded_counts,
)
from areal_lite.controller.protocol import (
    Answer,
    AwaitEvaluation,
    BeginPush,
    Evaluate,
    Evaluation,
    Finish,
    PullBatch,
    Pushed,
    PushTargets,
    Recorded,
    Request,
    RunTotals,
    StepDone,
)
from areal_lite.controller.sources import Dependencies
from areal_lite.run_dir.controller_status import ControllerStatus, TrainerPhase
from areal_lite.run_dir.resume import needed_since
from areal_lite.run_dir.store import Store, StoreThread
from areal_lite.servers.client import Client
from areal_lite.servers.fleet import Fleet
from areal_lite.servers.registry import ServerInfo
from areal_lite.trajectory import Group, InterruptMode

log = logging.getLogger(__name__)

_GIB = 2**30


class Retention:
    """Removes tokens after each step, in a task of its own.

    Args:
        config: the run's configuration.
        store: the store.
        dispatcher: knows the groups that are not delivered yet.
        batches: knows the groups of the replay buffer, and gets the size of the store.
    """

    def __init__(
        self, config: TrainConfig, store: StoreThread, dispatcher: Dispatcher, batches: Batches
    ):
        self._max_gib = config.store.max_gib
        self._run_dir = Path(config.run_dir)
        self._store = store
        self._dispatcher = dispatcher
        self._batches = batches
        self._due = asyncio.Event()
        self._due.set()
        self._last_step: list[int] = []
        self._warned = False

    def on_step(self, group_ids: Sequence[int]) -> None:
        """Record that a step used these groups, and that the store may have grown."""
        self._last_step = list(group_ids)
        self._due.set()

    async def run(self) -> None:
        """Measure and trim the store after each step. Runs until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            size = await self._store.submit(Store.size, self._last_step)
            if self._max_gib is not None and size.get("store_mib", 0) > 1024 * self._max_gib:
                size = await self._trim(self._max_gib)
            self._batches.store_size = size

    async def _trim(self, max_gib: float) -> dict[str, float]:
        """Remove tokens until the store fits, if it can, and return its new size."""
        since = await asyncio.to_thread(needed_since, self._run_dir)
        max_bytes = int(max_gib * _GIB)
        while await self._store.submit(Store.trim, max_bytes, since, self._held()):
            pass
        size = await self._store.submit(Store.size, self._last_step)
        if size["store_mib"] > 1024 * max_gib and not self._warned:
            self._warned = True
            log.warning(
                "the store takes %.1f GiB, more than store.max_gib=%g: a resume needs the rest, "
                "which are the steps since step %d and the groups that wait; save checkpoints more "
                "often (trainer.save_every), or raise store.max_gib",
                size["store_mib"] / 1024,
                max_gib,
                since,
            )
        return size

    def _held(self) -> list[int] | None:
        """Return the groups that a replay buffer holds or is about to get; None without one."""
        queue = self._batches.queue
        if not isinstance(queue, ReplayBuffer):
            return None
        return list(queue.group_ids | self._dispatcher.running)


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
        """Build all parts. `announced` and `mark_unhealthy` are as in Fleet."""
        assert dependencies.store is not None
        self.config = config
        self._store = dependencies.store
        self.fleet = Fleet(
            client,
            announced,
            self._notify,
            mark_unhealthy,
            config.sync.health_interval_s,
            config.seed,
        )
        self.dispatcher = Dispatcher(config, dependencies, self.fleet, self._deliver, self._notify)
        self.batches = Batches(config, self.dispatcher, self.fleet, self._store, dependencies.clock)
        self.evaluator = Evaluator(
            config, dependencies, self.fleet, self.dispatcher.workflows, self.batches, self._store
        )
        self.retention = Retention(config, self._store, self.dispatcher, self.batches)
        # Requests that were waited for, over all pushes in mode `none`.
        self.drained = 0
        self._pushing = False
        self._generation: asyncio.Task[None] | None = None
        self._saved_totals: dict[str, int] = {}
        self._resumes = False
        # Whether this controller has taken the place of one that was killed under the trainer.
        self._trainer_runs = False

    def recover(self, store: Store, step: int, trainer_runs: bool = False) -> None:
        """Resume after `step` steps with the content of `store`, which may be empty.

        Call it before `run`. If the trainer runs, `step` is that of its newest checkpoint, and the
        store says how many steps it has completed since. Nothing else may use the store yet. Raises
        ValueError if the run began with another data set. See run_dir/resume.py.
        """
        self._trainer_runs = trainer_runs
        if trainer_runs:
            step, handover = max(step, store.completed_steps()), read_handover(store)
        else:
            handover = begin_handover(store, step)
        self._pushing = bool(handover.pushing)
        self.dispatcher.recover(store, step, handover.version, trainer_runs)
        self.fleet.router.version = handover.version
        self.batches.recover(store, step, handover)
        self.evaluator.recover(handover)
        totals = store.totals()
        self.drained = totals.get("drained", 0)
        self.fleet.counts.update({name: totals.get(name, 0) for name in REQUEST_COUNTS})
        self._saved_totals = totals
        self._resumes = sum(store.counts().values()) > 0

    async def run(self) -> None:
        """Run all parts until cancelled. Raises the error of any part."""
        if self._resumes:
            await self.fleet.take_over(self._trainer_runs, self._pushing)
        async with asyncio.TaskGroup() as tasks:
            self._generation = tasks.create_task(self.dispatcher.run())
            tasks.create_task(self.fleet.watch())
            tasks.create_task(self.batches.lag.watch())
            tasks.create_task(self.retention.run())

    async def handle(self, request: Request) -> Answer:
        """Answer one request of a trainer rank. Raises ValueError or RuntimeError to refuse it."""
        match request:
            case PullBatch():
                return await self.batches.pull(request)
            case StepDone(step):
                return await self._record_step(step), ()
            case BeginPush(version):
                return await self._begin_push(version), ()
            case Pushed(version, failed):
                return await self._record_push(version, failed), ()
            case Evaluate(version):
                return Evaluation(dict(await self.evaluator.evaluate(version))), ()
            case AwaitEvaluation(_, resyncs):
                return await self.evaluator.await_last(resyncs), ()
            case Finish():
                return RunTotals(await self._finish()), ()

    def _deliver(self, group: Group) -> None:
        self.batches.put(group)

    def _notify(self) -> None:
        self.batches.notify()

    async def _begin_push(self, version: int) -> PushTargets:
        """Start a push.

        A new version goes to every server. The version of the last push goes to stale servers only,
        and the others keep generating. In mode `none` this waits until no request is in flight.
        """
        router = self.fleet.router
        is_new = version > router.version
        mode = self.config.rollout.interrupt
        drained = 0
        if is_new and mode in (InterruptMode.NONE, InterruptMode.ABORT):
            self.fleet.gate.close()
        if is_new and mode == InterruptMode.NONE:
            drained = await self.fleet.gate.drain()
            self.drained += drained
        servers = list(router.servers.values()) if is_new else router.stale
        await record_handover(self._store, pushing=1)
        self.fleet.begin_push(version, servers)
        self._pushing = True
        return PushTargets(servers, drained)

    async def _record_push(self, version: int, failed: list[str]) -> Recorded:
        """End a push and open admission for `version`.

        If it began under an earlier controller, the servers stay stale until the next resync. If
        that one has recorded the end, and was killed before its reply, nothing is left to do.
        """
        if not self._pushing and version == self.fleet.router.version == self.batches.step:
            return Recorded()
        if not self._pushing or version < self.batches.step:
            raise ValueError(
                f"version {version} was pushed without permission: call begin_push first "
                f"({self.batches.step} steps are complete)"
            )
        self.fleet.finish_push(version, failed)
        self._pushing = False
        self.dispatcher.on_version(version)
        self.batches.on_push()
        await self._complete(version)
        await record_handover(self._store, pushing=0, version=version)
        return Recorded()

    async def _record_step(self, step: int) -> Recorded:
        """Record that `step` steps are complete, while the servers keep their version.

        The rank reports a step again if a controller was killed before its reply.
        """
        if step < self.batches.step:
            raise ValueError(
                f"step {step} is reported, but {self.batches.step} steps are complete already"
            )
        self.dispatcher.on_step(step)
        await self._complete(step)
        return Recorded()

    async def _complete(self, step: int) -> None:
        """Let the batch of `step` be assigned, and mark the batches before it as used."""
        for used in self.batches.on_step(step):
            await asyncio.gather(
                self.save_totals(),
                # A checkpoint of this step must not outlive what the store says of it.
                self._store.submit(Store.use, used.group_ids, used.step, used.draws, durable=True),
            )
            self.retention.on_step(used.group_ids)

    async def save_totals(self) -> None:
        """Commit the counts that the store cannot make from its rows, if they have changed."""
        totals = {"drained": self.drained, **unrecorded_counts(self.dispatcher, self.fleet)}
        if totals.items() - self._saved_totals.items():
            self._saved_totals = totals
            await self._store.submit(Store.set_totals, totals)

    async def _finish(self) -> dict[str, Any]:
        """Stop generation and return the totals of the run."""
        if self._generation is not None:
            self._generation.cancel()
        await self.fleet.abort_all()
        await self.save_totals()
        by_state = await self._store.submit(Store.counts)
        missing = await self._store.submit(Store.missing_trajectories)
        lost = self.dispatcher.counts["groups"] - sum(by_state.values()) + missing
        return {
            "groups": by_state,
            "trajectories_lost": lost,
            "drained": self.drained,
            **run_totals(self.dispatcher, self.batches.queue, self.fleet),
        }

    def status(self) -> ControllerStatus:
        """Describe the controller's work and its present wait."""
        batches = self.batches
        phase = TrainerPhase.TRAINING if batches.was_asked else TrainerPhase.LOADING
        if self._pushing:
            phase = TrainerPhase.PUSHING
        elif batches.pending:
            phase = TrainerPhase.WAITING
        return controller_status(
            self.dispatcher,
            batches.queue,
            self.fleet,
            phase,
            batches.pending,
            self.evaluator.running,
        )

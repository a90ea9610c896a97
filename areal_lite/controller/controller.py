"""The controller process, `python -m areal_lite.controller.service RUN_DIR`: prompts -> trajectories -> batches, for the trainer to pull.

It reads `<run_dir>/config.yaml`, finds the servers by what they announce under the run directory, and answers the requests of
areal_lite/controller/messages.py. Generation goes on whatever the trainer does; only admission (areal_lite/controller/admission.py) makes it wait.
An error in any part ends the process with a message, and everyone who waits for it gets that message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_lite.config import TrainConfig
from areal_lite.controller.batch_stats import batch_stats
from areal_lite.controller.dependencies import Dependencies
from areal_lite.controller.dispatcher import Dispatcher
from areal_lite.controller.diversity import diversity
from areal_lite.controller.evaluation import evaluate
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
from areal_lite.run_dir.paths import CHECKPOINTS_DIR, HF_DIR
from areal_lite.run_dir.store import Store
from areal_lite.servers.client import Client
from areal_lite.servers.fleet import Fleet
from areal_lite.servers.registry import ServerInfo
from areal_lite.trajectory import Group

log = logging.getLogger(__name__)


_COUNTS = (
    "dropped_groups",
    "empty_groups",
    "failed_rollouts",
    "workflow_failures",
    "reward_failures",
)  # of the dispatcher, in metrics and totals


_REPORT_EVERY_S = 10.0


_LOOK_EVERY_S = 0.5


@dataclass(slots=True)
class _Dealt:
    """The batch of one step, ready to be pulled as often as anyone likes."""

    deal: BatchAssignment
    info: dict[str, Any]


class Controller:
    """Version v of the controller is the trainer's: the number of completed steps. `announced()` lists the servers that are up."""

    def __init__(
        self,
        config: TrainConfig,
        parts: Dependencies,
        client: Client,
        announced: Callable[[], list[ServerInfo]],
        mark_unhealthy: Callable[[ServerInfo, str], None] = lambda server, reason: None,
    ):
        self.config, self.parts, self._client = config, parts, client
        self.version = 0
        self._changed = asyncio.Event()
        self.fleet = Fleet(
            client, announced, self._notify, mark_unhealthy, config.server.health_interval_s
        )
        self.queue = _queue(config)
        self.dispatcher = Dispatcher(config, parts, self.fleet, self._deliver)
        self.drained = 0
        self._lag = LoopLag()
        self._deals: dict[int, asyncio.Task[_Dealt]] = {}
        self._pushing = False
        self._resyncs = 0  # how often the trainer was asked to push its version again, to servers that are behind
        self._resync = asyncio.Event()  # the next time
        self._resyncing = False
        self._generation: asyncio.Task[None] | None = None

    def recover(self, store: Store, version: int) -> None:
        """Before `run`: go on at `version` with what is in `store`, which nobody else uses yet (areal_lite/run_dir/resume.py). An empty one is a start.

        Raises ValueError when the run began with another data set.
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
        """Runs until cancelled; raises what went wrong in any of its parts."""
        async with asyncio.TaskGroup() as tasks:
            self._generation = tasks.create_task(self.dispatcher.run())
            tasks.create_task(self.fleet.watch())
            tasks.create_task(self._lag.watch())
            if self.config.rollout.adapt_concurrency:
                tasks.create_task(self.dispatcher.adapt(self._client))
            tasks.create_task(self._report())

    def _deliver(self, group: Group) -> None:
        self.queue.put(group)
        self._notify()

    def _notify(self) -> None:
        """Wake all who wait for a batch. A new event for the next time: clearing one that is shared would lose wake-ups."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def handle(self, request: Request) -> Answer:
        """The answer to one request of a trainer rank. Raises ValueError or RuntimeError for it to hear."""
        match request:
            case PullBatch():
                return await self._batch(request)
            case BeginPush():
                return await self._begin_push(request.version), ()
            case Pushed():
                await self._pushed(request)
                return PushRecorded(), ()
            case Evaluate(version):
                return Evaluation(await self._evaluate(version)), ()
            case Finish():
                return RunTotals(await self._finish()), ()

    async def _batch(self, request: PullBatch) -> Answer:
        step, rank, world = request.step, request.rank, request.world
        if step < self.version:
            raise ValueError(
                f"{request} was asked for, but version {self.version} was pushed already"
            )
        if not 0 <= rank < world:
            raise ValueError(f"{request}: there is no such rank")
        if step not in self._deals:
            self._deals[step] = asyncio.create_task(self._deal(step, world))
        task = self._deals[step]
        while request.resyncs >= self._resyncs and not task.done():
            asked = asyncio.ensure_future(self._resync.wait())
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
        if request.resyncs < self._resyncs:
            return Resync(), ()
        try:
            dealt = await asyncio.shield(
                task
            )  # the deal belongs to all ranks: one that goes away must not cancel it
        except (ValueError, RuntimeError):
            self._deals.pop(step, None)  # whoever asks next may have more luck
            raise
        if len(dealt.deal.shards) != world:
            raise ValueError(
                f"{request}, but that batch was dealt to {len(dealt.deal.shards)} ranks already"
            )
        return BatchReady(dealt.info), dealt.deal.shards[rank].to_frames()

    async def _deal(self, step: int, world: int) -> _Dealt:
        """Wait until the batch of `step` is complete, and deal it."""
        started = self.parts.clock()
        while step >= self.version:
            changed = self._changed
            if (
                step == self.version
            ):  # a rank may ask for the next batch before rank 0 has said that the push is over
                for group in self.queue.drop_overdue(self.version):
                    await self.dispatcher.drop(group, f"overdue at step {step}")
                ripe = not self.config.buffer.fixed_lag or self.dispatcher.admission.drained
                if ripe and (
                    deal := self.queue.take(self.config.trainer.batch_groups, self.version, world)
                ):
                    return _Dealt(deal, self._info(deal, step, started))
                self._request_resync()
            await changed.wait()
        raise ValueError(
            f"version {self.version} was pushed before the batch of step {step} was complete"
        )

    def _request_resync(self) -> None:
        """The trainer has nothing to do but to wait: let it push its version to the servers that came after its last push."""
        if self.fleet.router.stale and not self._resyncing:
            self._resyncing = True
            self._resyncs += 1
            self._resync.set()
            self._resync = asyncio.Event()

    def _info(self, deal: BatchAssignment, step: int, started: float) -> dict[str, Any]:
        """For the metrics: about the batch, and (cumulative) about the run."""
        counts = self.dispatcher.counts
        return {
            **batch_stats(deal.groups, step, self.dispatcher.admission.max_staleness),
            **diversity(group.trajectories for group in deal.groups),
            **(_replay_stats(self.queue) if isinstance(self.queue, ReplayBuffer) else {}),
            "masked_tokens": deal.masked_tokens,
            "wait_s": self.parts.clock() - started,
            "queue_depth": len(self.queue),
            "in_flight": self.dispatcher.in_flight,
            "concurrency_limit": self.dispatcher.concurrency.limit,
            "loop_lag_p99_s": self._lag.take_p99(),
            **{name: counts[name] for name in _COUNTS},
            "filtered_groups": self.dispatcher.filtered.total(),
            **{f"filtered_{reason}": groups for reason, groups in self.dispatcher.filtered.items()},
            "retired_prompts": self.dispatcher.retired,
        }

    async def _begin_push(self, version: int) -> PushTargets:
        """Of a new version to all servers, or of the present one to those that are behind while the others go on."""
        router, interrupt, drained = self.fleet.router, self.config.rollout.interrupt, 0
        if version > self.version and interrupt in ("none", "abort"):
            self.fleet.pause_dispatch()
        if version > self.version and interrupt == "none":
            drained = await self.fleet.drain()
            self.drained += drained
        servers = list(router.servers.values()) if version > self.version else router.stale
        self.fleet.begin_push(servers)
        self._pushing = True
        return PushTargets(servers, drained)

    async def _pushed(self, request: Pushed) -> None:
        version = request.version
        if not self._pushing or version < self.version:
            raise ValueError(
                f"version {version} was pushed without leave: ask begin_push first (now at version {self.version})"
            )
        self.version = version
        self.fleet.finish_push(version, request.failed)
        self._pushing = self._resyncing = False
        self.dispatcher.on_version(version)
        self._notify()
        for step in [step for step, task in self._deals.items() if step < version and task.done()]:
            await self.parts.store.submit(
                Store.use, self._deals.pop(step).result().deal.group_ids, step
            )

    async def _evaluate(self, version: int) -> dict[str, Any]:
        """Raises RuntimeError when it cannot come to an end: after the last step nobody brings the weights to a server that comes back."""
        evaluating = asyncio.ensure_future(
            evaluate(self.config, self.parts, self.fleet, self.dispatcher.workflow, version)
        )
        try:
            while not evaluating.done():
                await asyncio.wait([evaluating], timeout=_LOOK_EVERY_S)
                if (
                    self.version == self.config.trainer.steps
                    and self.fleet.no_ready_server
                    and not evaluating.done()
                ):
                    raise RuntimeError(
                        f"the evaluation at version {version} is lost: no server is left that has the last weights"
                        f"{f' ({self.fleet.last_failure})' if self.fleet.last_failure else ''}, and after the last step they are pushed to no other. "
                        "Training is complete and its weights are saved: to evaluate them, "
                        f"areal-lite eval model={Path(self.config.run_dir) / CHECKPOINTS_DIR / HF_DIR}"
                    )
            return evaluating.result()
        finally:
            evaluating.cancel()

    async def _finish(self) -> dict[str, Any]:
        if self._generation is not None:
            self._generation.cancel()
        await self.fleet.abort_all()
        by_state = await self.parts.store.submit(Store.counts)
        missing = await self.parts.store.submit(Store.missing_trajectories)
        counts = self.dispatcher.counts
        return {
            "groups": by_state,
            "trajectories_lost": counts["groups"] - sum(by_state.values()) + missing,
            "requests": self.fleet.counts["requests"],
            "aborts": self.fleet.counts["aborts"],
            "retries": self.fleet.counts["retries"],
            "drained": self.drained,
            "dropped_by_length": {
                str(length): n for length, n in sorted(self.queue.dropped_by_length.items())
            },
            **{name: counts[name] for name in _COUNTS},
            "filtered": dict(self.dispatcher.filtered),
            "retired_prompts": self.dispatcher.retired,
        }

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            log.info("%s", self.state())

    def state(self) -> str:
        """One line: what there is, and what is being waited for."""
        waiting = [step for step, task in self._deals.items() if not task.done()]
        missing = self.config.trainer.batch_groups - len(self.queue)
        router, admission = self.fleet.router, self.dispatcher.admission
        if not router.ready:
            need = f"a server ({len(router.servers)} announced, none ready)"
        elif waiting and missing > 0:
            need = f"{missing} more groups for the batch of step {waiting[0]}"
        elif admission.can_admit():
            need = "trajectories in flight"
        else:
            need = f"the trainer (step {self.version})"
        return (
            f"version {self.version}: {len(self.queue)} groups queued, {admission.running} running, room for {admission.capacity}; "
            f"{self.fleet.in_flight} requests on {len(router.ready)} servers; waiting for {need}"
        )


def _queue(config: TrainConfig) -> GroupQueue | ReplayBuffer:
    if config.buffer.replay.capacity:
        return ReplayBuffer(config.buffer.replay, config.rollout.group_size, config.seed)
    return GroupQueue(config.buffer.max_staleness, config.buffer.overdue)


def _replay_stats(buffer: ReplayBuffer) -> dict[str, float]:
    """What the buffer has to offer beside what was drawn."""
    kept = diversity(buffer)
    return {
        "replay_prompts": len(buffer),
        "replay_trajectories": buffer.num_trajectories,
        "replay_distinct_correct": kept["distinct_correct"],
    }

"""The controller: prompts -> trajectories -> batches, which the trainer pulls.

    prompts -> Dispatcher (dispatcher.py) -> GroupQueue (buffer.py) -> Batches (batches.py) -> ranks
                    ^ admission                                                          |
                    +------------ step_done, or begin_push and pushed <------------------+

* Generation continues while the trainer works. Only admission (buffer.py) makes it wait.
* The router's version is that of the last push: the number of completed steps of its weights.
* A group becomes used when the end of its step is recorded, with a push or without one.
* An error in any part ends the process, and every open request gets its message.

`python -m areal_lite.controller.service RUN_DIR` reads `<run_dir>/config.yaml`, finds the servers
by their announcements in the run directory, and answers the trainer (protocol.py) until `finish`,
an error or SIGTERM, which is then its exit status.
"""

import asyncio
import gc
import itertools
import logging
import math
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from areal_lite.config import TrainConfig, load_config
from areal_lite.controller import protocol
from areal_lite.controller.batches import EVALUATED, PUSHING, RESYNCS, VERSION, Batches
from areal_lite.controller.buffer import ReplayBuffer
from areal_lite.controller.dispatcher import COUNTS, FAILURE_COUNTS, Dispatcher
from areal_lite.controller.evaluation import Evaluator
from areal_lite.controller.sources import Dependencies, Quarantine, longest_wait, open_sources
from areal_lite.data.prompts import load_eval_sets
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.run_dir.controller_status import ControllerStatus, TrainerPhase, write_status
from areal_lite.run_dir.paths import CONTROLLER_STATUS_FILE, STORE_FILE, TOTALS_FILE, TRAINER_FILE
from areal_lite.run_dir.resume import lock_controller, needed_since, start_version
from areal_lite.run_dir.store import Store, StoreThread
from areal_lite.servers.client import SGLangClient
from areal_lite.servers.fleet import Fleet
from areal_lite.servers.registry import ServerInfo, announced_servers, mark_unhealthy
from areal_lite.system import heartbeat
from areal_lite.system.files import write_json
from areal_lite.system.network import LOOPBACK, NODE, allow_many_connections, listen_address
from areal_lite.system.processes import die_with_parent, run_role, steady_time
from areal_lite.trajectory import InterruptMode

log = logging.getLogger(__name__)
_MIB_PER_GIB = 1024
_STATUS_INTERVAL_S = 1.0
_LOG_EVERY = 10  # statuses
# Of the fleet; `drained` counts requests that pushes in mode `none` have waited for.
_REQUEST_COUNTS = ("drained", "requests", "aborts", "retries")


@dataclass(slots=True)
class Retention:
    """Removes tokens from the store in a task of its own, when it is `due`: after each step."""

    config: TrainConfig
    store: StoreThread
    dispatcher: Dispatcher
    batches: Batches
    due: asyncio.Event = field(default_factory=asyncio.Event)
    _warned: bool = False

    async def run(self) -> None:
        """Measure and trim the store after each step. Runs until cancelled."""
        max_gib = self.config.store.max_gib
        while True:
            self.due.clear()
            mib = await self.store.submit(Store.mib)
            if max_gib and mib > _MIB_PER_GIB * max_gib:
                mib = await self._trim(max_gib)
            self.batches.store_mib = mib
            await self.due.wait()

    async def _trim(self, max_gib: float) -> float:
        """Remove tokens until the store fits, if it can, and return its new size in MiB."""
        since = await asyncio.to_thread(needed_since, Path(self.config.run_dir))
        while await self.store.submit(Store.trim, int(max_gib * 2**30), since, self._held()):
            pass
        mib = await self.store.submit(Store.mib)
        if mib > _MIB_PER_GIB * max_gib and not self._warned:
            self._warned = True
            log.warning(
                "the store takes %.1f GiB, more than store.max_gib=%g: a resume needs the rest, "
                "which are the steps since step %d and the groups that wait; save checkpoints more "
                "often (trainer.save_every), or raise store.max_gib",
                mib / _MIB_PER_GIB,
                max_gib,
                since,
            )
        return mib

    def _held(self) -> list[int] | None:
        """Return the groups that a replay buffer holds or is about to get; None without one."""
        if not isinstance(queue := self.batches.queue, ReplayBuffer):
            return None
        return list(queue.group_ids | self.dispatcher.running)


class Controller:
    """Runs dispatcher and fleet. The trainer calls it; ValueError or RuntimeError refuse a call."""

    def __init__(
        self,
        config: TrainConfig,
        dependencies: Dependencies,
        client: SGLangClient,
        announced: Callable[[], list[ServerInfo]],
        mark_unhealthy: Callable[[ServerInfo, str], None] = lambda server, reason: None,
    ):
        """Build all parts. `announced` and `mark_unhealthy` are as in Fleet."""
        assert dependencies.store is not None
        self.config = config
        self._store = dependencies.store
        self._dependencies = dependencies
        every_s = config.sync.health_interval_s
        self.fleet = Fleet(
            client, announced, lambda: self.batches.notify(), mark_unhealthy, every_s, config.seed
        )
        self.dispatcher = Dispatcher(
            config,
            dependencies,
            self.fleet,
            deliver=lambda group: self.batches.put(group),
            on_rejected=lambda: self.batches.notify(),
        )
        self.batches = Batches(config, self.dispatcher, self.fleet, self._store, dependencies.clock)
        self.evaluator = Evaluator(config, dependencies, self.fleet, self.batches, self._store)
        self.pull = self.batches.pull
        self.evaluate, self.await_evaluation = self.evaluator.evaluate, self.evaluator.await_last
        self.retention = Retention(config, self._store, self.dispatcher, self.batches)
        self._pushing = False
        self._generation: asyncio.Task[None] | None = None
        self._saved_totals: dict[str, int] = {}
        self._resumes = False
        # Whether a trainer has begun, perhaps under a controller that this one replaces.
        self._trainer_runs = False
        self.trainer_replaced = False

    def recover(self, store: Store, step: int, trainer_runs: bool = False) -> None:
        """Resume after `step` steps with the content of `store`, which may be empty.

        Call it before `run`, while nothing else uses the store. If the trainer runs, `step` is that
        of its newest checkpoint, and the store says how many steps it has completed since. Raises
        ValueError if the run began with another data set. See run_dir/resume.py.
        """
        self._trainer_runs = trainer_runs
        if trainer_runs:
            step = max(step, store.completed_steps())
        else:  # nothing has been requested of the trainer
            store.set_totals({RESYNCS: 0, VERSION: step, PUSHING: 0, EVALUATED: 0})
        totals = store.totals()
        version = self.fleet.router.version = totals.get(VERSION, 0)
        self._pushing = bool(totals.get(PUSHING))
        self.dispatcher.recover(store, step, version, trainer_runs)
        self.batches.recover(store, step, totals.get(RESYNCS, 0))
        if totals.get(EVALUATED):
            self.evaluator.last_ended.set()
        self.fleet.counts.update({name: totals.get(name, 0) for name in _REQUEST_COUNTS})
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

    async def begin(self, step: int) -> None:
        """Answer the trainer that begins at `step` from now on, and no other."""
        trainer = Path(self.config.run_dir) / TRAINER_FILE
        if self._trainer_runs:
            log.warning("a trainer began again at step %d: the controller starts anew", step)
            trainer.unlink(missing_ok=True)
            self.trainer_replaced = True
            raise protocol.TrainerReplaced
        if step != self.batches.step:
            raise ValueError(
                f"the trainer begins at step {step} and the controller at step "
                f"{self.batches.step}: start the trainer again"
            )
        write_json(trainer, {"step": step})
        self._trainer_runs = True

    async def begin_push(self, version: int) -> protocol.PushTargets:
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
            self.fleet.counts["drained"] += drained
        servers = list(router.servers.values()) if is_new else router.stale
        await self._store.submit(Store.set_totals, {PUSHING: 1})
        self.fleet.begin_push(version, servers)
        self._pushing = True
        return protocol.PushTargets(servers, drained)

    async def pushed(self, version: int, failed: list[str]) -> None:
        """End a push and open admission for `version`.

        If an earlier controller has recorded the end, and was killed before its reply, nothing is
        left to do. If the push began under it, the servers stay stale until the next resync.
        """
        if not self._pushing and version == self.fleet.router.version == self.batches.step:
            return
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
        await self._store.submit(Store.set_totals, {PUSHING: 0, VERSION: version})

    async def step_done(self, step: int) -> None:
        """Record that `step` steps are complete, perhaps again after a takeover."""
        if step < self.batches.step:
            raise ValueError(
                f"step {step} is reported, but {self.batches.step} steps are complete already"
            )
        self.dispatcher.on_step(step)
        await self._complete(step)

    async def _complete(self, step: int) -> None:
        """Let the batch of `step` be assigned, and mark the batches before it as used."""
        for used_by, group_ids, draws in self.batches.on_step(step):
            await asyncio.gather(
                self.save_totals(),
                # A checkpoint of this step must not outlive what the store says of it.
                self._store.submit(Store.use, group_ids, used_by, draws, durable=True),
            )
            self.retention.due.set()

    async def save_totals(self) -> None:
        """Commit the counts that the store cannot make from its rows, if they have changed."""
        totals = {
            **{name: self.fleet.counts[name] for name in _REQUEST_COUNTS},
            **{name: self.dispatcher.counts[name] for name in FAILURE_COUNTS},
        }
        if totals.items() - self._saved_totals.items():
            self._saved_totals = totals
            await self._store.submit(Store.set_totals, totals)

    async def finish(self) -> dict[str, Any]:
        """End all requests, and return the run's totals."""
        if self._generation is not None:
            self._generation.cancel()
        await self.fleet.abort_all()
        await self.save_totals()
        by_state = await self._store.submit(Store.counts)
        missing = await self._store.submit(Store.missing_trajectories)
        counts = self.dispatcher.counts
        return {
            "groups": by_state,
            "trajectories_lost": counts["stored"] - sum(by_state.values()) + missing,
            **{name: self.fleet.counts[name] for name in _REQUEST_COUNTS},
            **{name: counts[name] for name in COUNTS},
            "filtered": dict(self.dispatcher.filtered),
            "retired_prompts": self.dispatcher.facts()["retired_prompts"],
            "quarantined": sorted(self.dispatcher.quarantine.held),
        }

    def status(self) -> ControllerStatus:
        """Describe the controller's work and its present wait."""
        batches, dispatcher = self.batches, self.dispatcher
        admission, router, pending = dispatcher.admission, self.fleet.router, batches.pending
        phase = TrainerPhase.TRAINING if batches.was_asked else TrainerPhase.LOADING
        if self._pushing:
            phase = TrainerPhase.PUSHING
        elif pending:
            phase = TrainerPhase.WAITING
        oldest = min(dispatcher.running, default=None)
        held_back = bool(pending) and batches.queue.held_back(admission.batch_groups, oldest)
        return ControllerStatus(
            version=admission.version,
            step=admission.step,
            trainer=phase,
            batch_step=pending[0] if pending else None,
            missing_groups=max(0, admission.batch_groups - len(batches.queue)),
            held_by=oldest if held_back else None,
            queued_groups=len(batches.queue),
            running_groups=admission.running,
            capacity=None if math.isinf(admission.capacity) else int(admission.capacity),
            in_flight=dispatcher.in_flight,
            concurrency_limit=dispatcher.max_concurrent,
            requests=self.fleet.gate.in_flight,
            servers_ready=len(router.ready),
            servers_announced=len(router.servers),
            evaluating=sorted(self.evaluator.running),
            evaluated="{scored} of {asked}".format_map(self.evaluator.progress),
            longest_wait=longest_wait(self._dependencies.playing),
        )


def status_line(status: ControllerStatus) -> str:
    """Write a status as a line of the log."""
    if not status.servers_ready:
        need = f"a server ({status.servers_announced} announced, none ready)"
    elif status.batch_step is not None and status.missing_groups:
        need = f"{status.missing_groups} more groups for the batch of step {status.batch_step}"
    elif status.held_by is not None:
        need = f"group {status.held_by}, which no more groups may pass"
    elif status.can_admit:
        need = "trajectories in flight"
    else:
        need = f"the trainer (step {status.step})"
    if status.evaluating:
        need += f"; evaluation: {status.evaluated} answers"
    if status.longest_wait:
        need += f"; longest: {status.longest_wait}"
    capacity = "any number" if status.capacity is None else status.capacity
    return (
        f"version {status.version}: {status.queued_groups} groups queued, "
        f"{status.running_groups} running, capacity for {capacity}; {status.requests} requests on "
        f"{status.servers_ready} servers; waiting for {need}"
    )


async def serve(run_dir: Path) -> bool:
    """Run the controller until `finish`, or until another trainer begins: then return True.

    SIGTERM cancels it. Raises the error of any part.
    """
    config = load_config(run_dir)
    trainer_runs = takes_over(config, run_dir)
    async with open_sources(config, run_dir) as sources:
        store = Store(run_dir / STORE_FILE)
        store_thread = StoreThread(store)
        client = SGLangClient(config.sync.health_timeout_s)
        dependencies = Dependencies(
            sources=sources,
            tokenizer=Tokenizer(config.model, config.data.chat_template_kwargs),
            store=store_thread,
            clock=steady_time,
            quarantine=Quarantine(run_dir),
            eval_sets=load_eval_sets(
                config.eval.sets, config.data, config.model, config.reward.function
            ),
        )
        announced, replace = partial(announced_servers, run_dir), partial(mark_unhealthy, run_dir)
        controller = Controller(config, dependencies, client, announced, replace)
        host = listen_address(NODE) if config.server.host == NODE else LOOPBACK[0]
        server = protocol.MessageServer(run_dir, controller, host, trainer_runs)
        if task := asyncio.current_task():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        last_words = ""  # after SIGTERM a successor answers what is open
        try:
            controller.recover(store, start_version(run_dir), trainer_runs)
            parts = controller.run(), server.serve(), _publish_status(controller, run_dir)
            await protocol.run_until(server.finished, *parts, _await_totals(run_dir, server))
            last_words = "" if controller.trainer_replaced else "the controller has stopped"
            return controller.trainer_replaced
        except BaseExceptionGroup as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            last_words = f"the controller failed: {error}"
            raise error from group
        finally:
            await server.close(last_words)
            await client.close()
            await store_thread.close()
            (run_dir / CONTROLLER_STATUS_FILE).unlink(missing_ok=True)


def takes_over(config: TrainConfig, run_dir: Path) -> bool:
    """Return whether this controller replaces a killed controller under a running trainer."""
    # The batches of a replay buffer are not recorded before the end of their step.
    return (run_dir / TRAINER_FILE).exists() and not config.buffer.replay.capacity


async def _publish_status(controller: Controller, run_dir: Path) -> None:
    """Publish the controller's status: to its file every second, to the log every ten."""
    heartbeat.limit(controller.config.restart.hang_timeout_s)
    heartbeat.enter("answering the trainer")
    for number in itertools.count(1):
        await asyncio.sleep(_STATUS_INTERVAL_S)
        heartbeat.beat()
        status = controller.status()
        with suppress(OSError):  # a full disk must not end a run because of this file
            await asyncio.to_thread(write_status, run_dir, status)
        await controller.save_totals()
        if number % _LOG_EVERY == 0:
            log.info("%s", status_line(status))


async def _await_totals(run_dir: Path, server: protocol.MessageServer) -> None:
    """End `server` when the trainer has the totals, which a killed controller may have given."""
    while not (run_dir / TOTALS_FILE).exists():
        await asyncio.sleep(_STATUS_INTERVAL_S)
    server.finished.set()


def main() -> int:
    """Run the service and return the exit status."""
    die_with_parent()
    heartbeat.start("loading the prompts and the store")
    allow_many_connections()
    # Ten thousand requests in flight are a million live objects, and a scan of the garbage
    # collector stops the event loop for all of them. None of them is in a cycle: the collector
    # is here for the tracebacks of errors, which may be.
    gc.set_threshold(5_000_000, 5, 5)

    def work(run_dir: Path) -> None:
        with lock_controller(run_dir), suppress(asyncio.CancelledError):
            while uvloop.run(serve(run_dir)):
                pass
            return
        # It stopped in good order, but before the trainer's `finish`: status 0 would be a success.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)

    return run_role(work, ValueError, RuntimeError)


if __name__ == "__main__":
    sys.exit(main())

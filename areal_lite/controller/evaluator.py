"""The evaluations that the trainer asks for, and the servers that they run on.

With `eval.servers`, an evaluation gets that many servers to itself, which keep their version until
it has ended. Without, and where no other server would be left, it shares all servers with rollouts,
and a push in its middle changes the weights. After the last step nothing changes them: that
evaluation always has all servers.

After the last step no push follows. The trainer then waits for the evaluation and pushes its
weights again whenever servers come back (`Resync`). Without any server, the evaluation fails.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from areal_lite.config import TrainConfig
from areal_lite.controller.batches import Batches
from areal_lite.controller.dependencies import Dependencies
from areal_lite.controller.evaluation import EvalRecord, evaluate
from areal_lite.controller.handover import Handover, record_handover
from areal_lite.controller.messages import EvaluationEnded, Resync
from areal_lite.rollout.episode import Workflow
from areal_lite.run_dir.paths import CHECKPOINTS_DIR, HF_DIR
from areal_lite.run_dir.store_thread import StoreThread
from areal_lite.servers.fleet import Fleet
from areal_lite.system import back_off

log = logging.getLogger(__name__)
_CHECK_INTERVAL_S = 0.5


class _ServersLost(Exception):
    """An evaluation has lost all servers that it had to itself."""


async def _check_kept(fleet: Fleet) -> None:
    if not fleet.router.servers:
        raise _ServersLost


class Evaluator:
    """Runs evaluations while training continues. `running` has the versions that they are of.

    Args:
        config: the run's configuration.
        dependencies: as for `evaluate`.
        fleet: the servers.
        workflows: those that training uses, by data source.
        batches: counts the completed steps, and asks the trainer for resyncs.
        store: records the end of the last evaluation.
    """

    def __init__(
        self,
        config: TrainConfig,
        dependencies: Dependencies,
        fleet: Fleet,
        workflows: Mapping[str, Workflow],
        batches: Batches,
        store: StoreThread,
    ):
        self._config = config
        self._dependencies = dependencies
        self._fleet = fleet
        self._workflows = workflows
        self._batches = batches
        self._store = store
        self.running: set[int] = set()
        # Set when the evaluation after the last step has ended. No resync is requested after it.
        self._last_ended = asyncio.Event()
        # When an evaluation after the last step began to wait for a server, in seconds.
        self._no_server_since: float | None = None

    def recover(self, handover: Handover) -> None:
        """Resume: an earlier controller may have seen the end of the last evaluation."""
        if handover.evaluated:
            self._last_ended.set()

    async def evaluate(self, version: int) -> EvalRecord:
        """Evaluate on the servers and return a line of evals.jsonl.

        Raises RuntimeError if no server is left after the last step and none comes back in time.
        """
        steps = self._config.trainer.steps
        self.running.add(version)
        try:
            kept = await self._evaluate_on_kept_servers(version)
            return kept or await self._run(
                self._fleet, version, lambda: self._check_all_servers(version)
            )
        finally:
            self.running.discard(version)
            if version == steps:
                await record_handover(self._store, evaluated=1)
                self._last_ended.set()

    async def _evaluate_on_kept_servers(self, version: int) -> EvalRecord | None:
        """Evaluate on servers that keep their version. None if there are none or all of them fail.

        Until the next evaluation is due, it waits for servers that start, that come back, or that
        the evaluation before has. Their version is then newer than `version`.
        """
        count, steps = self._config.eval.servers, self._config.trainer.steps
        if not count or version == steps:
            return None
        due = min(version + max(self._config.eval.every, 1), steps)
        while len(self._fleet.router.ready) <= count and self._batches.step < due:
            await asyncio.sleep(_CHECK_INTERVAL_S)
        async with self._fleet.lend(count) as kept:
            if kept is None:
                log.warning("the evaluation of version %d has no server of its own", version)
                return None
            try:
                record = await self._run(kept, version, lambda: _check_kept(kept))
                record["servers"] = count
                return record
            except _ServersLost:
                log.warning("the evaluation of version %d lost its servers: once more", version)
        return None

    async def _run(
        self, fleet: Fleet, version: int, check: Callable[[], Awaitable[None]]
    ) -> EvalRecord:
        """Evaluate on `fleet`. `check` is called meanwhile. What it raises ends the evaluation."""
        evaluation = asyncio.ensure_future(
            evaluate(self._config, self._dependencies, fleet, self._workflows, version)
        )
        try:
            while not evaluation.done():
                await asyncio.wait([evaluation], timeout=_CHECK_INTERVAL_S)
                if not evaluation.done():
                    await check()
            return evaluation.result()
        finally:
            evaluation.cancel()

    async def _check_all_servers(self, version: int) -> None:
        """After the last step, ask for the weights of servers that return, and wait for them."""
        steps = self._config.trainer.steps
        if self._batches.step < steps:
            return
        self._check_servers_return(version)
        if version == steps:
            await self._batches.request_resync()

    async def await_last(self, resyncs: int) -> Resync | EvaluationEnded:
        """Wait for the end of the last evaluation, or for a resync that the rank has not had."""
        ended = asyncio.ensure_future(self._last_ended.wait())
        try:
            must_resync = await self._batches.resync_comes_first(resyncs, ended)
        finally:
            ended.cancel()
        return Resync() if must_resync else EvaluationEnded()

    def _check_servers_return(self, version: int) -> None:
        """Raise RuntimeError if there was no server for as long as one takes to come back."""
        now = asyncio.get_running_loop().time()
        if not self._fleet.no_ready_server or self._fleet.router.stale:
            self._no_server_since = None
            return
        self._no_server_since = self._no_server_since or now
        server = self._config.server
        none_returns = self._fleet.gate.last_failure and not server.max_restarts
        patience_s = 0.0 if none_returns else server.start_timeout_s + back_off.LONGEST_S
        if now - self._no_server_since >= patience_s:
            raise RuntimeError(self._lost(version))

    def _lost(self, version: int) -> str:
        failure = self._fleet.gate.last_failure
        model = Path(self._config.run_dir) / CHECKPOINTS_DIR / HF_DIR
        return (
            f"the evaluation at version {version} is lost: no server is left that has the last "
            f"weights{f' ({failure})' if failure else ''}, and none came back. Training is "
            "complete and its weights are saved: to evaluate them, "
            f"areal-lite eval model={model}"
        )

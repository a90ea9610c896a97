"""The evaluations that the trainer asks for, and the servers that return during the last one.

After the last step no push follows. The trainer then waits for the evaluation and pushes its
weights again whenever servers come back (`Resync`). Without any server, the evaluation fails.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from areal_lite.config import TrainConfig
from areal_lite.controller.batches import Batches
from areal_lite.controller.dependencies import Dependencies
from areal_lite.controller.evaluation import EvalRecord, evaluate
from areal_lite.controller.messages import EvaluationEnded, Resync
from areal_lite.rollout.episode import Workflow
from areal_lite.run_dir.paths import CHECKPOINTS_DIR, HF_DIR
from areal_lite.servers.fleet import Fleet
from areal_lite.system import back_off

_CHECK_INTERVAL_S = 0.5


class Evaluator:
    """Runs evaluations while training continues. `running` has the versions that they are of.

    Args:
        config: the run's configuration.
        dependencies: as for `evaluate`.
        fleet: the servers.
        workflows: those that training uses, by data source.
        batches: counts the completed steps, and asks the trainer for resyncs.
    """

    def __init__(
        self,
        config: TrainConfig,
        dependencies: Dependencies,
        fleet: Fleet,
        workflows: Mapping[str, Workflow],
        batches: Batches,
    ):
        self._config = config
        self._dependencies = dependencies
        self._fleet = fleet
        self._workflows = workflows
        self._batches = batches
        self.running: set[int] = set()
        # Set when the evaluation after the last step has ended. No resync is requested after it.
        self._last_ended = asyncio.Event()
        # When an evaluation after the last step began to wait for a server, in seconds.
        self._no_server_since: float | None = None

    async def evaluate(self, version: int) -> EvalRecord:
        """Evaluate on the servers and return a line of evals.jsonl.

        Raises RuntimeError if no server is left after the last step and none comes back in time.
        """
        steps = self._config.trainer.steps
        self.running.add(version)
        evaluation = asyncio.ensure_future(
            evaluate(self._config, self._dependencies, self._fleet, self._workflows, version)
        )
        try:
            while not evaluation.done():
                await asyncio.wait([evaluation], timeout=_CHECK_INTERVAL_S)
                if evaluation.done() or self._batches.step < steps:
                    continue
                self._check_servers_return(version)
                if version == steps:
                    self._batches.request_resync()
            return evaluation.result()
        finally:
            self.running.discard(version)
            evaluation.cancel()
            if version == steps:
                self._last_ended.set()

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

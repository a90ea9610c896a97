"""Reports of a run: metrics, evaluations, and how well servers and trainer agree on log-probs."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from areal_lite.config import TrainConfig
from areal_lite.controller.protocol import ControllerClient
from areal_lite.run_dir.metrics import MetricsLog, append_event, forget_after, read_events
from areal_lite.run_dir.paths import TOTALS_FILE
from areal_lite.run_dir.resume import clear_stop_request
from areal_lite.servers.registry import ServerInfo
from areal_lite.system.clock import steady_time
from areal_lite.system.files import write_json
from areal_lite.system.processes import start_daemon
from areal_lite.train_batch import TrainBatch
from areal_lite.trainer.cadence import Cadence
from areal_lite.trajectory import trace_name
from areal_lite.weights.agreement import LogprobAgreement
from areal_lite.weights.push import PushReport

log = logging.getLogger(__name__)

# Tokens of a step whose proximal log-probs are recorded, at most.
_RECORDED_TOKENS = 8192


def patience_s(config: TrainConfig) -> float:
    """Return how long to wait for the controller, whose answer may need a server to start first."""
    return config.server.start_timeout_s + config.trainer.batch_timeout_s


def proximal_record(step: int, batch: TrainBatch, prox: np.ndarray) -> dict[str, Any]:
    """Return the proximal log-probs of the first group of `batch`, for a look at its weights.

    `prox` are nats of the sampled tokens, by `trace_name`; the longest trajectories may be missing.

    step: the step that trains on `batch`, from 0; prox: float32 [T], log-probs before the step.
    """
    first = np.flatnonzero(batch.group_ids == batch.group_ids[0])
    first = first[np.argsort(batch.lengths[first], kind="stable")]
    fitting = first[np.cumsum(batch.lengths[first]) <= _RECORDED_TOKENS]
    logprobs = {}
    for sequence in fitting:
        tokens = batch.token_indices(np.array([sequence]))
        sampled = tokens[batch.versions[tokens] >= 0]
        indices = batch.sample_indices[sequence], batch.trace_indices[sequence]
        logprobs[trace_name(*map(int, indices))] = np.round(prox[sampled].astype(float), 5)
    return {"step": step, "group_id": int(batch.group_ids[0]), "prox": logprobs}


class Reporter:
    """Reports what rank 0 knows.

    start: the step from which the run continues. `evaluates_last` says whether the weights after
    the last step are being evaluated.
    """

    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        controller: ControllerClient,
        start: int,
        cadence: Cadence,
    ):
        self._cadence = cadence
        self._config = config
        self._run_dir = run_dir
        self._controller = controller
        forget_after(run_dir, start)
        public = replace(config, server=replace(config.server, api_key=None))
        self._metrics = MetricsLog(run_dir, config.logger, asdict(public))
        self._agreement = LogprobAgreement(run_dir, config)
        self._compared: dict[str, float | None] = {}
        self._last_log = steady_time()
        self._evaluations: list[Future] = []
        self.evaluates_last = False
        if self._evaluation_is_due(start):
            self._evaluate(start)

    def begin_step(self, batch: TrainBatch, servers: list[ServerInfo] | None) -> None:
        """Let `servers` with the weights before the step score a part of `batch`; None: all."""
        self._agreement.begin(batch, servers)

    def before_push(self, step: int, batch: TrainBatch, prox: Tensor) -> None:
        """Compare log-probs with the servers, which still have the weights before the step.

        prox: float32 [T], the trainer's log-probs of `batch` under those weights.
        """
        if step == 0 or self._config.server.deterministic:
            # Version 0 alone must answer the evaluation before training. In a run that can be
            # repeated, one version alone must answer each evaluation.
            self._collect()
        append_event(self._run_dir, "proximal", proximal_record(step, batch, prox.numpy()))
        self._compared = self._agreement.compare(batch, prox, step)

    def end_step(self, done: int, metrics: dict[str, Any], push: PushReport | None) -> None:
        """Log the metrics of a step and its push, and start an evaluation if one is due.

        done: completed steps.
        """
        now = steady_time()
        time_s = now - self._last_log
        self._last_log = now
        record = {"step": done, "time_s": time_s, **metrics, **self._compared}
        record |= asdict(push) if push else {"pause_s": None}
        self._metrics.log(record)
        self._collect(only_done=True)
        shown = (record[key] for key in ("reward_mean", "wait_s", "train_s"))
        log.info("step %d: reward %.3f, waited %.1f s, trained %.1f s", done, *shown)
        if self._cadence.evaluates(done):
            self._evaluate(done)

    def end_training(self) -> None:
        """Start the evaluation of the final weights, and withdraw a request to stop."""
        self._evaluate(self._config.trainer.steps)
        clear_stop_request(self._run_dir)

    def finish(self) -> None:
        """Wait for evaluations, end the controller and write its totals."""
        self._collect()
        write_json(self._run_dir / TOTALS_FILE, self._controller.finish())
        self._metrics.close()

    def _evaluation_is_due(self, start: int) -> bool:
        """Return whether a run that resumes at `start` lost an evaluation that was running.

        Its weights may be gone. The weights of `start` are evaluated instead.
        """
        newest = max((e["version"] for e in read_events(self._run_dir, "evals")), default=-1)
        is_last = start == self._config.trainer.steps
        return newest < (start if is_last else self._cadence.last_evaluated(start))

    def _evaluate(self, version: int) -> None:
        """Start an evaluation on a connection of its own, since training continues meanwhile."""

        def evaluate() -> dict[str, Any]:
            client = ControllerClient(self._run_dir, patience_s(self._config))
            try:
                return client.evaluate(version)
            finally:
                client.close()

        if self._config.eval.problems:
            self.evaluates_last = version == self._config.trainer.steps
            self._evaluations.append(start_daemon(evaluate))

    def _collect(self, only_done: bool = False) -> None:
        """Log evaluations in the order in which they were started."""
        while self._evaluations and (self._evaluations[0].done() or not only_done):
            self._metrics.log_evaluation(self._evaluations.pop(0).result())

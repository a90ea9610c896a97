"""The trainer process: `python -m areal_lite.trainer.loop RUN_DIR`, one per rank, with torchrun's environment where there are several.

A step: pull the shard of batch k (k is also the trainer's version) -> M updates -> push version k + 1 -> metrics, checkpoint, evaluation.
The controller reopens admission as soon as the push is over: what comes after it costs generation nothing. The first k is the step of the
newest checkpoint, 0 without one; a stop that was asked for ends the run after a step (areal_lite/run_dir/resume.py).
"""

from __future__ import annotations

import logging
import sys
import time
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from areal_lite.config import TrainConfig, load_config
from areal_lite.controller.client import ControllerClient
from areal_lite.megatron.checkpoint import Checkpoints
from areal_lite.megatron.optimizer import SkippedSteps, on_every_rank
from areal_lite.megatron.parallel import data_parallel_rank, shutdown
from areal_lite.run_dir.bad_batches import save_batch
from areal_lite.run_dir.metrics import MetricsLog, append_event, forget_after, read_events
from areal_lite.run_dir.resume import CHECKPOINTS, stop_requested, withdraw_stop
from areal_lite.system.files import write_json
from areal_lite.system.processes import die_with_parent
from areal_lite.system.threads import start_daemon
from areal_lite.trainer.models import build_models
from areal_lite.trainer.objective import build_objective
from areal_lite.trainer.step import policy_step
from areal_lite.trajectory import TrainBatch
from areal_lite.weights.agreement import LogprobAgreement
from areal_lite.weights.push import make_pusher

log = logging.getLogger(__name__)


def train(config: TrainConfig, run_dir: Path) -> None:
    """The whole run of one rank."""
    objective = build_objective(config)
    models = build_models(config, objective)
    engine, trainer = models.policy, config.trainer
    checkpoints = Checkpoints(
        run_dir / CHECKPOINTS, models.trained, trainer.keep_checkpoints, trainer.milestone_every
    )
    start = done = checkpoints.resume()
    skipped = SkippedSteps(trainer.max_skipped_steps)
    controller = ControllerClient(run_dir, _patience_s(config))
    rank = data_parallel_rank()
    lead = _Lead(config, run_dir, controller, start) if dist.get_rank() == 0 else None
    pusher = make_pusher(
        engine, controller if lead else None, config, run_dir, servers_stale=start > 0
    )
    models.leave_device()
    for step in range(start, trainer.steps):
        times = [time.time()]
        batch, info = controller.batch(
            step, rank, trainer.data_parallel, lambda: pusher.push_stale(step)
        )
        times.append(time.time())
        with models.on_device():
            result = policy_step(models, objective, batch, config, step)
        _look_at_skipped(
            skipped,
            result.metrics["skipped"] + result.metrics.get("critic_skipped", 0.0),
            batch,
            step,
            run_dir,
        )
        times.append(time.time())
        if lead:
            lead.before_push(step, batch, result.prox, pusher.servers)
        report = pusher.push_all(step + 1)
        times.append(time.time())
        if lead:
            wait_s, train_s, push_s = (later - earlier for earlier, later in zip(times, times[1:]))
            timing = {"wait_s": wait_s, "train_s": train_s, "push_s": push_s}
            lead.after_push(step, {**info, **result.metrics, **timing}, asdict(report))
        checkpoints.poll()
        done = step + 1
        if done == trainer.steps:
            break
        stopping = on_every_rank(stop_requested(run_dir))
        if stopping or (trainer.save_every and done % trainer.save_every == 0):
            checkpoints.save(done, {"step": done})
        if stopping:
            break
    if start < done == trainer.steps:
        if lead:
            lead.evaluate_last()
            withdraw_stop(run_dir)
        # Before anything that waits for the servers: what was learned must not depend on them.
        checkpoints.save(done, {"step": done})
        engine.export_hf(run_dir / CHECKPOINTS / "hf")
    checkpoints.wait()
    pusher.close()
    if lead:
        lead.finish()
    shutdown()


def _look_at_skipped(
    skipped: SkippedSteps, updates: float, batch: TrainBatch, step: int, run_dir: Path
) -> None:
    """Keep the batch of a step with an update that was skipped, for inspection. Raises FloatingPointError after too many in a row."""
    if updates:
        save_batch(
            batch, run_dir / "bad_batches" / f"step-{step + 1}-rank-{dist.get_rank()}.msgpack"
        )
    skipped.record(step + 1, updates)


def _patience_s(config: TrainConfig) -> float:
    """How long to wait for the controller: a server may have to start, or to start again, before there can be an answer."""
    return config.server.start_timeout_s + config.trainer.batch_timeout_s


class _Lead:
    """What rank 0 does beside training: metrics, evaluation, and the check of the servers' log-probs."""

    def __init__(
        self, config: TrainConfig, run_dir: Path, controller: ControllerClient, start: int
    ):
        self.config, self.run_dir, self.controller = config, run_dir, controller
        forget_after(run_dir, start)
        self.metrics = MetricsLog(
            run_dir,
            config.logger,
            asdict(replace(config, server=replace(config.server, api_key=None))),
        )
        self.probe = LogprobAgreement(run_dir, config)
        self.last = time.time()
        self.evaluations: list[Future] = (
            [self._evaluate(0)]
            if config.eval.problems and not start and not read_events(run_dir, "evals")
            else []
        )
        self.probed: dict[str, float | None] = {}

    def before_push(self, step: int, batch, prox, servers) -> None:
        """The servers still have the weights that the step started from."""
        if step == 0:
            self._collect()  # accuracy before training is of version 0 alone
        self.probed = self.probe.compare(batch, prox, step, servers)

    def after_push(self, step: int, metrics: dict[str, Any], report: dict[str, Any]) -> None:
        now = time.time()
        record = {
            "step": step + 1,
            "version": step + 1,
            "time_s": now - self.last,
            **metrics,
            **report,
            **self.probed,
        }
        self.last = now
        self.metrics.log(record)
        self._collect(only_done=True)
        log.info(
            "step %d: reward %.3f, waited %.1f s, trained %.1f s",
            step + 1,
            record["reward_mean"],
            record["wait_s"],
            record["train_s"],
        )
        last = step + 1 == self.config.trainer.steps
        every = self.config.eval.every
        if self.config.eval.problems and not last and every and (step + 1) % every == 0:
            self.evaluations.append(self._evaluate(step + 1))

    def evaluate_last(self) -> None:
        """Start the evaluation of the final weights."""
        if self.config.eval.problems:
            self.evaluations.append(self._evaluate(self.config.trainer.steps))

    def finish(self) -> None:
        """Let the controller close its books."""
        self._collect()
        write_json(self.run_dir / "controller_totals.json", self.controller.finish())
        self.metrics.close()

    def _evaluate(self, version: int) -> Future:
        # On a connection of its own: an evaluation takes long and training goes on beside it.
        def evaluate() -> dict[str, Any]:
            client = ControllerClient(self.run_dir, _patience_s(self.config))
            try:
                return client.evaluate(version)
            finally:
                client.close()

        return start_daemon(evaluate)

    def _collect(self, only_done: bool = False) -> None:
        """Write down evaluations in the order in which they were started."""
        while self.evaluations and (self.evaluations[0].done() or not only_done):
            append_event(self.run_dir, "evals", self.evaluations.pop(0).result())


def main() -> int:
    die_with_parent()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    run_dir = Path(sys.argv[1])
    try:
        train(load_config(run_dir), run_dir)
    except (ValueError, FloatingPointError) as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

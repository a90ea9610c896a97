"""The training loop of one rank: `python -m areal_lite.trainer.loop RUN_DIR`, started by torchrun.

    pull the batch -> M updates -> push version k + 1 -> metrics, evaluation, checkpoint

* The trainer's version k is the number of completed steps. The first k is that of the newest
  checkpoint, or 0.
* The controller reopens admission when a push ends, so the work after it does not delay generation.
* A requested stop ends the run after a step, with a checkpoint (areal_lite/run_dir/resume.py).
"""

from __future__ import annotations

import logging
import sys
import time
from functools import partial
from pathlib import Path

import torch.distributed as dist

from areal_lite.config import TrainConfig, load_config
from areal_lite.controller.client import ControllerClient
from areal_lite.megatron.checkpoint import Checkpoints
from areal_lite.megatron.optimizer import SkippedSteps
from areal_lite.megatron.parallel import data_parallel_rank, on_every_rank, shutdown
from areal_lite.megatron.policy import Policy
from areal_lite.run_dir.bad_batches import save_batch
from areal_lite.run_dir.paths import BAD_BATCHES_DIR, CHECKPOINTS_DIR, HF_DIR
from areal_lite.run_dir.resume import stop_requested
from areal_lite.system.processes import die_with_parent
from areal_lite.trainer.models import build_models
from areal_lite.trainer.objective import build_objective
from areal_lite.trainer.reporter import make_reporter, patience_s
from areal_lite.trainer.step import StepResult, policy_step
from areal_lite.trajectory import TrainBatch
from areal_lite.weights.push import make_pusher

log = logging.getLogger(__name__)


def train(config: TrainConfig, run_dir: Path) -> None:
    """Run the steps that are left, on this rank. Every rank calls it."""
    settings = config.trainer
    objective = build_objective(config)
    models = build_models(config, objective)
    checkpoints = Checkpoints(
        run_dir / CHECKPOINTS_DIR,
        models.trained,
        settings.keep_checkpoints,
        settings.milestone_every,
    )
    start = done = checkpoints.resume()
    controller = ControllerClient(run_dir, patience_s(config))
    reporter = make_reporter(config, run_dir, controller, start)
    pusher = make_pusher(
        models.policy,
        controller if dist.get_rank() == 0 else None,
        config,
        run_dir,
        servers_stale=start > 0,
    )
    skipped = SkippedSteps(settings.max_skipped_steps)
    models.leave_device()

    for step in range(start, settings.steps):
        watch = Stopwatch()
        batch, info = controller.batch(
            step, data_parallel_rank(), settings.data_parallel, partial(pusher.push_stale, step)
        )
        watch.lap("wait_s")
        with models.on_device():
            result = policy_step(models, objective, batch, config, step)
        _record_skipped(skipped, result, batch, step, run_dir)
        watch.lap("train_s")
        reporter.before_push(step, batch, result.prox, pusher.servers)
        push = pusher.push_all(step + 1)
        watch.lap("push_s")
        reporter.after_push(step, {**info, **result.metrics, **watch.seconds}, push)
        checkpoints.poll()
        done = step + 1
        if done < settings.steps and _save_and_stop(checkpoints, done, config, run_dir):
            break

    if start < done == settings.steps:
        reporter.end_training()
        _save_results(checkpoints, models.policy, done, run_dir)
    checkpoints.wait()
    pusher.close()
    reporter.finish()
    shutdown()


class Stopwatch:
    """The seconds that the phases of a step took, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.time()

    def lap(self, name: str) -> None:
        """End the phase `name`; the next one begins."""
        now = time.time()
        self.seconds[name] = now - self._last
        self._last = now


def _record_skipped(
    skipped: SkippedSteps, result: StepResult, batch: TrainBatch, step: int, run_dir: Path
) -> None:
    """Save the batch of a step with a skipped update.

    Raises FloatingPointError after too many such steps in a row.
    """
    if result.skipped:
        name = f"step-{step + 1}-rank-{dist.get_rank()}.msgpack"
        save_batch(batch, run_dir / BAD_BATCHES_DIR / name)
    skipped.record(step + 1, result.skipped)


def _save_and_stop(checkpoints: Checkpoints, done: int, config: TrainConfig, run_dir: Path) -> bool:
    """Save a checkpoint if one is due or a stop was requested; return whether to stop."""
    stop = on_every_rank(stop_requested(run_dir))
    every = config.trainer.save_every
    if stop or (every and done % every == 0):
        checkpoints.save(done, {"step": done})
    return stop


def _save_results(checkpoints: Checkpoints, policy: Policy, done: int, run_dir: Path) -> None:
    """Save the last checkpoint and export the model, before any call that waits for servers."""
    checkpoints.save(done, {"step": done})
    policy.export_hf(run_dir / CHECKPOINTS_DIR / HF_DIR)


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

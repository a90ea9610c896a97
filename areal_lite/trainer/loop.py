"""The trainer process: `python -m areal_lite.trainer.loop RUN_DIR`, one per rank, with torchrun's environment where there are several.

A step: pull the shard of batch k (k is also the trainer's version) -> M updates -> push version k + 1 -> metrics, checkpoint, evaluation.
The controller reopens admission as soon as the push is over: what comes after it costs generation nothing.
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
from megatron.core import parallel_state

from areal_lite.buffer.wire import ControllerClient
from areal_lite.config import TrainConfig, load_config
from areal_lite.launch.process import die_with_parent
from areal_lite.observe.metrics import MetricsLog, append_event, write_json
from areal_lite.sync.control import in_thread
from areal_lite.sync.probe import Probe
from areal_lite.sync.push import WeightPusher
from areal_lite.trainer.engine import MegatronEngine
from areal_lite.trainer.parallel import shutdown
from areal_lite.trainer.step import policy_step

log = logging.getLogger(__name__)


def train(config: TrainConfig, run_dir: Path) -> None:
    """The whole run of one rank."""
    engine = MegatronEngine(config.trainer, Path(config.model), config.seed)
    controller = ControllerClient(run_dir, config.trainer.batch_timeout_s)
    rank = parallel_state.get_data_parallel_rank()
    lead = _Lead(config, run_dir, controller) if dist.get_rank() == 0 else None
    # One copy of the weights is enough: that of the first data-parallel rank.
    pusher = WeightPusher(engine, controller if lead else None, config, run_dir) if rank == 0 else None
    for step in range(config.trainer.steps):
        times = [time.time()]
        batch, info = controller.batch(step, rank, config.trainer.data_parallel)
        times.append(time.time())
        result = policy_step(engine, batch, config, step)
        times.append(time.time())
        if lead:
            lead.before_push(step, batch, result.prox, pusher.servers)
        report = pusher.push(step + 1) if pusher else None
        times.append(time.time())
        if lead:
            wait_s, train_s, push_s = (later - earlier for earlier, later in zip(times, times[1:]))
            timing = {"wait_s": wait_s, "train_s": train_s, "push_s": push_s}
            lead.after_push(step, {**info, **result.metrics, **timing}, asdict(report))
        if config.trainer.save_every and (step + 1) % config.trainer.save_every == 0 and step + 1 < config.trainer.steps:
            engine.save(run_dir / "checkpoints" / f"step-{step + 1}", {"step": step + 1})
    if lead:
        lead.evaluate_last()
    # Before anything that waits for the servers: what was learned must not depend on them.
    engine.save(run_dir / "checkpoints" / f"step-{config.trainer.steps}", {"step": config.trainer.steps})
    engine.export_hf(run_dir / "checkpoints" / "hf")
    if pusher:
        pusher.close()
    if lead:
        lead.finish()
    shutdown()


class _Lead:
    """What rank 0 does beside training: metrics, evaluation, and the check of the servers' log-probs."""

    def __init__(self, config: TrainConfig, run_dir: Path, controller: ControllerClient):
        self.config, self.run_dir, self.controller = config, run_dir, controller
        self.metrics = MetricsLog(run_dir, config.logger, asdict(replace(config, server=replace(config.server, api_key=None))))
        self.probe = Probe(run_dir, config)
        self.last = time.time()
        self.evaluations: list[Future] = [self._evaluate(0)] if config.eval.problems else []
        self.probed: dict[str, float | None] = {}

    def before_push(self, step: int, batch, prox, servers) -> None:
        """The servers still have the weights that the step started from."""
        if step == 0:
            self._collect()  # accuracy before training is of version 0 alone
        self.probed = self.probe.compare(batch, prox, step, servers)

    def after_push(self, step: int, metrics: dict[str, Any], report: dict[str, Any]) -> None:
        now = time.time()
        record = {"step": step + 1, "version": step + 1, "time_s": now - self.last, **metrics, **report, **self.probed}
        self.last = now
        self.metrics.log(record)
        self._collect(only_done=True)
        log.info("step %d: reward %.3f, waited %.1f s, trained %.1f s", step + 1, record["reward_mean"], record["wait_s"], record["train_s"])
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
            client = ControllerClient(self.run_dir, self.config.trainer.batch_timeout_s)
            try:
                return client.evaluate(version)
            finally:
                client.close()

        return in_thread(evaluate)

    def _collect(self, only_done: bool = False) -> None:
        """Write down evaluations in the order in which they were started."""
        while self.evaluations and (self.evaluations[0].done() or not only_done):
            append_event(self.run_dir, "evals", self.evaluations.pop(0).result())


def main() -> int:
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run_dir = Path(sys.argv[1])
    try:
        train(load_config(run_dir), run_dir)
    except ValueError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

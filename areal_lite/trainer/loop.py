"""The training loop of one rank: `python -m areal_lite.trainer.loop RUN_DIR`, started by torchrun.

    pull the batch -> M updates -> push version k + 1, if due -> metrics, evaluation, checkpoint

* Step k starts from the weights of version k, the number of completed steps. The first k is that of
  the newest checkpoint, or 0.
* Every `sync.every` steps, and after the last one, a push brings the weights to the servers.
  A first one brings them the weights of the first k, before their first request.
* The controller reopens admission when a push ends, so the work after it does not delay generation.
* A requested stop ends the run after a step, with a checkpoint (areal_lite/run_dir/resume.py).
"""

import gc

if __name__ == "__main__":
    gc.disable()  # until main: what imports make stays, and each collection would visit all of it

import logging
import sys
import time
from concurrent.futures import CancelledError, Future, wait
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from areal_lite.config import TrainConfig, load_config, without_secrets
from areal_lite.controller.protocol import ControllerClient
from areal_lite.megatron.checkpoint import Checkpoints
from areal_lite.megatron.flops import utilization
from areal_lite.megatron.kernels import kernels
from areal_lite.megatron.parallel import data_parallel_rank, on_every_rank, shutdown
from areal_lite.run_dir.metrics import MetricsLog, append_event, forget_after, read_events
from areal_lite.run_dir.paths import BAD_BATCHES_DIR, CHECKPOINTS_DIR, HF_DIR, TOTALS_FILE
from areal_lite.run_dir.resume import clear_stop_request, stop_requested
from areal_lite.servers.blocking import start_post
from areal_lite.servers.client import ServerError
from areal_lite.servers.registry import ServerInfo
from areal_lite.system import heartbeat
from areal_lite.system.files import write_json
from areal_lite.system.processes import die_with_parent, run_role, start_daemon, steady_time
from areal_lite.train_batch import TrainBatch, save_batch
from areal_lite.trainer.objective import build_objective
from areal_lite.trainer.profile import profiled
from areal_lite.trainer.step import build_models, policy_step
from areal_lite.trajectory import trace_name
from areal_lite.weights.push import make_pusher
from areal_lite.weights.recipients import PushReport
from areal_lite.weights.turns import Turns

log = logging.getLogger(__name__)

_SAVE_INTERVAL_S = 1800.0  # without trainer.save_every, a restart loses at most that and a step
_MAX_SKIPPED_STEPS = 5
_NUM_SCORED = 4  # sequences of a step that servers score
# How long a step may wait for scored sequences: at first, and as a share of the time after that.
_SCORING_TIMEOUT_S = 10.0
_SCORING_SHARE = 0.02
_RECORDED_TOKENS = 8192  # tokens of a step whose proximal log-probs are recorded, at most


def train(config: TrainConfig, run_dir: Path) -> None:
    """Run the steps that are left, on this rank. Every rank calls it."""
    run = TrainingRun(config, run_dir)
    for step in range(run.done, config.trainer.steps):
        run.step(step)
        if run.save_and_stop():
            break
    run.finish()


class TrainingRun:
    """One rank's part of a run. Every rank makes the same calls.

    `done` counts completed steps. `pushed` is the version of the last push. `saved_at` is when the
    newest checkpoint was begun, in seconds of the monotonic clock. `skipped` counts the last steps
    in a row with a skipped update.
    """

    def __init__(self, config: TrainConfig, run_dir: Path):
        trainer = config.trainer
        self.config = config
        self.run_dir = run_dir
        self.objective = build_objective(config)
        self.turns = Turns(config, run_dir)
        with self.turns.turn():
            self.models = build_models(config, self.objective)
            self.checkpoints = Checkpoints(
                run_dir / CHECKPOINTS_DIR, self.models.trained, trainer.keep_checkpoints
            )
            self.start = self.done = self.pushed = self.checkpoints.resume()
            self.models.leave_device()
        self.controller = self._join_controller()
        self.reporter = None
        if dist.get_rank() == 0:
            self.reporter = Reporter(config, run_dir, self.controller, self.start)
        controller = self.controller if self.reporter else None
        self.pusher = make_pusher(self.models.policy, controller, config, run_dir, self.turns)
        self.skipped = 0
        self.saved_at = time.monotonic()

    def step(self, step: int) -> None:
        """Train on the batch of `step` and push the weights after it, if a push is due."""
        began = steady_time()
        heartbeat.enter(f"waiting for the batch of step {step + 1}")
        batch, info = self._pull(step)
        pulled = steady_time()
        lag = step - self.pushed
        with profiled(step + 1, dist.get_rank(), self.run_dir):
            heartbeat.enter(f"training step {step + 1}")
            if self.reporter:
                parks = self.config.server.takes_turns
                if parks:  # parked servers answer no evaluation before the push
                    self.reporter.end_evaluations(step)
                # Servers with older weights have other log-probs.
                able = not (lag or parks)
                self.reporter.agreement.begin(batch, self.pusher.servers if able else [])
            with self.turns.turn(), kernels.training_step(), self.models.on_device():
                result = policy_step(self.models, self.objective, batch, self.config, step)
            self._record_skipped(step, batch, result.skipped)
            trained = steady_time()
            heartbeat.enter(f"pushing the weights after step {step + 1}")
            if self.reporter:
                self.reporter.before_push(step, batch, result.prox)
            self.done = step + 1
            push = self._push_if_due()
            pushed = steady_time()
        heartbeat.enter(f"reporting step {step + 1}")
        if self.reporter:
            seconds = {"wait_s": pulled - began, "train_s": trained - pulled}
            metrics = {**info, **result.metrics, **seconds, "push_s": pushed - trained}
            metrics |= {"version": self.pushed, "server_lag": lag}
            metrics |= utilization(result.operations, seconds["train_s"])
            self.reporter.end_step(self.done, metrics, push)
        self.checkpoints.poll()

    def save_and_stop(self) -> bool:
        """Save a checkpoint if one is due or a stop was requested; return whether to stop."""
        if self.done == self.config.trainer.steps:
            return True
        stop = on_every_rank(stop_requested(self.run_dir))
        if every := self.config.trainer.save_every:
            due = self.done % every == 0
        else:
            due = on_every_rank(time.monotonic() - self.saved_at >= _SAVE_INTERVAL_S)
        if due or stop:
            heartbeat.enter(f"copying the checkpoint of step {self.done}")
            self.checkpoints.save(self.done, {"step": self.done})
            self.saved_at = time.monotonic()
        return stop

    def finish(self) -> None:
        """Save what was learned, if all steps are done, and end the run.

        Servers that come back during the last evaluation get a push.
        """
        heartbeat.enter("saving the weights")
        if self.start < self.done == self.config.trainer.steps:
            if self.reporter:
                self.reporter.end_training()
            # Before any call that waits for servers: the results must not depend on them.
            self.checkpoints.save(self.done, {"step": self.done})
            self.models.policy.export_hf(self.run_dir / CHECKPOINTS_DIR / HF_DIR)
        self.checkpoints.wait()
        if on_every_rank(not self.reporter or self.reporter.evaluates_last):
            heartbeat.enter("waiting for the last evaluation")
            self.controller.await_evaluation(self.done, lambda: self.pusher.push_stale(self.done))
            dist.barrier()  # the controller answers nobody after it has told rank 0 the totals
        heartbeat.enter("ending the run")
        self.pusher.close()
        if self.reporter:
            self.reporter.finish()
        shutdown()

    def _join_controller(self) -> ControllerClient:
        """Return this rank's client of the controller that answers this trainer.

        An earlier one may still answer until rank 0 has told it that another trainer begins.
        """
        seconds = patience_s(self.config)
        client = None
        if dist.get_rank() == 0:  # it takes part in all that the other ranks do
            heartbeat.limit(self.config.restart.hang_timeout_s)
            client = ControllerClient(self.run_dir, seconds)
            client.begin(self.start)
        dist.barrier()
        return client or ControllerClient(self.run_dir, seconds)

    def _pull(self, step: int) -> tuple[TrainBatch, dict[str, Any]]:
        """Wait for this rank's shard of the batch; push to servers that start meanwhile."""
        rank, ranks = data_parallel_rank(), self.config.trainer.data_parallel
        return self.controller.batch(step, rank, ranks, lambda: self._resync(step))

    def _resync(self, step: int) -> None:
        """Bring the stale servers to the weights of `step`.

        Between two pushes no server has these weights. They then go to all servers as a version of
        their own, so that the servers never hold two versions.
        """
        if step == self.pushed:
            self.pusher.push_stale(step)
        else:
            self.pusher.push_all(step)
            self.pushed = step

    def _push_if_due(self) -> PushReport | None:
        if not self.config.is_pushed(self.done):
            self.pusher.skip(self.done)
            return None
        self.pushed = self.done
        return self.pusher.push_all(self.done)

    def _record_skipped(self, step: int, batch: TrainBatch, skipped: float) -> None:
        """Save the batch of a step with a skipped update.

        Raises FloatingPointError after five such steps in a row, on all ranks at the same step.
        """
        self.skipped = self.skipped + 1 if skipped else 0
        if skipped:
            name = f"step-{step + 1}-rank-{dist.get_rank()}.msgpack"
            save_batch(batch, self.run_dir / BAD_BATCHES_DIR / name)
        if self.skipped == _MAX_SKIPPED_STEPS:
            raise FloatingPointError(
                f"the loss or the gradient was not finite in {self.skipped} steps in a row, up to "
                f"step {step + 1}: inspect their batches in {BAD_BATCHES_DIR}/ "
                "(areal_lite.train_batch.load_batch), lower trainer.lr, or resume from an "
                "earlier checkpoint"
            )


def patience_s(config: TrainConfig) -> float:
    """Return how long to wait for the controller.

    Its answer may wait for a server to start, for an episode to reach its limit, and for another
    controller to replace a hanging one.
    """
    waits = config.server.start_timeout_s, config.rollout.episode_timeout_s
    return sum(waits) + config.restart.hang_timeout_s


def proximal_record(step: int, batch: TrainBatch, prox: np.ndarray) -> dict[str, Any]:
    """Return the proximal log-probs, in nats, of the first group's sampled tokens, by `trace_name`.

    The longest trajectories may be missing. step: from 0; prox: float32 [T].
    """
    first = np.flatnonzero(batch.group_ids == batch.group_ids[0])
    first = first[np.argsort(batch.lengths[first], kind="stable")]
    fitting = first[np.cumsum(batch.lengths[first]) <= _RECORDED_TOKENS]
    logprobs = {}
    for sequence in fitting:
        tokens = batch.token_indices(np.array([sequence]))
        sampled = tokens[batch.sampled[tokens]]
        indices = batch.sample_indices[sequence], batch.trace_indices[sequence]
        logprobs[trace_name(*map(int, indices))] = np.round(prox[sampled].astype(float), 5)
    return {"step": step, "group_id": int(batch.group_ids[0]), "prox": logprobs}


class LogprobAgreement:
    """Whether server and trainer agree: log-probs of the same tokens under the same weights.

    Every step makes up to two comparisons (docs/training.md), mean absolute differences in nats:

    * `logprob_diff_sampled`, of fresh sequences in the batch. With `algo.prox=loglinear` it is
      None, because that takes the behavior log-probs of fresh tokens for the trainer's own.
    * `logprob_diff_scored`, of a few sequences that a server scores as prompts. It needs
      temperature 1, because the log-probs of a prompt are not scaled by it. It is None with
      replayed routes, and where servers are so busy that all waiting for them would take more than
      10 s and 2 % of the run.
    """

    def __init__(self, config: TrainConfig):
        algo = config.algo
        self._computes = algo.prox != "loglinear"
        exact = self._computes and not algo.routing_replay
        self._scores = exact and config.rollout.temperature == 1.0
        self._calls: list[tuple[Future[Any], slice]] = []
        self._spare_s, self._counted_at = _SCORING_TIMEOUT_S, steady_time()

    def begin(self, batch: TrainBatch, servers: list[ServerInfo]) -> None:
        """Let `servers`, which have the trainer's weights, begin to score a part of `batch`."""
        self._calls = []
        if self._scores and servers:
            ends = batch.cu_seqlens[: min(_NUM_SCORED, batch.num_sequences) + 1].tolist()
            for i, span in enumerate(starmap(slice, pairwise(ends))):
                body = {
                    "input_ids": batch.tokens[span].tolist(),
                    "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
                    "return_logprob": True,
                    "logprob_start_len": 0,
                }
                call = start_post(servers[i % len(servers)], "/generate", body, _SCORING_TIMEOUT_S)
                self._calls.append((call, span))

    def compare(self, batch: TrainBatch, prox: Tensor, version: int) -> dict[str, float | None]:
        """Compare the log-probs of `batch` and return the differences by metric name.

        The servers must still have the weights that they had at `begin`. prox: float32 [T], the
        log-probs of sampled tokens under the trainer's `version`.
        """
        own = prox.numpy()
        sampled = difference_of_fresh(batch, own, version) if self._computes else None
        scored = self._difference_of_scored(batch.sampled, own)
        known = [difference for difference in (sampled, scored) if difference is not None]
        return {
            "logprob_diff_sampled": sampled,
            "logprob_diff_scored": scored,
            "logprob_diff": max(known) if known else None,
        }

    def _difference_of_scored(self, sampled: np.ndarray, own: np.ndarray) -> float | None:
        if not self._calls:
            return None
        differences, waited_s = [], self._wait()
        for call, span in self._calls:
            # The controller and the next push deal with a server that died or answers wrongly.
            with suppress(ServerError, CancelledError, LookupError, TypeError, ValueError):
                scored = call.result()["meta_info"]["input_token_logprobs"][1:]
                scored = np.array([logprob for logprob, _, _ in scored], np.float32)
                differences.append(np.abs(scored - own[span][1:])[sampled[span][1:]])
        if not differences:
            log.warning(
                "no server scored a sequence, and the step waited for %.1f s:"
                " log-probs are not compared at this step",
                waited_s,
            )
            return None
        together = np.concatenate(differences)
        return float(together.mean()) if len(together) else None

    def _wait(self) -> float:
        """Wait for the answers while the run can spare it, end the other calls; return seconds."""
        started = steady_time()
        earned = _SCORING_SHARE * (started - self._counted_at)
        self._spare_s = min(self._spare_s + earned, _SCORING_TIMEOUT_S)
        for call in wait([call for call, _ in self._calls], self._spare_s).not_done:
            call.cancel()
        self._counted_at = steady_time()
        self._spare_s = max(self._spare_s - (self._counted_at - started), 0.0)
        return self._counted_at - started


def difference_of_fresh(batch: TrainBatch, own: np.ndarray, version: int) -> float | None:
    """Return the mean |behavior - own| over sampled tokens of sequences wholly of `version`.

    Their KV cache must be of `version` too. None without such a sequence.
    """
    older_tokens = batch.loss_mask & (batch.versions != version)
    stale = np.bincount(batch.sequence_ids, older_tokens, batch.num_sequences) > 0
    stale |= batch.kv_versions != version
    chosen = batch.loss_mask & ~stale[batch.sequence_ids]
    if not chosen.any():
        return None
    return float(np.abs(batch.behavior_logprobs[chosen] - own[chosen]).mean())


class Reporter:
    """The reports of rank 0: metrics, evaluations, and the agreement of log-probs with the servers.

    `evaluates_last` says whether the weights after the last step are being evaluated.
    """

    def __init__(
        self, config: TrainConfig, run_dir: Path, controller: ControllerClient, start: int
    ):
        self._config = config
        self._run_dir = run_dir
        self._controller = controller
        forget_after(run_dir, start)
        self._metrics = MetricsLog(run_dir, config.logger, without_secrets(asdict(config)))
        self.agreement = LogprobAgreement(config)
        self._compared: dict[str, float | None] = {}
        self._last_log = steady_time()
        self._evaluations: list[Future] = []
        self.evaluates_last = False
        if self._evaluation_is_due(start):
            self._evaluate(start)

    def end_evaluations(self, step: int) -> None:
        """Wait for the evaluations that the weights before the step must answer alone.

        Version 0 must, for the accuracy before training, and every version in a run that can be
        repeated.
        """
        if step == 0 or self._config.server.deterministic:
            self._collect()

    def before_push(self, step: int, batch: TrainBatch, prox: Tensor) -> None:
        """Compare log-probs with the servers, which still have the weights before the step.

        prox: float32 [T], the trainer's log-probs of `batch` under those weights.
        """
        self.end_evaluations(step)
        append_event(self._run_dir, "proximal", proximal_record(step, batch, prox.numpy()))
        self._compared = self.agreement.compare(batch, prox, step)

    def end_step(self, done: int, metrics: dict[str, Any], push: PushReport | None) -> None:
        """Log the metrics after `done` steps and their push; start an evaluation if one is due."""
        now = steady_time()
        time_s = now - self._last_log
        self._last_log = now
        record = {"step": done, "time_s": time_s, **metrics, **self._compared}
        record |= asdict(push) if push else {"pause_s": None}
        self._metrics.log(record)
        self._collect(only_done=True)
        shown = (record[key] for key in ("reward_mean", "wait_s", "train_s"))
        log.info("step %d: reward %.3f, waited %.1f s, trained %.1f s", done, *shown)
        if self._config.is_evaluated(done):
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
        return newest < (start if is_last else self._config.last_evaluated(start))

    def _evaluate(self, version: int) -> None:
        """Start an evaluation on a connection of its own, since training continues meanwhile."""

        def evaluate() -> dict[str, Any]:
            with closing(ControllerClient(self._run_dir, patience_s(self._config))) as client:
                return client.evaluate(version)

        if self._config.eval.problems:
            self.evaluates_last = version == self._config.trainer.steps
            self._evaluations.append(start_daemon(evaluate))

    def _collect(self, only_done: bool = False) -> None:
        """Log evaluations in the order in which they were started."""
        while self._evaluations and (self._evaluations[0].done() or not only_done):
            self._metrics.log_evaluation(self._evaluations.pop(0).result())


def main() -> int:
    die_with_parent()
    gc.freeze()  # Megatron collects garbage twice for a checkpoint: not what imports made
    gc.enable()
    heartbeat.start("loading the model and the checkpoint")
    return run_role(lambda path: train(load_config(path), path), ValueError, FloatingPointError)


if __name__ == "__main__":
    sys.exit(main())

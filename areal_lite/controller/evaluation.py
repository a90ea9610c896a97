"""Evaluation on held-out problems: greedy accuracy, sampled accuracy and pass@k, with intervals.

An evaluation shares the servers with rollouts, and a push in its middle changes the weights. After
the last step no push follows. The trainer then waits for the evaluation and pushes its weights
again whenever servers come back (`Resync`). Without any server, the evaluation fails.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from areal_lite.config import TrainConfig
from areal_lite.config.data import sampling_of_evaluation
from areal_lite.controller.batches import EVALUATED, Batches
from areal_lite.controller.sources import Dependencies, Player, Source
from areal_lite.rollout.episode import Rollout
from areal_lite.run_dir.paths import CHECKPOINTS_DIR, HF_DIR
from areal_lite.run_dir.store import Store, StoreThread
from areal_lite.servers.client import SamplingParams, sampling_params
from areal_lite.servers.fleet import Fleet
from areal_lite.system.processes import LONGEST_BACK_OFF_S
from areal_lite.trajectory import episode_reward
from areal_lite.workers.pool import TaskFailed

log = logging.getLogger(__name__)
Interval = tuple[float, float]

_Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution
_CHECK_INTERVAL_S = 0.5


@dataclass(slots=True)
class Scores:
    """The scores of one held-out set."""

    rewards: np.ndarray  # float64 [problems, 1 + samples], the greedy completion first
    versions: list[int]  # that sampled at least one token
    failures: int  # completions without a reward; they count as 0
    timeouts: int = 0  # failures by taking too long

    def record(self) -> dict[str, Any]:
        """Return the scores as JSON values, as they are in evals.jsonl.

        `interval` computes the intervals. `greedy_interval` is None when a reward is outside
        [0, 1], `sampled` without samples. `pass_at_k` has each power of two up to their number; a
        sample is correct if its reward is positive.
        """
        greedy, sampled = self.rewards[:, 0], self.rewards[:, 1:]
        problems, samples = sampled.shape
        correct = np.count_nonzero(sampled > 0, axis=1)
        pass_at = {}
        for k in (1 << i for i in range(samples.bit_length())):
            pass_at[str(k)] = float(np.mean([pass_at_k(samples, int(c), k) for c in correct]))
        is_share = bool(((greedy >= 0) & (greedy <= 1)).all())
        return {
            "greedy": float(greedy.mean()),
            "greedy_interval": interval(float(greedy.mean()), problems) if is_share else None,
            "sampled": float(sampled.mean()) if samples else None,
            "pass_at_k": pass_at,
            "pass_at_k_intervals": {k: interval(p, problems) for k, p in pass_at.items()},
            "problems": problems,
            "samples": samples,
            "versions": self.versions,
            "failures": self.failures,
            "timeouts": self.timeouts,
        }


def pooled(parts: Sequence[Scores]) -> Scores:
    """Return the scores of all problems of several sets."""
    return Scores(
        rewards=np.concatenate([part.rewards for part in parts]),
        versions=sorted({version for part in parts for version in part.versions}),
        failures=sum(part.failures for part in parts),
        timeouts=sum(part.timeouts for part in parts),
    )


def failed_answers(record: Mapping[str, Any] | None) -> str:
    """Say how many answers of an evaluation have a reward; "" if all do. The others count as 0."""
    if not record or not record.get("failures"):
        return ""
    asked, timeouts = record["problems"] * (1 + record["samples"]), record["timeouts"]
    failed = record["failures"] - timeouts
    parts = [f"{timeouts} timed out"] * bool(timeouts)
    parts += [f"{failed} failed"] * bool(failed)
    return f"{asked - record['failures']} of {asked} answers were scored, {', '.join(parts)}"


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate without bias that one of k samples is correct.

    1 - C(n - c, k) / C(n, k), with `correct` c of `samples` n (arXiv 2107.03374, eq. 1).
    """
    assert 0 <= correct <= samples and 1 <= k <= samples
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def interval(mean: float, problems: int) -> Interval:
    """Return the 95 % score interval of a mean over problems whose values are in [0, 1].

    It is Wilson's (1927), for a share. Other values in [0, 1] with the same mean vary less, so it
    is too wide for them rather than too narrow.
    """
    shrink = 1 + _Z**2 / problems
    center = (mean + _Z**2 / (2 * problems)) / shrink
    half = _Z / shrink * sqrt(mean * (1 - mean) / problems + _Z**2 / (4 * problems**2))
    return max(0.0, center - half), min(1.0, center + half)


async def score_problems(
    source: Source,
    dependencies: Dependencies,
    fleet: Fleet,
    problems: int,
    samples: int,
    name: str,
    progress: Counter[str],
) -> Scores:
    """Score the first `problems` of `source.eval_prompts`, or all if there are fewer.

    Each gets a greedy completion and `samples` sampled ones (none at temperature 0), in groups of
    one for a grouped workflow. `name` begins the request ids. `progress` counts the completions
    `asked` for and `scored`. Raises ValueError if there are no problems.
    """
    assert source.eval_prompts is not None, "an evaluation needs eval_prompts"
    if (given := source.eval_prompts.num_prompts) is not None:
        problems = min(problems, given)
    if not problems:
        raise ValueError("there are no held-out problems: give some, or set eval.problems=0")
    own = sampling_of_evaluation(source.config)
    sampled = sampling_params(own, dependencies.tokenizer, evaluates=True)
    samples = samples if own.temperature else 0  # all would be the greedy one
    progress["asked"] += problems * (1 + samples)
    player = Player(source, dependencies, fleet, Counter(), what="held-out problem")
    limit = asyncio.Semaphore(source.config.rollout.max_concurrent)

    async def play(index: int, sample: int) -> Rollout:
        params = sampled if sample else replace(sampled, temperature=0.0)
        async with limit:
            rollout = await _play(player, index, sample, f"{name}-{index}-{sample}", params)
        progress["scored"] += 1
        return rollout

    rollouts = await asyncio.gather(
        *(play(i, sample) for i in range(problems) for sample in range(1 + samples))
    )
    rewards = [0.0 if r.failure else episode_reward(r.traces) for r in rollouts]
    versions = [t.versions[t.loss_mask] for r in rollouts for t in r.traces]
    return Scores(
        rewards=np.array(rewards, np.float64).reshape(problems, 1 + samples),
        versions=np.unique(np.concatenate([*versions, []])).astype(int).tolist(),
        failures=sum(bool(r.failure) for r in rollouts),
        timeouts=sum(r.timed_out for r in rollouts),
    )


async def _play(
    player: Player, index: int, sample: int, rid: str, params: SamplingParams
) -> Rollout:
    """Play a held-out problem, unless it is in quarantine."""
    quarantine = player.dependencies.quarantine
    try:
        prompt = await player.source.prompt("eval", index)
    except TaskFailed as error:
        return Rollout(failure=str(error), timed_out=error.reason == "timeout")
    if (key := f"held out: {prompt.prompt_id}") in quarantine.held:
        return Rollout(failure="it is in quarantine", timed_out=True)
    (rollout,) = await player.play(index, prompt, [rid], params, sample)
    if rollout.is_hazard:  # a judge that is gone for a while must not cost later evaluations
        quarantine.record(key, [rollout])
    return rollout


@dataclass(slots=True)
class Evaluator:
    """Runs evaluations while training continues. `running` has the versions that they are of."""

    config: TrainConfig
    dependencies: Dependencies
    fleet: Fleet
    batches: Batches
    store: StoreThread
    running: set[int] = field(default_factory=set)
    progress: Counter[str] = field(default_factory=Counter)
    # Set when the evaluation after the last step has ended. No resync is requested after it.
    last_ended: asyncio.Event = field(default_factory=asyncio.Event)
    # When an evaluation after the last step began to wait for a server, in seconds.
    _no_server_since: float | None = None

    async def evaluate(self, version: int) -> dict[str, Any]:
        """Return a line of evals.jsonl. Raises RuntimeError if no server is left after the end."""
        self.running.add(version)
        evaluation = asyncio.ensure_future(self._evaluate(version))
        try:
            while not (await asyncio.wait([evaluation], timeout=_CHECK_INTERVAL_S))[0]:
                await self._check_servers(version)
            record = evaluation.result()
            if failures := failed_answers(record):
                log.warning("evaluation at version %d: %s", version, failures)
            return record
        finally:
            evaluation.cancel()
            self.running.discard(version)
            if not self.running:
                self.progress.clear()
            if version == self.config.trainer.steps:
                await self.store.submit(Store.set_totals, {EVALUATED: 1})
                self.last_ended.set()

    async def _evaluate(self, version: int) -> dict[str, Any]:
        """Evaluate the held-out problems of each source, then `eval.sets`.

        `sets` of the line has the scores of each source, if there are several, or of each of
        `eval.sets`. The line itself is about the problems of all sources.
        """
        config, parts = self.config.eval, self.dependencies
        started = parts.clock()

        async def score(source: Source, name: str) -> Scores:
            rids, counts = f"eval{version}{name}", (config.problems, config.samples)
            return await score_problems(source, parts, self.fleet, *counts, rids, self.progress)

        by_source = {name: await score(source, name) for name, source in parts.sources.items()}
        sets = {name: scores for name, scores in by_source.items() if name}
        for name, prompts in parts.eval_sets.items():
            (source,) = parts.sources.values()
            sets[name] = await score(replace(source, eval_prompts=prompts), name)
        data = self.config.data
        return {
            "name": "all" if data.sources else data.source,
            "version": version,
            **pooled(list(by_source.values())).record(),
            **({"sets": {name: scores.record() for name, scores in sets.items()}} if sets else {}),
            "seconds": parts.clock() - started,
        }

    async def await_last(self, version: int, resyncs: int) -> None:
        """Wait for the end of the evaluation of the last version. Raises Resync as `pull`."""
        ended = asyncio.ensure_future(self.last_ended.wait())
        try:
            await self.batches.wait_or_resync(ended, resyncs)
        finally:
            ended.cancel()

    async def _check_servers(self, version: int) -> None:
        """After the last step, ask for the weights of servers that return.

        Raises RuntimeError if there was no server for as long as one takes to come back.
        """
        steps, fleet = self.config.trainer.steps, self.fleet
        if self.batches.step < steps:
            return
        now = asyncio.get_running_loop().time()
        waits = fleet.no_ready_server and not fleet.router.stale
        self._no_server_since = (self._no_server_since or now) if waits else None
        failure = fleet.gate.last_failure
        none_returns = failure and not self.config.restart.max
        start_s = self.config.server.start_timeout_s + LONGEST_BACK_OFF_S
        patience_s = 0.0 if none_returns else start_s
        if self._no_server_since is not None and now - self._no_server_since >= patience_s:
            model = Path(self.config.run_dir) / CHECKPOINTS_DIR / HF_DIR
            raise RuntimeError(
                f"the evaluation at version {version} is lost: no server is left that has the last "
                f"weights{f' ({failure})' if failure else ''}, and none came back. Training is "
                "complete and its weights are saved: to evaluate them, "
                f"areal-lite eval model={model}"
            )
        if version == steps:
            await self.batches.request_resync()

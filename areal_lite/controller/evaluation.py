"""Evaluation on held-out problems: greedy accuracy, sampled accuracy and pass@k, with intervals.

An evaluation shares the servers with rollouts, and a push in its middle changes the weights. After
the last step no push follows. The trainer then waits for the evaluation and pushes its weights
again whenever servers come back (`Resync`). Without any server, the evaluation fails.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import comb, sqrt
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np

from areal_lite.config import TrainConfig
from areal_lite.controller.batches import Batches, Handover, record_handover
from areal_lite.controller.protocol import EvaluationEnded, Resync
from areal_lite.controller.sources import Dependencies, Source
from areal_lite.data.prompts import Prompt, PromptSet
from areal_lite.rewards.pool import RewardError
from areal_lite.rollout.episode import Episode, Workflow, WorkflowFailed, WorkflowRun, sampled_turns
from areal_lite.run_dir.paths import CHECKPOINTS_DIR, HF_DIR
from areal_lite.run_dir.store import StoreThread
from areal_lite.servers.completion import sampling_params
from areal_lite.servers.fleet import Fleet
from areal_lite.system import clock as back_off
from areal_lite.trajectory import Trajectory, episode_reward

Interval = tuple[float, float]

_Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution


class EvalScores(TypedDict):
    """The scores of one held-out set in evals.jsonl.

    Intervals are those of `interval`. `greedy_interval` is None when a reward is outside [0, 1].
    """

    greedy: float
    greedy_interval: Interval | None
    sampled: float | None
    pass_at_k: dict[str, float]
    pass_at_k_intervals: dict[str, Interval]
    problems: int
    samples: int
    versions: list[int]
    failures: int


@dataclass(slots=True)
class Scores:
    """The scores of one held-out set.

    Args:
        rewards: float64 [problems, 1 + samples], the greedy completion first.
        versions: the versions that sampled at least one token.
        failures: number of completions without a reward; they count as 0.
    """

    rewards: np.ndarray
    versions: list[int]
    failures: int

    @property
    def greedy(self) -> float:
        """Return the mean reward of the greedy completions."""
        return float(self.rewards[:, 0].mean())

    @property
    def sampled(self) -> float | None:
        """Return the mean reward of the samples; None without samples."""
        return float(self.rewards[:, 1:].mean()) if self.samples else None

    @property
    def samples(self) -> int:
        """Return the number of samples per problem."""
        return self.rewards.shape[1] - 1

    def pass_at_powers(self) -> dict[str, float]:
        """Return pass@k for each power of two up to the number of samples."""
        return {str(1 << i): self.pass_at(1 << i) for i in range(self.samples.bit_length())}

    def pass_at(self, k: int) -> float:
        """Return the mean of `pass_at_k` over problems; a sample is correct if its reward is > 0.

        k must not exceed the number of samples.
        """
        correct = np.count_nonzero(self.rewards[:, 1:] > 0, axis=1)
        return float(np.mean([pass_at_k(self.samples, int(c), k) for c in correct]))

    def record(self) -> EvalScores:
        """Return the scores as JSON values."""
        greedy, problems = self.rewards[:, 0], len(self.rewards)
        is_share = bool(((greedy >= 0) & (greedy <= 1)).all())
        pass_at = self.pass_at_powers()
        return {
            "greedy": self.greedy,
            "greedy_interval": interval(self.greedy, problems) if is_share else None,
            "sampled": self.sampled,
            "pass_at_k": pass_at,
            "pass_at_k_intervals": {k: interval(p, problems) for k, p in pass_at.items()},
            "problems": problems,
            "samples": self.samples,
            "versions": self.versions,
            "failures": self.failures,
        }


def pooled(parts: Sequence[Scores]) -> Scores:
    """Return the scores of all problems of several sets."""
    return Scores(
        rewards=np.concatenate([part.rewards for part in parts]),
        versions=sorted({version for part in parts for version in part.versions}),
        failures=sum(part.failures for part in parts),
    )


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate without bias that one of k samples is correct.

    1 - C(n - c, k) / C(n, k), with `correct` c of `samples` n (arXiv 2107.03374, eq. 1).
    """
    assert 0 <= correct <= samples and 1 <= k <= samples
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def interval(mean: float, problems: int) -> Interval:
    """Return the 95 % score interval of a mean over problems whose values are in [0, 1].

    It is Wilson's (1927), for a share. Other values in [0, 1] with the same mean vary less, so it
    is too wide for them rather than too narrow. It has a width at 0 and at 1, too.
    """
    shrink = 1 + _Z**2 / problems
    center = (mean + _Z**2 / (2 * problems)) / shrink
    half = _Z / shrink * sqrt(mean * (1 - mean) / problems + _Z**2 / (4 * problems**2))
    return max(0.0, center - half), min(1.0, center + half)


ALL_SOURCES = "all"
"""The `name` of an evaluation of several data sources."""


class EvalRecord(EvalScores):
    """One line of evals.jsonl.

    `version` is the trainer's version when it asked; `versions` are those that sampled tokens.
    `sets` holds the scores of each of `data.sources` or `eval.sets`, if there are any.
    """

    name: str
    version: int
    sets: NotRequired[dict[str, EvalScores]]
    seconds: float


async def evaluate(
    config: TrainConfig,
    dependencies: Dependencies,
    fleet: Fleet,
    workflows: Mapping[str, Workflow],
    version: int,
) -> EvalRecord:
    """Evaluate the held-out problems of each source, then `eval.sets`.

    Returns a line of evals.jsonl. With several sources, `sets` has each of them, and the line
    itself is about all of their problems.
    """
    started = dependencies.clock()

    async def score(source: Source, workflow: Workflow, name: str) -> Scores:
        return await score_problems(
            source,
            dependencies,
            fleet,
            workflow,
            config.eval.problems,
            config.eval.samples,
            f"eval{version}{name}",
        )

    sources = dependencies.sources
    by_source = {name: await score(sources[name], workflows[name], name) for name in sources}
    sets = {name: scores for name, scores in by_source.items() if name}
    for name, prompts in dependencies.eval_sets.items():
        (source,), (workflow,) = sources.values(), workflows.values()
        sets[name] = await score(replace(source, eval_prompts=prompts), workflow, name)
    title = ALL_SOURCES if config.data.sources else config.data.source
    overall = pooled(list(by_source.values())).record()
    record: EvalRecord = {"name": title, "version": version, **overall}  # pyright: ignore[reportAssignmentType]
    if sets:
        record["sets"] = {name: scores.record() for name, scores in sets.items()}
    record["seconds"] = dependencies.clock() - started
    return record


async def score_problems(
    source: Source,
    dependencies: Dependencies,
    fleet: Fleet,
    workflow: Workflow,
    problems: int,
    samples: int,
    name: str,
) -> Scores:
    """Score the first `problems` held-out problems, by the workflow that training uses.

    Args:
        source: its `eval_prompts` are the problems; the samples use its temperature.
        dependencies: tokenizer and clock are used.
        fleet: the servers.
        workflow: a grouped one gets groups of one.
        problems: number of problems, or all if there are fewer.
        samples: sampled completions per problem, in addition to the greedy one.
        name: the beginning of the request ids.

    Raises ValueError if there are no problems.
    """
    prompts = source.eval_prompts
    assert prompts is not None, "an evaluation needs eval_prompts"
    if prompts.num_prompts is not None:
        problems = min(problems, prompts.num_prompts)
    if not problems:
        raise ValueError(
            "there are no held-out problems to evaluate on: set eval.problems=0, "
            "or give a data set that has some"
        )
    scorer = _Scorer(source, dependencies, fleet, workflow, prompts, name)
    results = await asyncio.gather(
        *(scorer.score(i, sample) for i in range(problems) for sample in range(1 + samples))
    )
    rewards = np.array([result.reward or 0.0 for result in results], np.float64)
    return Scores(
        rewards=rewards.reshape(problems, 1 + samples),
        versions=sorted(set[int]().union(*(result.versions for result in results))),
        failures=sum(result.reward is None for result in results),
    )


@dataclass(frozen=True, slots=True)
class _Result:
    """The reward of one completion, None if it failed, and the versions that sampled it."""

    reward: float | None
    versions: frozenset[int]


class _Scorer:
    """Samples and scores single completions; sample 0 is greedy."""

    def __init__(
        self,
        source: Source,
        dependencies: Dependencies,
        fleet: Fleet,
        workflow: Workflow,
        prompts: PromptSet,
        name: str,
    ):
        self._tokenizer = dependencies.tokenizer
        self._rewards = source.rewards
        self._clock = dependencies.clock
        self._fleet = fleet
        self._workflow = workflow
        self._prompts = prompts
        self._name = name
        self._limit = asyncio.Semaphore(source.config.rollout.max_concurrent)
        self._params = sampling_params(source.config.rollout, self._tokenizer)

    async def score(self, index: int, sample: int) -> _Result:
        """Sample one completion of problem `index` and score it."""
        prompt = self._prompts[index]
        versions: frozenset[int] = frozenset()
        try:
            async with self._limit:
                traces = await self._play(prompt, index, sample)
            sampled = [trace.versions[trace.loss_mask] for trace in traces]
            versions = frozenset(np.concatenate(sampled).tolist())
            last = traces[-1]
            if last.reward is not None:
                return _Result(episode_reward(traces), versions)
            last_turn = last.tokens[sampled_turns(last)[-1]]
            text = self._tokenizer.decode(last_turn)
            return _Result(await self._rewards.score(text, prompt.answer), versions)
        except (WorkflowFailed, RewardError):
            return _Result(None, versions)

    async def _play(self, prompt: Prompt, index: int, sample: int) -> list[Trajectory]:
        params = self._params if sample else replace(self._params, temperature=0.0)
        session = await self._fleet.open_session(f"{self._name}-{index}-{sample}")
        episode = Episode(
            prompt=prompt,
            sample_index=sample,
            group_id=index,
            tokenizer=self._tokenizer,
            params=params,
            clock=self._clock,
            complete=partial(self._fleet.complete, session),
        )
        try:
            return await WorkflowRun(self._workflow, [episode]).traces(0)
        finally:
            self._fleet.close_session(session)


_CHECK_INTERVAL_S = 0.5


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
            return await self._run(version)
        finally:
            self.running.discard(version)
            if version == steps:
                await record_handover(self._store, evaluated=1)
                self._last_ended.set()

    async def _run(self, version: int) -> EvalRecord:
        """Evaluate, and check meanwhile that servers are left."""
        evaluation = asyncio.ensure_future(
            evaluate(self._config, self._dependencies, self._fleet, self._workflows, version)
        )
        try:
            while not evaluation.done():
                await asyncio.wait([evaluation], timeout=_CHECK_INTERVAL_S)
                if not evaluation.done():
                    await self._check_servers(version)
            return evaluation.result()
        finally:
            evaluation.cancel()

    async def _check_servers(self, version: int) -> None:
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
        none_returns = self._fleet.gate.last_failure and not self._config.restart.max
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

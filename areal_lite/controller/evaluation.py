"""Evaluation on held-out problems: greedy accuracy, sampled accuracy and pass@k.

It uses the rollout servers, while training rollouts go on.
"""

import asyncio
from dataclasses import dataclass, replace
from math import comb
from typing import NotRequired, TypedDict

import numpy as np

from areal_lite.config import RolloutConfig, TrainConfig
from areal_lite.controller.dependencies import Dependencies
from areal_lite.data.prompts import Prompt, PromptSet
from areal_lite.rewards.pool import RewardError
from areal_lite.rollout.episode import Episode, Workflow, WorkflowFailed, sampled_turns
from areal_lite.rollout.runner import run_workflow
from areal_lite.servers.completion import sampling_params
from areal_lite.servers.fleet import Fleet
from areal_lite.servers.session import RolloutSession
from areal_lite.trajectory import Trajectory


class EvalScores(TypedDict):
    """The scores of one held-out set in evals.jsonl."""

    greedy: float
    sampled: float | None
    pass_at_k: dict[str, float]
    problems: int
    samples: int
    versions: list[int]
    failures: int


class EvalRecord(EvalScores):
    """One line of evals.jsonl.

    `version` is the trainer's version when it asked; `versions` are those that sampled tokens.
    `sets` holds the scores of each of `eval.sets`, if there are any.
    """

    name: str
    version: int
    sets: NotRequired[dict[str, EvalScores]]
    seconds: float


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
        return {
            "greedy": self.greedy,
            "sampled": self.sampled,
            "pass_at_k": self.pass_at_powers(),
            "problems": len(self.rewards),
            "samples": self.samples,
            "versions": self.versions,
            "failures": self.failures,
        }


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate without bias that one of k samples is correct.

    1 - C(n - c, k) / C(n, k), with `correct` c of `samples` n (arXiv 2107.03374, eq. 1).
    """
    assert 0 <= correct <= samples and 1 <= k <= samples
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


async def evaluate(
    config: TrainConfig,
    dependencies: Dependencies,
    fleet: Fleet,
    workflow: Workflow,
    version: int,
) -> EvalRecord:
    """Evaluate the held-out problems, then each of `eval.sets`; return a line of evals.jsonl."""
    started = dependencies.clock()
    scores: dict[str, EvalScores] = {}
    for name, prompts in {"": dependencies.eval_prompts, **dependencies.eval_sets}.items():
        result = await score_problems(
            config.rollout,
            replace(dependencies, eval_prompts=prompts),
            fleet,
            workflow,
            config.eval.problems,
            config.eval.samples,
            f"eval{version}{name}",
        )
        scores[name] = result.record()
    record: EvalRecord = {"name": config.data.source, "version": version, **scores.pop("")}  # pyright: ignore[reportAssignmentType]
    if scores:
        record["sets"] = scores
    record["seconds"] = dependencies.clock() - started
    return record


async def score_problems(
    rollout: RolloutConfig,
    dependencies: Dependencies,
    fleet: Fleet,
    workflow: Workflow,
    problems: int,
    samples: int,
    name: str,
) -> Scores:
    """Score the first `problems` held-out problems, by the workflow that training uses.

    Args:
        rollout: sampling settings; the samples use its temperature.
        dependencies: `eval_prompts` are the problems.
        fleet: the servers.
        workflow: a grouped one gets groups of one.
        problems: number of problems, or all if there are fewer.
        samples: sampled completions per problem, in addition to the greedy one.
        name: the beginning of the request ids.

    Raises ValueError if there are no problems.
    """
    prompts = dependencies.eval_prompts
    assert prompts is not None, "an evaluation needs eval_prompts"
    if prompts.num_prompts is not None:
        problems = min(problems, prompts.num_prompts)
    if not problems:
        raise ValueError(
            "there are no held-out problems to evaluate on: set eval.problems=0, "
            "or give a data set that has some"
        )
    evaluator = _Evaluator(rollout, dependencies, fleet, workflow, prompts, name)
    results = await asyncio.gather(
        *(evaluator.score(i, sample) for i in range(problems) for sample in range(1 + samples))
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


class _Evaluator:
    """Samples and scores single completions; sample 0 is greedy."""

    def __init__(
        self,
        rollout: RolloutConfig,
        dependencies: Dependencies,
        fleet: Fleet,
        workflow: Workflow,
        prompts: PromptSet,
        name: str,
    ):
        self._tokenizer = dependencies.tokenizer
        self._rewards = dependencies.rewards
        self._clock = dependencies.clock
        self._fleet = fleet
        self._workflow = workflow
        self._prompts = prompts
        self._name = name
        self._limit = asyncio.Semaphore(rollout.max_concurrent)
        self._params = sampling_params(rollout, self._tokenizer)

    async def score(self, index: int, sample: int) -> _Result:
        """Sample one completion of problem `index` and score it."""
        prompt = self._prompts[index]
        versions: frozenset[int] = frozenset()
        try:
            async with self._limit:
                trajectory = await self._play(prompt, index, sample)
            versions = frozenset(trajectory.versions[trajectory.loss_mask].tolist())
            if trajectory.reward is not None:
                return _Result(trajectory.reward, versions)
            last_turn = trajectory.tokens[sampled_turns(trajectory)[-1]]
            text = self._tokenizer.decode(last_turn)
            return _Result(await self._rewards.score(text, prompt.answer), versions)
        except (WorkflowFailed, RewardError):
            return _Result(None, versions)

    async def _play(self, prompt: Prompt, index: int, sample: int) -> Trajectory:
        params = self._params if sample else replace(self._params, temperature=0.0)
        rid = f"{self._name}-{index}-{sample}"
        server = await self._fleet.reserve(1)
        session = RolloutSession(self._fleet, params, self._tokenizer, rid, server)
        episode = Episode(
            prompt=prompt,
            sample_index=sample,
            group_id=index,
            tokenizer=self._tokenizer,
            params=params,
            clock=self._clock,
            complete=session.complete,
        )
        (running,) = run_workflow(self._workflow, [episode])
        try:
            return await running
        finally:
            session.release()

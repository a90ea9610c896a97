"""Evaluation on held-out problems: greedy accuracy, sampled accuracy and pass@k.

It uses the rollout servers, at the same time as training rollouts.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NotRequired

import numpy as np

from areal_lite.config import TrainConfig
from areal_lite.controller.dependencies import Dependencies
from areal_lite.controller.scores import EvalScores, Scores, pooled
from areal_lite.controller.sources import Source
from areal_lite.data.prompts import Prompt, PromptSet
from areal_lite.rewards.pool import RewardError
from areal_lite.rollout.episode import Episode, Workflow, WorkflowFailed, sampled_turns
from areal_lite.rollout.runner import WorkflowRun
from areal_lite.servers.completion import sampling_params
from areal_lite.servers.fleet import Fleet
from areal_lite.trajectory import Trajectory, episode_reward

ALL_SOURCES = "all"
"""The `name` of an evaluation of several data sources."""


class EvalRecord(EvalScores):
    """One line of evals.jsonl.

    `version` is the trainer's version when it asked; `versions` are those that sampled tokens.
    `servers` counts the servers that kept their version until the end.
    `sets` holds the scores of each of `data.sources` or `eval.sets`, if there are any.
    """

    name: str
    version: int
    servers: NotRequired[int]
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

"""Held-out problems on the rollout servers, while training rollouts go on: greedy accuracy, that of samples, and pass@k."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from math import comb
from typing import Any

import numpy as np

from areal_lite.config import RolloutConfig, TrainConfig
from areal_lite.controller.dependencies import Dependencies
from areal_lite.rewards.pool import RewardError
from areal_lite.rollout.episode import Episode, Workflow, WorkflowFailed, sampled_turns
from areal_lite.rollout.runner import run_workflow
from areal_lite.servers.completion import SamplingParams
from areal_lite.servers.fleet import Fleet
from areal_lite.servers.session import RolloutSession


@dataclass(slots=True)
class Scores:
    """rewards float64 [problems, 1 + samples]: greedy first. `versions`: all that produced a token. `failures` had no reward: 0."""

    rewards: np.ndarray
    versions: list[int]
    failures: int

    @property
    def greedy(self) -> float:
        return float(self.rewards[:, 0].mean())

    @property
    def sampled(self) -> float | None:
        """Mean reward of the samples; None without any."""
        return float(self.rewards[:, 1:].mean()) if self.rewards.shape[1] > 1 else None

    @property
    def samples(self) -> int:
        return self.rewards.shape[1] - 1

    def pass_at_powers(self) -> dict[str, float]:
        """`pass_at` of the powers of two up to the number of samples."""
        return {str(1 << i): self.pass_at(1 << i) for i in range(self.samples.bit_length())}

    def pass_at(self, k: int) -> float:
        """Mean over problems of `pass_at_k`; a sample is correct if its reward is positive. k <= samples."""
        correct = np.count_nonzero(self.rewards[:, 1:] > 0, axis=1)
        return float(np.mean([pass_at_k(self.samples, int(c), k) for c in correct]))


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate, from `correct` of `samples`, that one of k is correct: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374, eq. 1)."""
    assert 0 <= correct <= samples and 1 <= k <= samples
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


async def score_problems(
    rollout: RolloutConfig,
    parts: Dependencies,
    fleet: Fleet,
    workflow: Workflow,
    problems: int,
    samples: int,
    name: str,
) -> Scores:
    """One greedy and `samples` sampled trajectories (at rollout.temperature) of each of the first `problems` held-out problems.

    By the same workflow as in training; a grouped one gets groups of one.
    """
    sampled = SamplingParams(rollout.max_new_tokens, rollout.temperature, parts.tokenizer.eos_ids)
    runs = [replace(sampled, temperature=0.0)] + [sampled] * samples
    limit = asyncio.Semaphore(rollout.max_concurrent)
    versions: set[int] = set()
    failures = 0

    async def one(index: int, sample: int, params: SamplingParams) -> float:
        nonlocal failures
        prompt = parts.eval_prompts[index]
        try:
            async with limit:
                session = RolloutSession(
                    fleet,
                    params,
                    parts.tokenizer,
                    f"{name}-{index}-{sample}",
                    await fleet.reserve(1),
                )
                (playing,) = run_workflow(
                    workflow,
                    [
                        Episode(
                            prompt=prompt,
                            sample_index=sample,
                            group_id=index,
                            tokenizer=parts.tokenizer,
                            params=params,
                            clock=parts.clock,
                            complete=session.complete,
                        )
                    ],
                )
                try:
                    trajectory = await playing
                finally:
                    session.release()
            versions.update(trajectory.versions[trajectory.loss_mask].tolist())
            if trajectory.reward is not None:
                return trajectory.reward
            return await parts.rewards.score(
                parts.tokenizer.decode(trajectory.tokens[sampled_turns(trajectory)[-1]]),
                prompt.answer,
            )
        except (WorkflowFailed, RewardError):
            failures += 1
            return 0.0

    available = parts.eval_prompts.num_prompts
    problems = problems if available is None else min(problems, available)
    if not problems:
        raise ValueError(
            "there are no held-out problems to evaluate on: set eval.problems=0, or give a data set that has some"
        )
    rewards = await asyncio.gather(
        *(one(i, s, params) for i in range(problems) for s, params in enumerate(runs))
    )
    return Scores(
        np.array(rewards, np.float64).reshape(problems, len(runs)), sorted(versions), failures
    )


async def evaluate(
    config: TrainConfig, parts: Dependencies, fleet: Fleet, workflow: Workflow, version: int
) -> dict[str, Any]:
    """One line of evals.jsonl: what `_facts` says of the held-out problems, and under `sets` of each of `eval.sets`, one after the other.

    `version` is the trainer's when it was asked for; `versions` are those that really answered.
    """
    started = parts.clock()
    found = {}
    for name, prompts in {"": parts.eval_prompts, **parts.eval_sets}.items():
        asked, rid = replace(parts, eval_prompts=prompts), f"eval{version}{name}"
        scores = await score_problems(
            config.rollout, asked, fleet, workflow, config.eval.problems, config.eval.samples, rid
        )
        found[name] = _facts(scores)
    line = {"name": config.data.source, "version": version, **found.pop("")}
    return line | ({"sets": found} if found else {}) | {"seconds": parts.clock() - started}


def _facts(scores: Scores) -> dict[str, Any]:
    """`greedy`, `sampled` (None without samples), `pass_at_k`, `problems`, `samples`, `versions`, `failures`."""
    return {
        "greedy": scores.greedy,
        "sampled": scores.sampled,
        "pass_at_k": scores.pass_at_powers(),
        "problems": len(scores.rewards),
        "samples": scores.samples,
        "versions": scores.versions,
        "failures": scores.failures,
    }

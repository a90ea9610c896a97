"""Held-out problems on the rollout servers, while training rollouts go on: greedy accuracy, that of samples, and pass@k."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from math import comb
from typing import Any

import numpy as np

from areal_lite.config import RolloutConfig, TrainConfig
from areal_lite.rewards.pool import RewardError
from areal_lite.rollout.dispatch import Parts
from areal_lite.rollout.fleet import Fleet
from areal_lite.rollout.generate import SamplingParams


@dataclass(slots=True)
class Scores:
    """rewards float64 [problems, 1 + samples]: greedy first. `versions`: all that produced a token. `failures`: had no reward, count as 0."""

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

    def pass_at(self, k: int) -> float:
        """Mean over problems of `pass_at_k`; a sample is correct if its reward is positive. k <= samples."""
        correct = np.count_nonzero(self.rewards[:, 1:] > 0, axis=1)
        return float(np.mean([pass_at_k(self.rewards.shape[1] - 1, int(c), k) for c in correct]))


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate, from `correct` of `samples`, that one of k is correct: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374, eq. 1)."""
    assert 0 <= correct <= samples and 1 <= k <= samples
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


async def score_problems(rollout: RolloutConfig, parts: Parts, fleet: Fleet, problems: int, samples: int, name: str) -> Scores:
    """One greedy and `samples` sampled completions (at rollout.temperature) of each of the first `problems` held-out problems."""
    sampled = SamplingParams(rollout.max_new_tokens, rollout.temperature, parts.tokenizer.eos_ids)
    runs = [replace(sampled, temperature=0.0)] + [sampled] * samples
    limit = asyncio.Semaphore(rollout.max_concurrent)
    versions: set[int] = set()
    failures = 0

    async def one(index: int, sample: int, params: SamplingParams) -> float:
        nonlocal failures
        prompt = parts.eval_prompts[index]
        async with limit:
            server = await fleet.reserve(1)
            completion = await fleet.complete(np.asarray(prompt.tokens, np.int32), params, f"{name}-{index}-{sample}", server)
        versions.update(completion.versions.tolist())
        try:
            return await parts.rewards.score(parts.tokenizer.decode(completion.tokens), prompt.answer)
        except RewardError:
            failures += 1
            return 0.0

    available = parts.eval_prompts.num_prompts
    problems = problems if available is None else min(problems, available)
    if not problems:
        raise ValueError("there are no held-out problems to evaluate on: set eval.problems=0, or give a data set that has some")
    rewards = await asyncio.gather(*(one(i, s, params) for i in range(problems) for s, params in enumerate(runs)))
    return Scores(np.array(rewards, np.float64).reshape(problems, len(runs)), sorted(versions), failures)


async def evaluate(config: TrainConfig, parts: Parts, fleet: Fleet, version: int) -> dict[str, Any]:
    """One line of evals.jsonl: `greedy`, `sampled` (None without samples), `problems`, `samples`, `versions`, `failures`, `seconds`."""
    started = parts.clock()
    scores = await score_problems(config.rollout, parts, fleet, config.eval.problems, config.eval.samples, f"eval{version}")
    return {
        "name": config.data.source,
        "version": version,
        "greedy": scores.greedy,
        "sampled": scores.sampled,
        "problems": len(scores.rewards),
        "samples": config.eval.samples,
        "versions": scores.versions,
        "failures": scores.failures,
        "seconds": parts.clock() - started,
    }

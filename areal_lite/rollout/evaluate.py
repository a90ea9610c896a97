"""Held-out problems on the rollout servers, while training rollouts go on: greedy accuracy and that of samples."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np

from areal_lite.config import TrainConfig
from areal_lite.rewards.pool import RewardError
from areal_lite.rollout.dispatch import Parts
from areal_lite.rollout.fleet import Fleet
from areal_lite.rollout.generate import SamplingParams


async def evaluate(config: TrainConfig, parts: Parts, fleet: Fleet, version: int) -> dict[str, Any]:
    """Mean reward over the first `eval.problems` held-out problems: `greedy`, `sampled` (None without samples), `problems`, `samples`,
    `versions` (all that produced a token: several if weights were pushed meanwhile), `failures` (no reward: counts as 0), `seconds`."""
    sampled = SamplingParams(config.rollout.max_new_tokens, config.rollout.temperature, parts.tokenizer.eos_ids)
    greedy = replace(sampled, temperature=0.0)
    limit = asyncio.Semaphore(config.rollout.max_concurrent)
    versions: set[int] = set()
    failures = 0

    async def one(index: int, sample: int, params: SamplingParams) -> float:
        nonlocal failures
        prompt = parts.eval_prompts[index]
        async with limit:
            server = await fleet.reserve(1)
            completion = await fleet.complete(np.asarray(prompt.tokens, np.int32), params, f"eval{version}-{index}-{sample}", server)
        versions.update(completion.versions.tolist())
        try:
            return await parts.rewards.score(parts.tokenizer.decode(completion.tokens), prompt.answer)
        except RewardError:
            failures += 1
            return 0.0

    started = parts.clock()
    available = parts.eval_prompts.num_prompts
    problems = config.eval.problems if available is None else min(config.eval.problems, available)
    runs = [greedy] + [sampled] * config.eval.samples
    rewards = await asyncio.gather(*(one(i, s, params) for i in range(problems) for s, params in enumerate(runs)))
    table = np.array(rewards, np.float64).reshape(problems, len(runs))
    return {
        "name": config.data.source,
        "version": version,
        "greedy": float(table[:, 0].mean()) if problems else None,
        "sampled": float(table[:, 1:].mean()) if problems and config.eval.samples else None,
        "problems": problems,
        "samples": config.eval.samples,
        "versions": sorted(versions),
        "failures": failures,
        "seconds": parts.clock() - started,
    }

"""A training step on two ranks, real processes over gloo, equals one on one rank."""

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_lite.config import AlgoConfig, TrainConfig, TrainerConfig
from areal_lite.config.algo import (
    AdvantageConfig,
    CorrectionConfig,
    CriticConfig,
    KLConfig,
    ShapingConfig,
)
from areal_lite.system.network import free_port
from areal_lite.train_batch import TrainBatch
from tests.ranks.processes import call_on_ranks
from tests.ranks.test_step import batch, model  # noqa: F401

OBJECTIVES = {
    "sequences": AlgoConfig(
        loss="gspo",
        eps_low=0.3,
        eps_high=0.3,
        reduction="sequence",
        correction=CorrectionConfig(level="geometric"),
    ),
    "batch statistics": AlgoConfig(
        reduction="constant",
        advantage=AdvantageConfig(mean="batch", std="batch", whiten=True),
        entropy_coef=0.01,
    ),
    "rejection": AlgoConfig(loss="examples.recipes.stale:loss"),
    "effective samples": AlgoConfig(loss="examples.recipes.vcpo:loss", reduction="sequence"),
    "staleness alone": AlgoConfig(loss="examples.recipes.mismatch:loss"),
    "whole groups": AlgoConfig(loss="examples.recipes.gepo:loss"),
    "returns": AlgoConfig(
        kl=KLConfig(0.1, "k1", "reward"), advantage=AdvantageConfig("reinforce_pp")
    ),
    "critic": AlgoConfig(
        advantage=AdvantageConfig("gae", lam=0.95, whiten=True), critic=CriticConfig(lr=1e-2)
    ),
    "tb": AlgoConfig(loss="tb", kl=KLConfig(0.5)),
    "turns": AlgoConfig(
        advantage=AdvantageConfig(std="off", credit="turns"),
        shaping=ShapingConfig(mask_truncated=True),
    ),
    "turns of a critic": AlgoConfig(
        advantage=AdvantageConfig("gae", credit="turns", gamma=0.9, lam=0.9),
        critic=CriticConfig(lr=1e-2),
    ),
}
WHOLE = [0, 2, 1, 3]
# The groups of each rank. Minibatch m of the step is the m-th of all ranks together.
LAYOUTS = {
    "one": ({}, [WHOLE]),
    "data": ({"data_parallel": 2}, [[0, 1], [2, 3]]),
    "stages": ({"pipeline_parallel": 2}, [WHOLE, WHOLE]),
}


def conversations() -> TrainBatch:
    """Make a batch of two turns a sequence that earned something, two traces, and cut answers."""
    data, rng = batch(), np.random.default_rng(1)
    for start, end in pairwise(data.cu_seqlens):
        sampled = start + np.flatnonzero(data.versions[start:end] >= 0)
        if len(sampled) > 2:
            middle = sampled[len(sampled) // 2]
            data.versions[middle], data.loss_mask[middle] = -1, False
            data.behavior_logprobs[middle] = 0
    earned = rng.normal(0, 0.1, len(data.tokens)) * data.loss_mask
    data.turn_rewards = earned.astype(np.float32)
    data.rewards[:] = 2 * np.add.reduceat(earned, data.cu_seqlens[:-1])
    data.truncated[::5] = True
    data.sample_indices[:], data.trace_indices[:] = [0, 1, 1] * 4, [0, 0, 1] * 4
    return data


def worker(rank: int, layout: str, folder: str, model_path: str, port: int) -> None:
    from areal_lite.trainer.objective import build_objective
    from areal_lite.trainer.step import build_models, policy_step

    sizes, groups = LAYOUTS[layout]
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(groups)),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    results = {}
    for name, algo in OBJECTIVES.items():
        data = conversations() if name.startswith("turns") else batch()
        share = data.select(
            [
                i
                for group in groups[rank]
                for i in range(data.num_sequences)
                if data.group_ids[i] == group
            ]
        )
        trainer = TrainerConfig(
            steps=10,
            lr=1e-3,
            adam_eps=1e-5,
            minibatches=2,
            tokens_per_microbatch=40,
            **sizes,
        )
        config = TrainConfig(
            model=model_path, algo=replace(algo, reference=model_path), trainer=trainer
        )
        objective = build_objective(config)
        models = build_models(config, objective)
        metrics = [
            policy_step(models, objective, share, config, version).metrics for version in (3, 4)
        ]
        weights = {
            key: tensor.clone()
            for bucket in models.policy.weights.buckets(2**30)
            for key, tensor in bucket
        }
        results[name] = (metrics, weights if rank == 0 else None)
    torch.save(results, f"{folder}/{layout}-{rank}.pt")


@pytest.fixture(scope="module")
def results(model: Path, tmp_path_factory) -> dict[str, list[dict]]:  # noqa: F811
    folder = tmp_path_factory.mktemp("ranks")
    found = {}
    for layout, (_, groups) in LAYOUTS.items():
        ranks = len(groups)
        call_on_ranks(worker, (layout, str(folder), str(model), free_port()), ranks)
        found[layout] = [torch.load(folder / f"{layout}-{rank}.pt") for rank in range(ranks)]
    return found


@pytest.mark.parametrize("layout", ["data", "stages"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_ranks_are_one(results, name, layout):
    (one, weights), (two, of_two), (other, _) = (
        results["one"][0][name],
        results[layout][0][name],
        results[layout][1][name],
    )
    assert two == other, "every rank reports the whole step"
    for expected, got in zip(one, two):
        assert expected.keys() == got.keys()
        # A rank without a sequence to run runs its first one.
        for key in expected.keys() - {"computed_share"}:
            assert got[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), key
    for key, tensor in weights.items():
        torch.testing.assert_close(of_two[key], tensor, rtol=0, atol=2e-5)

"""One rank of the layout tests: `layout_worker.py JOB`, with torchrun's environment.

JOB is a JSON file of cases, which run one after another. A case is a parallel layout and the models
to run in it. Rank 0 writes the results of every rank to results.pt in the job's folder `out`.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from areal_lite.config import TrainerConfig
from areal_lite.megatron.packing import Microbatch, make_microbatches
from areal_lite.megatron.parallel import init_distributed, shutdown
from areal_lite.megatron.policy import Critic, ParallelModel, Policy
from areal_lite.megatron.reference import Reference
from areal_lite.train_batch import TrainBatch
from tests.ranks.engine_worker import SETTINGS, TEMPERATURE, load, random_batch, save

UPDATES, CRITIC_UPDATES, RESUMED_UPDATES = 6, 3, 2
CRITIC = {"lr": 3e-3, "clip_grad": 2.0}


def sequence_sums(values: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Sum values [t] over whole sequences: [n]."""
    sequence = (position_ids == 0).cumsum(0) - 1
    return torch.zeros(int(sequence[-1]) + 1).index_add(0, sequence, values)


def shard(model: ParallelModel, step: int) -> tuple[int, TrainBatch, list[Microbatch]]:
    """Return the tokens of the whole batch of `step`, this rank's sequences, and its microbatches.

    Budgets differ, so ranks have different numbers of microbatches.
    """
    whole, rank = random_batch(12, 98, seed=step), model.dp_group.rank()
    batch = whole.select(range(rank, whole.num_sequences, model.dp_group.size()))
    return len(whole.tokens), batch, make_microbatches(batch, 72 * (1 + rank))


class Case:
    """One layout in one model."""

    def __init__(self, config: TrainerConfig, path: str, out: Path):
        self.config, self.path, self.out = config, path, out
        self.batch = random_batch(16, 98, seed=100)
        self.microbatches = make_microbatches(self.batch, 128)

    def policy(self) -> dict:
        engine = Policy(self.config, self.path, seed=1)
        reference = Reference(self.config, self.path)
        results = {"logprobs": engine.logprobs(self.microbatches, TEMPERATURE)}
        results["history"] = [self.update(engine, step) for step in range(UPDATES)]
        results["after"] = engine.logprobs(self.microbatches, TEMPERATURE)
        results["reference"] = reference.logprobs(self.batch, TEMPERATURE)
        engine.export_hf(self.out / "export")
        save(engine, self.out / "checkpoint")
        return results

    def update(self, engine: Policy, step: int) -> dict[str, float]:
        """Update on a loss of tokens, entropies and whole sequences."""
        total, batch, microbatches = shard(engine, step)
        weights = torch.from_numpy(batch.rewards[batch.sequence_ids])

        def loss(logprobs, entropy, microbatch):
            tokens = (weights[microbatch.token_index] * logprobs).sum() + 0.1 * entropy.sum()
            sequences = sequence_sums(logprobs, microbatch.position_ids).square().sum()
            longest = torch.tensor(float(microbatch.cu_seqlens.diff().max()))
            return (0.001 * sequences - tokens) / total, {
                "tokens": torch.tensor(float(len(logprobs))),
                "length_max": longest,
            }

        return engine.update(microbatches, loss, TEMPERATURE)

    def critic(self) -> dict:
        critic = Critic(replace(self.config, **CRITIC), self.path, seed=1)
        results = {"values_before": critic.values(self.microbatches)}
        history = []
        for step in range(CRITIC_UPDATES):
            total, batch, microbatches = shard(critic, step)
            targets = torch.from_numpy(batch.rewards[batch.sequence_ids])

            def loss(values, microbatch, targets=targets, total=total):
                return (values - targets[microbatch.token_index]).square().sum() / total, {}

            history.append(critic.update(microbatches, loss))
        save(critic, self.out / "critic", {"of": "values"})
        fresh = Critic(replace(self.config, **CRITIC), self.path, seed=1)
        extra = load(fresh, self.out / "critic")
        return results | {
            "critic_history": history,
            "values": critic.values(self.microbatches),
            "loaded": fresh.values(self.microbatches),
            "extra": extra,
        }

    def resumed(self, checkpoint: str) -> dict:
        """Load another layout's checkpoint; return log-probs and metrics of the next updates."""
        engine = Policy(self.config, self.path, seed=1)
        load(engine, Path(checkpoint))
        resumed = engine.logprobs(self.microbatches, TEMPERATURE)
        return {
            "resumed": resumed,
            "resumed_history": [
                self.update(engine, UPDATES + step) for step in range(RESUMED_UPDATES)
            ],
        }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    collected = {}
    for case in job["cases"]:
        os.environ["MASTER_PORT"] = str(case["port"])
        config = TrainerConfig(**SETTINGS | {"steps": UPDATES + RESUMED_UPDATES} | case["layout"])
        init_distributed(config, seed=1)
        runs = Case(config, case["model"], Path(job["out"]) / case["name"])
        results = runs.policy()
        if case["critic"]:
            results |= runs.critic()
        if case["resume"]:
            results |= runs.resumed(case["resume"])
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, results)
        collected[case["name"]] = everywhere
        if dist.get_rank() == 0:
            torch.save(collected, Path(job["out"]) / "results.pt")
        shutdown()


if __name__ == "__main__":
    main()

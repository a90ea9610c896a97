"""One rank of the engine tests: `engine_worker.py JOB`, with torchrun's environment.

JOB is a JSON file (see test_engine.py). Rank 0 writes the engine's results to the job's folder
`out`; the test computes what they are compared with.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from areal_lite.config import TrainerConfig
from areal_lite.megatron.checkpoint import PendingCheckpoint, load_checkpoint
from areal_lite.megatron.packing import make_microbatches
from areal_lite.megatron.parallel import init_distributed, shutdown
from areal_lite.megatron.policy import Policy, TrainableModel
from areal_lite.train_batch import TrainBatch

TEMPERATURE = 0.9
# The large epsilon keeps Adam from blowing up rounding errors of gradients that are almost zero.
SETTINGS = dict(
    steps=8,
    lr=1e-3,
    lr_schedule="cosine",
    lr_warmup_steps=2,
    min_lr=1e-4,
    weight_decay=0.1,
    clip_grad=0.5,
    adam_beta2=0.98,
    adam_eps=1e-5,
)


def random_batch(num_sequences: int, vocab: int, seed: int) -> TrainBatch:
    """Draw sequences of which each begins like an earlier one, often."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 40, num_sequences)
    total = int(lengths.sum())
    sequences = [rng.integers(0, vocab, length) for length in lengths]
    for i in range(1, num_sequences):
        earlier = sequences[rng.integers(i)]
        shared = rng.integers(min(lengths[i], len(earlier)) + 1)
        sequences[i][:shared] = earlier[:shared]
    return TrainBatch(
        tokens=np.concatenate(sequences).astype(np.int32),
        loss_mask=np.ones(total, bool),
        behavior_logprobs=np.zeros(total, np.float32),
        versions=np.zeros(total, np.int32),
        rewards=rng.normal(size=num_sequences).astype(np.float32),
        group_ids=np.arange(num_sequences, dtype=np.int64),
        sample_indices=np.arange(num_sequences, dtype=np.int32),
        trace_indices=np.zeros(num_sequences, np.int32),
        truncated=np.zeros(num_sequences, bool),
        kv_versions=np.zeros(num_sequences, np.int32),
        source_keys=np.zeros(num_sequences, np.int64),
        cu_seqlens=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
    )


def save(model: TrainableModel, folder: Path, extra: dict | None = None) -> None:
    """Write a checkpoint of one model."""
    PendingCheckpoint(folder, {"policy": model}, extra or {}).publish()


def load(model: TrainableModel, folder: Path) -> dict:
    """Restore what `save` wrote; return its `extra`."""
    return load_checkpoint(folder, {"policy": model})


class Run:
    """The job's engine runs on this rank."""

    def __init__(self, job: dict):
        self.job = job
        self.out = Path(job["out"])
        self.config = dict(tensor_parallel=job["tp"], data_parallel=job["dp"], **SETTINGS)
        self.results: dict = {}

    def engine(self, model: str, **overrides) -> Policy:
        return Policy(TrainerConfig(**(self.config | overrides)), self.job["models"][model], seed=1)

    def update(
        self, engine: Policy, step: int, budget: int, poison: bool = False
    ) -> dict[str, float]:
        """Update on the batch of `step`, distributed to the data-parallel ranks in turns."""
        whole = random_batch(12, 98, seed=step)
        rank, size = engine.dp_group.rank(), engine.dp_group.size()
        batch = whole.select(range(rank, whole.num_sequences, size))
        weights = torch.from_numpy(batch.rewards[batch.sequence_ids])
        total = len(whole.tokens)

        def loss(logprobs, entropy, microbatch):
            share = (
                -((weights[microbatch.token_index] * logprobs).sum() + 0.1 * entropy.sum()) / total
            )
            if poison and rank == size - 1:
                share = share * float("nan")
            return share, {"tokens": torch.tensor(float(len(logprobs)))}

        return engine.update(make_microbatches(batch, budget), loss, TEMPERATURE)

    def logprobs_and_export(self) -> None:
        batch = random_batch(16, 98, seed=100)
        for model in self.job["models"]:
            engine = self.engine(model)
            self.results[f"logprobs/{model}"] = engine.logprobs(
                make_microbatches(batch, 64), TEMPERATURE
            )
            engine.export_hf(self.out / f"export_{model}")

    def updates(self, model: str, budget: int, name: str) -> Policy:
        engine = self.engine(model)
        self.results[f"metrics/{name}"] = [self.update(engine, step, budget) for step in range(3)]
        engine.export_hf(self.out / name)
        return engine

    def continued(self, engine: Policy, name: str) -> None:
        self.results[f"metrics/{name}"] = [self.update(engine, step, 64) for step in (3, 4)]
        engine.export_hf(self.out / name)

    def checkpoint(self, engine: Policy) -> None:
        save(engine, self.out / "checkpoint", {"step": 3, "note": "three updates"})
        self.continued(engine, "uninterrupted")
        fresh = self.engine("qwen3_tied")
        self.results["extra"] = load(fresh, self.out / "checkpoint")
        self.continued(fresh, "resumed")

    def load_from(self, folder: str) -> None:
        engine = self.engine("qwen3_tied")
        load(engine, Path(folder))
        self.continued(engine, "resharded")

    def poisoned(self) -> None:
        engine = self.engine("qwen3_tied")
        first = self.update(engine, 0, 64)
        weights = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
        bad = self.update(engine, 1, 64, poison=True)
        same = all(torch.equal(weights[name], p) for name, p in engine.model.named_parameters())
        self.results["poison"] = {
            "first": first,
            "bad": bad,
            "same": same,
            "next": self.update(engine, 2, 64),
        }

    def bfloat16(self) -> None:
        engine = self.engine("qwen3_tied", dtype="bfloat16")
        self.results["bfloat16"] = [self.update(engine, 0, 64) for _ in range(4)]
        master = engine.optimizer.get_parameters()
        self.results["bfloat16/dtypes"] = [
            str(self._one(master).dtype),
            str(self._one(engine.model.parameters()).dtype),
        ]

    @staticmethod
    def _one(tensors) -> torch.Tensor:
        return next(iter(tensors))


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    run = Run(job)
    init_distributed(TrainerConfig(**run.config), seed=1)
    run.logprobs_and_export()
    run.updates("qwen2_untied", 64, "updated_qwen2_untied")
    engine = run.updates("qwen3_tied", 64, "updated_qwen3_tied")
    run.checkpoint(engine)
    run.poisoned()
    if job["load_from"]:
        run.load_from(job["load_from"])
    if job["tp"] * job["dp"] == 1:
        run.updates("qwen3_tied", 10**6, "updated_one_microbatch")
        run.bfloat16()
    if dist.get_rank() == 0:
        torch.save(run.results, run.out / "results.pt")
    shutdown()


if __name__ == "__main__":
    main()

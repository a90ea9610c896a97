"""One rank of the architecture tests: `architectures_worker.py JOB`, with torchrun's environment.

JOB is a JSON file (see test_architectures.py).
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from areal_lite.config import TrainerConfig
from areal_lite.megatron.packing import make_microbatches
from areal_lite.megatron.parallel import init_distributed, shutdown
from areal_lite.megatron.policy import Policy
from tests.ranks.engine_worker import random_batch

VOCAB = 97
# The large epsilon keeps Adam from blowing up rounding errors of gradients that are almost zero.
SETTINGS = dict(
    steps=4,
    lr=1e-3,
    weight_decay=0.0,
    clip_grad=0.0,
    adam_beta2=0.98,
    adam_eps=1e-5,
    dtype="float32",
)


def update(engine: Policy, step: int) -> dict[str, float]:
    """Update on the mean log-prob of a batch, distributed to the data-parallel ranks in turns."""
    whole = random_batch(8, VOCAB, seed=step)
    batch = whole.select(range(engine.dp_group.rank(), whole.num_sequences, engine.dp_group.size()))

    def loss(logprobs, entropy, microbatch):
        return -logprobs.sum() / len(whole.tokens), {}

    return engine.update(make_microbatches(batch, 64), loss)


def run(job: dict) -> dict:
    settings = TrainerConfig(**SETTINGS, **job["layout"])
    out = Path(job["out"])
    init_distributed(settings, seed=1)
    results = {}
    for name, folder in job["models"].items():
        engine = Policy(settings, folder, seed=1)
        logprobs = engine.logprobs(make_microbatches(random_batch(12, VOCAB, seed=100), 64))
        buckets = [
            {n: t.nbytes for n, t in bucket}
            for bucket in engine.weights.buckets(job["bucket_bytes"])
        ]
        engine.export_hf(out / name)
        results[name] = {"logprobs": logprobs, "buckets": buckets, "rank": dist.get_rank()}
        if name in job["updated"]:
            results[name]["metrics"] = [update(engine, step) for step in range(3)]
            engine.export_hf(out / f"{name}_updated")
    return results


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    results = run(job)
    torch.save(results, Path(job["out"]) / f"results-{dist.get_rank()}.pt")
    shutdown()


if __name__ == "__main__":
    main()

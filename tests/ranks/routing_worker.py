"""One rank of the tests of routing replay: `routing_worker.py JOB`, with torchrun's environment.

JOB is a JSON file of layouts (see test_routing_replay.py), which run one after another. Every rank
writes its results to results-RANK.pt in the job's folder `out`.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from areal_lite.config import TrainerConfig
from areal_lite.megatron.experts import changed_share
from areal_lite.megatron.packing import make_microbatches
from areal_lite.megatron.parallel import init_distributed, shutdown
from areal_lite.megatron.policy import Policy
from areal_lite.routes import ExpertLayout
from areal_lite.train_batch import TrainBatch
from tests.ranks.architectures_worker import SETTINGS, VOCAB
from tests.ranks.engine_worker import random_batch

LAYOUT = ExpertLayout(layers=4, experts=4, top_k=2)
UPDATES = 3


def routed_batch(num_sequences: int, seed: int, layers: int = LAYOUT.layers) -> TrainBatch:
    """Make a batch with random routes. Last tokens and the second sequence have none.

    A prefix that sequences share has one or the other route in each of them.
    """
    batch, rng = random_batch(num_sequences, VOCAB, seed), np.random.default_rng(seed)
    ends, known = batch.cu_seqlens[batch.sequence_ids], {}
    prefixes = [batch.tokens[start : i + 1].tobytes() for i, start in enumerate(ends)]
    scores = rng.random((len(batch.tokens), 2, layers, LAYOUT.experts))
    scores = np.stack([known.setdefault(one, own) for one, own in zip(prefixes, scores)])
    scores = scores[np.arange(len(scores)), (batch.sequence_ids % 5 == 2).astype(int)]
    routes = np.sort(scores.argsort(-1)[..., : LAYOUT.top_k]).astype(LAYOUT.dtype)
    routes[batch.cu_seqlens[1:] - 1] = 255
    routes[batch.sequence_ids == 1] = 255
    return replace(batch, routes=routes)


def update(engine: Policy, step: int, layers: int) -> dict[str, float]:
    """Update on the mean log-prob of a batch, distributed to the data-parallel ranks in turns."""
    whole = routed_batch(8, seed=step, layers=layers)
    batch = whole.select(range(engine.dp_group.rank(), whole.num_sequences, engine.dp_group.size()))

    def loss(logprobs, entropy, microbatch):
        return -logprobs.sum() / len(whole.tokens), {}

    return engine.update(engine.microbatches(batch), loss)


def run(job: dict, layout: dict, out: Path) -> dict:
    settings = TrainerConfig(**SETTINGS, **layout, tokens_per_microbatch=64)
    init_distributed(settings, seed=1)
    engine = Policy(settings, job["model"], seed=1, routing_replay=True)
    batch = routed_batch(12, seed=100, layers=job["layers"])
    results = {"logprobs": engine.logprobs(engine.microbatches(batch))}
    changed_share(engine.chunks)
    results["plain"] = engine.logprobs(make_microbatches(batch, 64, share=False))
    results["changed"] = changed_share(engine.chunks)
    results["own"] = engine.logprobs(engine.microbatches(replace(batch, routes=None)))
    results["changed_own"] = changed_share(engine.chunks)
    results["metrics"] = [update(engine, step, job["layers"]) for step in range(UPDATES)]
    engine.export_hf(out)
    shutdown()
    return results


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    results, rank = {}, os.environ["RANK"]
    for name, layout in job["layouts"].items():
        os.environ["MASTER_PORT"] = str(job["ports"][name])
        results[name] = run(job, layout, Path(job["out"]) / name)
    assert not dist.is_initialized()
    torch.save(results, Path(job["out"]) / f"results-{rank}.pt")


if __name__ == "__main__":
    main()

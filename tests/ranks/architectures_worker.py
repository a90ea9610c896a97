"""One rank of the architecture tests: `architectures_worker.py JOB`, with torchrun's environment.

JOB is a JSON file (see test_architectures.py).
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from areal_lite.config import LoraConfig, TrainerConfig
from areal_lite.data.model_folder import num_experts
from areal_lite.megatron.hf import Bucket, WeightStream
from areal_lite.megatron.optimizer import is_sharded
from areal_lite.megatron.packing import make_microbatches
from areal_lite.megatron.parallel import init_distributed, shutdown
from areal_lite.megatron.policy import Policy
from areal_lite.system.files import read_json
from tests.ranks.checkpoint_worker import measured
from tests.ranks.engine_worker import load, random_batch, save

VOCAB = 97
BUDGET = 96  # tokens of a microbatch: two make a batch
UPDATES = 2
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


class _Gradients(WeightStream):
    """The gradients of the last update, by the names of the checkpoint's tensors."""

    def _parameters(self, chunks):
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if not parameter.requires_grad:
                    continue
                yield from chunk.matrices(name, parameter.main_grad)


def gradients(engine: Policy) -> Bucket:
    """Return the gradients on rank 0; nothing where each rank has the sum of a part alone."""
    if is_sharded(engine.config) and engine.dp_group.size() * engine.cp_group.size() > 1:
        return []
    buckets = _Gradients(engine.chunks, engine.hf_config).buckets(1 << 30)
    return [(name, tensor.clone()) for bucket in buckets for name, tensor in bucket]


def update(engine: Policy, step: int) -> dict[str, float]:
    """Update on the mean log-prob of a batch, distributed to the data-parallel ranks in turns."""
    whole = random_batch(8, VOCAB, seed=step)
    batch = whole.select(range(engine.dp_group.rank(), whole.num_sequences, engine.dp_group.size()))

    def loss(logprobs, entropy, microbatch):
        return -logprobs.sum() / len(whole.tokens), {}

    return engine.update(make_microbatches(batch, BUDGET), loss)


def adapted(settings: TrainerConfig, folder: str, out: Path) -> dict:
    """Train adapters; return log-probs and the adapters of a push, and export their sum."""
    lora = LoraConfig(rank=2, alpha=4.0)
    if num_experts(read_json(Path(folder) / "config.json")):
        lora.targets = ["qkv", "proj"]
    engine = Policy(replace(settings, lora=lora), folder, seed=1)
    for step in range(2):
        update(engine, step)
    batch = random_batch(8, VOCAB, seed=101)
    engine.export_hf(out)
    assert engine.adapters is not None
    pushed = [(n, x.clone()) for bucket in engine.adapters.buckets(1 << 30) for n, x in bucket]
    return {"adapted": engine.logprobs(make_microbatches(batch, BUDGET)), "adapters": dict(pushed)}


def orthogonalized(settings: TrainerConfig, folder: str, out: Path) -> int:
    """Make one update with Muon and export it; return the elements of this rank's moments."""
    engine = Policy(replace(settings, optimizer="muon"), folder, seed=1)
    update(engine, 0)
    engine.export_hf(out)
    return sum(
        value.numel()
        for one in engine.optimizer.chained_optimizers
        for state in one.optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    )


def run(job: dict) -> dict:
    settings = TrainerConfig(**SETTINGS, **job["layout"])
    out = Path(job["out"])
    init_distributed(settings, seed=1)
    results = {}
    for name, folder in job["models"].items():
        engine = Policy(settings, folder, seed=1)
        logprobs = engine.logprobs(make_microbatches(random_batch(8, VOCAB, seed=100), BUDGET))
        buckets = [
            {n: t.nbytes for n, t in bucket}
            for bucket in engine.weights.buckets(job["bucket_bytes"])
        ]
        engine.export_hf(out / name)
        results[name] = {"logprobs": logprobs, "buckets": buckets, "rank": dist.get_rank()}
        if name in job["updated"]:
            results[name]["metrics"] = [update(engine, 0)]
            results[name]["gradients"] = dict(gradients(engine))
            results[name]["metrics"] += [update(engine, step) for step in range(1, UPDATES)]
            engine.export_hf(out / f"{name}_updated")
            batch = random_batch(8, VOCAB, seed=101)
            results[name]["updated"] = engine.logprobs(make_microbatches(batch, BUDGET))
        if checkpoint := job.get("saved"):
            batch = random_batch(8, VOCAB, seed=101)
            if not (where := Path(checkpoint, name)).exists():
                save(engine, where)
            loaded = Policy(settings, folder, seed=1)
            load(loaded, where)
            results[name]["loaded"] = loaded.logprobs(make_microbatches(batch, BUDGET))
        if name in job.get("muon", ()):
            moments = orthogonalized(settings, folder, out / f"{name}_muon")
            results[name]["moments"] = moments
        if name in job.get("lora", ()):
            results[name] |= adapted(settings, folder, out / f"{name}_adapted")
        results[name]["parameters"] = sum(p.numel() for p in engine.model.parameters())
        if job.get("saved") and dist.get_world_size() == 1:
            half = Policy(replace(settings, dtype="bfloat16"), folder, seed=1)
            results[name]["memory"] = {4: measured(engine), 2: measured(half)}
    return results


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    results = run(job)
    torch.save(results, Path(job["out"]) / f"results-{dist.get_rank()}.pt")
    shutdown()


if __name__ == "__main__":
    main()

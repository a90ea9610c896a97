"""Measure how far servers and trainer disagree in bfloat16 after a push adds adapters to weights.

    python benchmarks/adapter_rounding.py MODEL [OUT]    # seconds, without a GPU

The trainer computes W x + s B A x. Servers get W + s B A, rounded to bfloat16. Adapters of several
sizes are put beside the layers of MODEL, a small model of the addition task
(examples/warm_model.sh makes one). All log-probs are of the trainer's engine, so that nothing but
the rounding of the sum differs. For comparison: how far bfloat16 is from float32 with the same
weights. That is about what other kernels change.

Writes OUT, results/adapter_rounding.json.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import torch

from areal_lite.config import LoraConfig, TrainerConfig
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.megatron.lora import adapters, added_share, without_adapters
from areal_lite.megatron.parallel import init_distributed
from areal_lite.megatron.policy import Policy
from areal_lite.train_batch import TrainBatch
from areal_lite.trajectory import FinishReason, Trajectory
from areal_lite_quickstart import addition

RESULTS = Path(__file__).with_name("results") / "adapter_rounding.json"
SHARES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1)
PROBLEMS = 256


def solutions(model: Path) -> TrainBatch:
    """Return solved problems of three digits, with a loss on the solutions."""
    tokenizer = Tokenizer(model)

    def solution(index: int) -> Trajectory:
        problem = addition.make_problem("test", index, max_digits=3)
        prompt = tokenizer.encode(addition.prompt(problem))
        written = tokenizer.encode(addition.demonstration(problem, Random(0)))
        return Trajectory(
            group_id=index,
            prompt_id=str(index),
            sample_index=0,
            tokens=np.concatenate((prompt, written)).astype(np.int32),
            loss_mask=np.repeat([False, True], [len(prompt), len(written)]),
            behavior_logprobs=np.zeros(len(prompt) + len(written), np.float32),
            versions=np.repeat([-1, 0], [len(prompt), len(written)]).astype(np.int32),
            finish_reason=FinishReason.STOP,
        )

    return TrainBatch.from_trajectories([solution(index) for index in range(PROBLEMS)])


def main(model: Path, out: Path = RESULTS) -> None:
    lora = TrainerConfig(dtype="bfloat16", lora=LoraConfig(rank=8, alpha=16.0))
    init_distributed(lora, seed=1)
    batch = solutions(model)
    with tempfile.TemporaryDirectory() as folder:
        # The same weights for all: those that bfloat16 can hold.
        Policy(replace(lora, lora=LoraConfig()), model, seed=1).export_hf(base := f"{folder}/base")
        policies = Policy(lora, base, seed=1), Policy(replace(lora, dtype="float32"), base, seed=1)
        torch.manual_seed(0)
        for (_, half), (_, full) in zip(*(adapters(policy.chunks) for policy in policies)):
            half.b.data.normal_()
            full.a.data.copy_(half.a), full.b.data.copy_(half.b)
        rows = [measure(*policies, batch, share, f"{folder}/{share}") for share in SHARES]
    out.write_text(json.dumps({"model": model.name, "rows": rows}, indent=1) + "\n")


def measure(
    policy: Policy, exact: Policy, batch: TrainBatch, share: float, merged: str
) -> dict[str, float]:
    """Compare trainer and server with adapters of a size.

    Args:
        policy: with adapters in bfloat16.
        exact: the same in float32.
        batch: the tokens.
        share: the size of the adapters, of that of the weights.
        merged: a folder for the model of the servers.

    Returns mean absolute differences of log-probs, in nats: `apart` of trainer and servers,
    `bfloat16` of bfloat16 and float32 on the servers. `seen` is the part of the adapters' effect
    that is left on the servers: its projection on the effect without any rounding.
    """
    factor = share / added_share(policy.chunks)
    for one in policy, exact:
        for _, adapter in adapters(one.chunks):
            adapter.b.data.mul_(factor)
    policy.export_hf(merged)
    plain = replace(policy.config, lora=LoraConfig())
    served = logprobs(Policy(plain, merged, seed=1), batch)
    served_exactly = logprobs(Policy(replace(plain, dtype="float32"), merged, seed=1), batch)
    own, wanted = logprobs(policy, batch), logprobs(exact, batch)
    with without_adapters(exact.chunks):
        before = logprobs(exact, batch)
    effect = wanted - before
    row = {
        "share": share,
        "effect": effect.abs().mean().item(),
        "seen": ((served_exactly - before) @ effect / (effect @ effect)).item(),
        "apart": (own - served).abs().mean().item(),
        "bfloat16": (served - served_exactly).abs().mean().item(),
    }
    print({key: float(f"{value:.3g}") for key, value in row.items()}, flush=True)
    return row


def logprobs(policy: Policy, batch: TrainBatch) -> torch.Tensor:
    """Return the log-probs of the solutions."""
    return policy.logprobs(policy.microbatches(batch))[torch.from_numpy(batch.loss_mask)]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

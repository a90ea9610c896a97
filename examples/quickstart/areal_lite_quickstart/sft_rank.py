"""A rank of the supervised warm-up: `python -m areal_lite_quickstart.sft_rank RUN_DIR`.

loss = - sum over completion tokens of log p / number of completion tokens in the batch, over all
ranks.

Demonstration i depends on the seed and i only, so any number of ranks sees the same ones.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # until main: what imports make stays, and each collection would visit all of it

import logging
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from areal_lite.config import load_config
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.megatron.parallel import data_parallel_rank, data_parallel_sum, shutdown
from areal_lite.megatron.policy import Policy
from areal_lite.run_dir.metrics import append_event
from areal_lite.system.processes import die_with_parent, run_role
from areal_lite.train_batch import TrainBatch
from areal_lite.trajectory import Trajectory
from areal_lite_quickstart import addition
from areal_lite_quickstart.command import SftConfig

log = logging.getLogger(__name__)
# Reinforcement learning must not meet problems whose wrong answers were demonstrated.
_FIRST_PROBLEM = 10**9


def train(config: SftConfig, run_dir: Path) -> None:
    """Warm up and export to `config.out`."""
    policy = Policy(config.trainer, Path(config.model), config.seed)
    tokenizer = Tokenizer(config.model)
    last = time.monotonic()
    for step in range(config.trainer.steps):
        first = step * config.batch_size
        indices = range(first, first + config.batch_size)
        own = indices[data_parallel_rank() :: config.trainer.data_parallel]
        batch = TrainBatch.from_trajectories([_demonstration(config, tokenizer, i) for i in own])
        result = update(policy, batch)
        if dist.get_rank() == 0:
            now = time.monotonic()
            append_event(run_dir, "sft", {"step": step + 1, "time_s": now - last, **result})
            last = now
    policy.export_hf(config.out)
    shutdown()


def update(policy: Policy, batch: TrainBatch) -> dict[str, float]:
    """Make one optimizer step on the mean negative log-likelihood of all ranks' masked tokens."""
    mask = torch.from_numpy(batch.loss_mask).to(policy.device)
    denominator = float(data_parallel_sum(mask.sum(dtype=torch.float64)))

    def loss(logprobs, entropy, microbatch):
        return -(logprobs * mask[microbatch.token_index]).sum() / denominator, {}

    return policy.update(policy.microbatches(batch, batch.loss_mask), loss)


def _demonstration(config: SftConfig, tokenizer: Tokenizer, index: int) -> Trajectory:
    # All digit counts are equally frequent: the letters of high places are learned here or never.
    max_digits = config.max_digits
    problem = addition.make_problem(
        "train",
        _FIRST_PROBLEM + index,
        seed=config.seed,
        max_digits=max_digits,
        weights=[1.0] * max_digits,
    )
    text = addition.demonstration(
        problem, random.Random(f"{config.seed}/{index}"), forget_carry=config.forget_carry
    )
    prompt = tokenizer.encode(addition.prompt(problem))
    completion = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
    sampled = np.repeat([False, True], [len(prompt), len(completion)])
    return Trajectory(
        group_id=index,
        prompt_id=str(index),
        sample_index=0,
        tokens=np.array([*prompt, *completion], np.int32),
        loss_mask=sampled,
        behavior_logprobs=np.zeros(len(sampled), np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        finish_reason="stop",
        reward=1.0,
    )


def main() -> int:
    die_with_parent()
    gc.freeze()
    gc.enable()
    return run_role(lambda run_dir: train(load_config(run_dir, SftConfig), run_dir), ValueError)


if __name__ == "__main__":
    sys.exit(main())

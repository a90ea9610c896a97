"""Time of the objectives on one core: loss, gradient and advantages of a flat float32 batch.

    python benchmarks/objectives.py [--tokens 2000000] [--rounds 5]

The script prints seconds per call, median over the rounds, and the peak memory of the process.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from areal_lite.algo.advantages import gae, grpo
from areal_lite.algo.correction import Correction
from areal_lite.algo.losses import LossInputs, ppo_loss
from areal_lite.algo.sequences import reduction_count, reduction_weights
from areal_lite.algo.trajectory_balance import trajectory_balance_loss
from areal_lite.config import AlgoConfig
from areal_lite.trainer.objective import RATIO_LOSSES

GROUP, MEAN_LENGTH = 8, 1000


def batch(tokens: int) -> tuple[LossInputs, torch.Tensor, torch.Tensor]:
    """Make sequences of exponentially distributed lengths, with a tenth of the tokens masked.

    The rewards and the group ids are one per sequence.
    """
    g = torch.Generator().manual_seed(1)
    lengths = (
        torch.empty(2 * tokens // MEAN_LENGTH + 64)
        .exponential_(1 / MEAN_LENGTH, generator=g)
        .long()
        + 1
    )
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[:tokens]
    behavior = -2 * torch.rand(tokens, generator=g)
    prox = behavior + 0.05 * torch.randn(tokens, generator=g)
    logprobs = (prox + 0.05 * torch.randn(tokens, generator=g)).requires_grad_()
    rewards = torch.rand(int(ids[-1]) + 1, generator=g).round()
    groups = torch.arange(len(rewards)) // GROUP
    advantages = grpo(rewards, groups)[ids]
    return (
        LossInputs(
            logprobs, prox, behavior, advantages, torch.rand(tokens, generator=g) < 0.9, ids
        ),
        rewards,
        groups,
    )


def calls(
    x: LossInputs, rewards: torch.Tensor, groups: torch.Tensor
) -> dict[str, Callable[[], object]]:
    n = float(x.mask.sum())
    x = replace(x, weights=reduction_weights(x.mask, x.sequence_ids, mode="token", denominator=n))
    clip = {"eps_low": 0.2, "eps_high": 0.2}
    sequences = reduction_count(x.mask, x.sequence_ids, mode="sequence")

    def forward() -> torch.Tensor:
        return ppo_loss(replace(x, advantages=grpo(rewards, groups)[x.sequence_ids]), **clip).loss

    return {
        "GRPO advantages + decoupled PPO loss": forward,
        "the same + backward": lambda: forward().backward(),
        "PPO + geometric mask": lambda: ppo_loss(
            x, correction=Correction("mask", 1.01, level="geometric"), **clip
        ),
        **{name: partial(build(AlgoConfig(loss=name)), x) for name, build in RATIO_LOSSES.items()},
        "Trajectory Balance": lambda: trajectory_balance_loss(
            x.logprobs,
            x.prox,
            x.mask,
            x.sequence_ids,
            rewards,
            groups,
            beta=0.1,
            denominator=sequences,
        ),
        "GAE": lambda: gae(x.advantages, x.prox, x.mask, x.sequence_ids, gamma=1.0, lam=0.95),
        "sequence-mean weights": lambda: reduction_weights(
            x.mask, x.sequence_ids, mode="sequence", denominator=sequences
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = batch(args.tokens)
    for name, call in calls(*data).items():
        seconds = []
        for _ in range(args.rounds):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        print(f"{name:40s} {statistics.median(seconds):.3f} s")
    print(
        f"{'peak memory':40s} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"
    )


if __name__ == "__main__":
    main()

"""Trajectory Balance: an objective that is off-policy by construction (TBA, arXiv 2503.18929; Malkin et al., arXiv 2201.13259).

The policy that maximises E[R] - beta KL(theta || ref) is proportional to ref exp(R / beta). For such a policy the value

    d_k = lp_theta(y_k) - lp_ref(y_k) - R_k / beta          (lp of a whole completion: a sum over its tokens)

is the same for every completion of a prompt, -log Z. So, whoever sampled y_k, make it the same (VarGrad, arXiv 2010.10436):

    logZ = mean_k(-d_k)  (detached)          loss = mean_k (logZ + d_k)^2, the variance of d within the group

Its gradient is -(2 / beta) mean_k A_k grad lp_theta(y_k) with A_k = (R_k - beta KL_k) less its group's mean: on-policy, REINFORCE with
the group mean as baseline on KL-shaped reward. No importance weight appears. The loss grows with (length / beta)^2: clip the gradient.

A group is the completions that carry one id and have an unmasked token; one that has lost all others of its group has loss 0.
The objective is about whole completions: a mask that hides part of what the policy sampled changes the question.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lite.algo.losses import LossOutput
from areal_lite.algo.sequences import group_mean, sequence_length, sequence_sum


def log_ratios(
    logprobs: Tensor, reference: Tensor, mask: Tensor, sequence_ids: Tensor, *, num: int
) -> tuple[Tensor, Tensor]:
    """lp_theta(y) - lp_ref(y) of `num` sequences, float [num] with gradient, and which have an unmasked token, bool [num]."""
    present = sequence_length(mask, sequence_ids, num=num) > 0
    return sequence_sum(logprobs - reference.detach(), mask, sequence_ids, num=num), present


def log_partition(
    log_ratio: Tensor, present: Tensor, rewards: Tensor, group_ids: Tensor, *, beta: float
) -> Tensor:
    """VarGrad's estimate of log Z of each sequence's group: mean of R / beta - log_ratio over `present` members, detached, [n] -> [n]."""
    return group_mean(rewards / beta - log_ratio.detach(), present, group_ids)


def trajectory_balance_loss(
    logprobs: Tensor,
    reference: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    rewards: Tensor,
    group_ids: Tensor,
    *,
    beta: float,
    denominator: float,
    log_z: Tensor | None = None,
) -> LossOutput:
    """sum_k (logZ + d_k)^2 / denominator.

    logprobs (with gradient), reference: float [t]; mask bool [t]; sequence_ids int [t], places in rewards float [n] and group_ids int [n].
    denominator: number of sequences with an unmasked token, over all ranks and microbatches (`reduction_count(mode="sequence")`), so that
    every completion counts the same, also one whose group has lost members. log_z float [n]: from `log_partition`; by default it is
    computed here, which needs whole groups. Metrics are sums over sequences. Raises ValueError unless beta > 0.
    """
    if beta <= 0:
        raise ValueError(f"trajectory balance has beta {beta}; it must be positive")
    log_ratio, present = log_ratios(logprobs, reference, mask, sequence_ids, num=len(rewards))
    if log_z is None:
        log_z = log_partition(log_ratio, present, rewards, group_ids, beta=beta)
    residual = torch.where(
        present, log_z.detach() + log_ratio - rewards / beta, torch.zeros_like(log_ratio)
    )
    zeros = torch.zeros_like(log_z)
    metrics = {
        "log_z": torch.where(present, log_z, zeros).sum(),
        "reference_kl": log_ratio.detach().sum(),
        "sequences": present.sum(),
    }
    return LossOutput(
        (residual**2).sum() / denominator, {name: value.float() for name, value in metrics.items()}
    )

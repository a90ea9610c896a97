"""Advantages: of whole trajectories, by group id (grpo, rloo), and of tokens (reinforce_plus_plus, gae).

A group is the set of trajectories that carry one id, wherever they stand in the batch and however many survived.
Statistics of the whole batch are `Moments`, computed with a sum over ranks that is passed in. Rewards are shaped first (algo/shaping.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lite.algo.sequences import discounted_sum


@dataclass(frozen=True)
class Moments:
    """Number, mean and sample standard deviation (n - 1) of values over the whole batch; all 0 if there are none."""

    count: float
    mean: float
    std: float


def moments(
    values: Tensor,
    mask: Tensor | None = None,
    *,
    reduce: Callable[[Tensor], Tensor] = lambda partial: partial,
) -> Moments:
    """Moments of the (unmasked) values of all ranks, in float64. `reduce` sums a tensor over ranks; every rank calls this.

    Two passes, since the difference of two large sums would leave nothing of a small variance.
    """
    values = (values if mask is None else values[mask]).double()
    count, total = reduce(torch.stack([values.new_tensor(len(values)), values.sum()])).tolist()
    mean = total / count if count else 0.0
    variance = float(reduce(((values - mean) ** 2).sum())) / max(count - 1, 1)
    std = variance**0.5
    return Moments(
        count, mean, std if std > 1e-12 * abs(mean) else 0.0
    )  # less is the rounding of the mean of equal values


def whiten(
    values: Tensor, stats: Moments, *, mask: Tensor | None = None, eps: float = 1e-8
) -> Tensor:
    """(x - mean) / (std + eps), and 0 where masked or where all values are equal."""
    result = (values - stats.mean) / (stats.std + eps) if stats.std else torch.zeros_like(values)
    return result if mask is None else torch.where(mask, result, torch.zeros_like(result))


def grpo(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    divide_by_std: bool = True,
    eps: float = 1e-6,
    leave_one_out: bool = False,
    batch_mean: Moments | None = None,
    batch_std: Moments | None = None,
) -> Tensor:
    """Group-relative advantages: (r_i - mean_g) / (std_g + eps) (GRPO, arXiv 2402.03300, section 4.1.2) or r_i - mean_g (Dr. GRPO,
    arXiv 2503.20783, section 3.2).

    rewards float [n], group_ids int [n] -> float [n]. The standard deviation is the sample's (n - 1);
    a group of one, or one whose rewards are all equal, has advantage 0.
    leave_one_out: the baseline of i is the mean of the others, which multiplies r_i - mean by n / (n - 1).
    batch_mean, batch_std: `moments(rewards)` of the whole batch to take the mean or the deviation from, instead of the group's
    (group mean with batch deviation: arXiv 2508.08221). With batch_mean a group whose rewards are all equal has a signal.
    """
    _, group = torch.unique(group_ids, return_inverse=True)
    num_groups = int(group.max()) + 1 if len(group) else 0
    count = torch.bincount(group, minlength=num_groups).to(rewards.dtype)
    mean = rewards.new_zeros(num_groups).index_add_(0, group, rewards) / count
    centred = rewards - mean[group]
    # Equal rewards can differ from their rounded mean by an ulp; dividing that by a tiny deviation would invent a signal.
    lowest = rewards.new_full((num_groups,), float("inf")).scatter_reduce_(
        0, group, rewards, "amin"
    )
    highest = rewards.new_full((num_groups,), float("-inf")).scatter_reduce_(
        0, group, rewards, "amax"
    )
    centred = torch.where((highest > lowest)[group], centred, torch.zeros_like(centred))
    advantages, size = centred, count[group]
    if batch_mean is not None:
        advantages, size = rewards - batch_mean.mean, torch.full_like(rewards, batch_mean.count)
    if leave_one_out:
        advantages = advantages * size / (size - 1).clamp(min=1)
    if not divide_by_std:
        return advantages
    if batch_std is not None:
        return advantages / (batch_std.std + eps) if batch_std.std else torch.zeros_like(advantages)
    variance = rewards.new_zeros(num_groups).index_add_(0, group, centred**2) / (count - 1).clamp(
        min=1
    )
    return advantages / (variance.sqrt()[group] + eps)


def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """REINFORCE leave-one-out: A_i = r_i - mean of the rest of its group (arXiv 2402.14740); 0 in a group of one."""
    return grpo(rewards, group_ids, divide_by_std=False, leave_one_out=True)


def reinforce_plus_plus(
    rewards: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    gamma: float = 1.0,
    reduce: Callable[[Tensor], Tensor] = lambda partial: partial,
) -> Tensor:
    """REINFORCE++ (arXiv 2501.03262v9, eq. 4, 5): token returns G_t = r_t + gamma G_{t+1}, whitened over all unmasked tokens of all ranks.

    rewards float [t] (`token_rewards`, with the KL term), the tokens of a sequence side by side -> float [t], 0 where masked.
    Its variant with group baseline (eq. 6 and 7): `whiten(grpo(r, groups, divide_by_std=False)[sequence_ids], moments(...), mask=mask)`.
    """
    returns = torch.zeros_like(rewards)
    returns[mask] = discounted_sum(rewards[mask], sequence_ids[mask], gamma)
    return whiten(returns, moments(returns, mask, reduce=reduce), mask=mask)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438; as in PPO, arXiv 1707.06347, eq. 11 and 12) over ragged sequences:
    (advantages, returns = advantages + values), float [t].

    A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, where t + 1 is the next *unmasked* token of the sequence:
    tokens that the policy did not sample take no time, and rewards or values there are ignored. After the last one V is `bootstrap`
    (float [n], by sequence id: of sequences cut off), by default 0. rewards, values float [t], the tokens of a sequence side by side;
    results are 0 where masked.
    """
    ids, kept_values = sequence_ids[mask], values[mask]
    ends = torch.ones_like(ids, dtype=torch.bool)
    ends[:-1] = ids[1:] != ids[:-1]
    following = torch.where(
        ends,
        torch.zeros_like(kept_values) if bootstrap is None else bootstrap[ids],
        kept_values.roll(-1),
    )
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[mask] = discounted_sum(
        rewards[mask] + gamma * following - kept_values, ids, gamma * lam
    )
    returns[mask] = advantages[mask] + kept_values
    return advantages, returns

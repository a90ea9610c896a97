"""Advantages by group id.

A group is the set of trajectories that carry one id, wherever they stand in the batch and however many survived.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grpo(rewards: Tensor, group_ids: Tensor, *, divide_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Group-relative advantages: A_i = (r_i - mean_g) / (std_g + eps) (GRPO, arXiv 2402.03300), or r_i - mean_g (Dr. GRPO, arXiv 2503.20783).

    rewards float [n], group_ids int [n] -> float [n]. The standard deviation is the sample's (n - 1);
    a group of one, or one whose rewards are all equal, has advantage 0.
    """
    _, group = torch.unique(group_ids, return_inverse=True)
    num_groups = int(group.max()) + 1 if len(group) else 0
    count = torch.bincount(group, minlength=num_groups).to(rewards.dtype)
    mean = rewards.new_zeros(num_groups).index_add_(0, group, rewards) / count
    centred = rewards - mean[group]
    # Equal rewards can differ from their rounded mean by an ulp; dividing that by a tiny deviation would invent a signal.
    lowest = rewards.new_full((num_groups,), float("inf")).scatter_reduce_(0, group, rewards, "amin")
    highest = rewards.new_full((num_groups,), float("-inf")).scatter_reduce_(0, group, rewards, "amax")
    centred = torch.where((highest > lowest)[group], centred, torch.zeros_like(centred))
    if not divide_by_std:
        return centred
    variance = rewards.new_zeros(num_groups).index_add_(0, group, centred**2) / (count - 1).clamp(min=1)
    return centred / (variance.sqrt()[group] + eps)

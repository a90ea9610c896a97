"""Rewards before they become advantages. Sequence rewards are float [n], token rewards float [t]."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lite.algo.kl import kl_estimate
from areal_lite.algo.sequences import sequence_sum


def scale_and_clip(
    rewards: Tensor, *, scale: float = 1.0, bias: float = 0.0, clip: float | None = None
) -> Tensor:
    """scale (r + bias), then limited to [-clip, clip]."""
    shaped = scale * (rewards + bias)
    return shaped if clip is None else shaped.clamp(-clip, clip)


def overlong_penalty(
    lengths: Tensor, *, max_length: int, margin: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Soft punishment of long completions, to be added to the reward (DAPO, arXiv 2503.14476, eq. 13).

    0 up to max_length - margin tokens, from there linearly down to -1 at max_length, and -1 beyond. lengths int [n] -> float [n].
    """
    if not 0 < margin <= max_length:
        raise ValueError(
            f"the overlong margin is {margin}; choose 1 to {max_length} tokens (max_length)"
        )
    return ((max_length - margin - lengths).to(dtype) / margin).clamp(-1.0, 0.0)


def kl_in_reward(
    rewards: Tensor,
    logprobs: Tensor,
    reference: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    beta: float,
    estimator: str = "k1",
) -> Tensor:
    """r_i - beta sum_t k_t over the sequence's unmasked tokens, detached (arXiv 1909.08593): sequence rewards float [n] -> [n].

    sequence_ids int [t] are places in `rewards`. A sequence without unmasked tokens keeps its reward.
    """
    divergence = kl_estimate(logprobs.detach(), reference, mask, estimator=estimator)
    return rewards - beta * sequence_sum(divergence, mask, sequence_ids, num=len(rewards))


def token_rewards(
    rewards: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    divergence: Tensor | None = None,
    beta: float = 0.0,
) -> Tensor:
    """Each sequence's reward at its last unmasked token, and -beta k_t at every unmasked token: float [n] -> float [t].

    The reward of a sequence without an unmasked token goes nowhere. `divergence`: from `kl_estimate`.
    """
    positions = torch.arange(len(mask), device=mask.device)
    last = torch.full((len(rewards),), -1, device=mask.device).scatter_reduce_(
        0, sequence_ids[mask], positions[mask], "amax"
    )
    result = rewards.new_zeros(len(mask))
    result[last[last >= 0]] = rewards[last >= 0]
    if divergence is None:
        return result
    return result - beta * torch.where(mask, divergence.detach(), torch.zeros_like(divergence))

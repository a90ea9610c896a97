"""Rewards before they become advantages: float [n] of sequences, float [t] of tokens."""

import torch
from torch import Tensor

from areal_lite.algo.kl import kl_estimate
from areal_lite.algo.sequences import sequence_sum


def scale_and_clip(
    rewards: Tensor, *, scale: float = 1.0, bias: float = 0.0, clip: float | None = None
) -> Tensor:
    """Compute scale (r + bias), limited to [-clip, clip]."""
    shaped = scale * (rewards + bias)
    return shaped if clip is None else shaped.clamp(-clip, clip)


def overlong_penalty(
    lengths: Tensor, *, max_length: int, margin: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Compute the soft overlong punishment to add to the reward (DAPO, arXiv 2503.14476, eq. 13).

    It is 0 up to max_length - margin tokens, falls linearly to -1 at max_length, and stays at -1.
    lengths int [n] -> float [n]. Raises ValueError unless 0 < margin <= max_length.
    """
    if not 0 < margin <= max_length:
        raise ValueError(
            f"algo.shaping.overlong_margin={margin}: choose 1 to {max_length}"
            " (rollout.max_new_tokens)"
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
    """Compute r_i - beta sum_t k_t over the sequence's unmasked tokens, detached.

    Source: arXiv 1909.08593. rewards float [n] -> float [n]; a sequence without unmasked tokens
        keeps its reward.

    Args:
        logprobs, reference: float [t]
        mask: bool [t]
        sequence_ids: int [t], indices into `rewards`
        estimator: of k_t, see algo/kl.py
    """
    divergence = kl_estimate(logprobs.detach(), reference, mask, estimator=estimator)
    return rewards - beta * sequence_sum(divergence, mask, sequence_ids, num=len(rewards))


def kl_in_advantage(
    advantages: Tensor, logprobs: Tensor, reference: Tensor, mask: Tensor, *, beta: float
) -> Tensor:
    """Compute A_t - beta (lp_t - lp_ref_t), detached: float [t].

    The policy gradient of the second term alone is that of beta KL(policy || reference), token by
    token over the sequences that the policy samples: on-policy distillation, if the reference is a
    teacher (arXiv 2306.13649, section 3, with the reverse KL and only samples of the student;
    "On-Policy Distillation", Thinking Machines Lab, 2025, where later tokens do not count, either).

    Args:
        advantages, logprobs, reference: float [t]
        mask: bool [t]; the others keep their advantage
    """
    return advantages - beta * kl_estimate(logprobs.detach(), reference, mask, estimator="k1")


def token_rewards(
    rewards: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    divergence: Tensor | None = None,
    beta: float = 0.0,
) -> Tensor:
    """Place each sequence's reward at its last unmasked token: float [n] -> float [t].

    With `divergence`, float [t] from `kl_estimate`, every unmasked token also gets -beta k_t. The
    reward of a sequence without an unmasked token is dropped.
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

"""Policy losses over flat tokens.

Per token, with advantage A, mask m and N the number of unmasked tokens of the minibatch over all ranks and micro-batches:

    w = behaviour correction                          (algo/correction.py, detached)
    r = exp(lp_theta - lp_prox)
    L = w * max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))            [dual clip: min(., c |A|) where A < 0]
    loss = sum m L / N

A call gets the tokens of one micro-batch and the global N and returns its share of the loss: shares add up, however tokens were packed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lite.algo.correction import behavior_weight


@dataclass
class LossInputs:
    """Flat tokens of a micro-batch; all float [t] but `mask` (bool [t]). Only `logprobs` carries a gradient.

    logprobs: under the weights being trained; prox: just before the step; behavior: under the weights that sampled the token.
    """

    logprobs: Tensor
    prox: Tensor
    behavior: Tensor
    advantages: Tensor
    mask: Tensor


@dataclass
class LossOutput:
    """`loss`: scalar with gradient, this micro-batch's share. `metrics`: detached sums over unmasked tokens; divide by N for means."""

    loss: Tensor
    metrics: dict[str, Tensor]


def ppo_loss(
    inputs: LossInputs,
    *,
    denominator: float,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    decoupled: bool = True,
    correction: str = "cap",
    correction_cap: float = 5.0,
) -> LossOutput:
    """Decoupled PPO (AReaL, arXiv 2505.24298), or with `decoupled=False` naive PPO: clipped around the behaviour policy (arXiv 1707.06347).

    eps_low/eps_high: clip range, asymmetric as in DAPO (arXiv 2503.14476); dual_clip c > 1 (arXiv 1912.09729).
    Raises ValueError for an unknown correction.
    """
    mask, advantages = inputs.mask, inputs.advantages
    anchor = inputs.prox if decoupled else inputs.behavior
    if decoupled:
        weight, kept = behavior_weight(inputs.prox, inputs.behavior, mask, mode=correction, cap=correction_cap)
    else:
        weight, kept = mask.to(inputs.logprobs.dtype), mask
    log_ratio = torch.where(mask, inputs.logprobs - anchor.detach(), torch.zeros_like(anchor))
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - eps_low, 1 + eps_high)
    token_loss = torch.maximum(unclipped, clipped)
    if dual_clip is not None:
        token_loss = torch.where(advantages < 0, torch.minimum(token_loss, dual_clip * advantages.abs()), token_loss)
    loss = torch.where(kept, weight * token_loss, torch.zeros_like(token_loss)).sum() / denominator
    with torch.no_grad():
        metrics = {
            "clip_fraction": (kept & (clipped > unclipped)).sum(),
            "ratio": torch.where(mask, ratio, torch.zeros_like(ratio)).sum(),
            "behavior_weight": weight.sum(),
            "rejected": (mask & ~kept).sum(),
            **mismatch(inputs.prox, inputs.behavior, mask),
        }
    return LossOutput(loss, {name: value.float() for name, value in metrics.items()})


def mismatch(prox: Tensor, behavior: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Sums over unmasked tokens that say how far the proximal policy is from the behaviour policy, d = lp_prox - lp_behav.

    behave_kl: k3 estimate of KL(behaviour || proximal), exp(d) - d - 1 >= 0; behave_kl_k1: -d; behave_abs: |d|.
    weight_sum, weight_square_sum: of w = exp(d), for the effective sample size (sum w)^2 / (N sum w^2) (PipelineRL, arXiv 2509.19128).
    """
    difference = torch.where(mask, prox - behavior, torch.zeros_like(prox))
    weight = torch.where(mask, difference.exp(), torch.zeros_like(difference))
    return {
        "behave_kl": torch.where(mask, weight - difference - 1, torch.zeros_like(difference)).sum(),
        "behave_kl_k1": -difference.sum(),
        "behave_abs": difference.abs().sum(),
        "weight_sum": weight.sum(),
        "weight_square_sum": (weight**2).sum(),
    }

"""The behaviour policy is not the policy the update starts from: weights that correct for it, and the proximal log-probs they need.

With lp_behav the log-prob under the weights that sampled a token and lp_prox the one under the weights just before the step,

    w = exp(lp_prox - lp_behav)                                  (detached; decoupled PPO, AReaL, arXiv 2505.24298, eq. 5)

`cap` truncates w at an upper bound, `mask` takes tokens above the bound (or under its inverse) out of the loss, `off` is w = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

MODES = ("cap", "mask", "off")


def behavior_weight(prox: Tensor, behavior: Tensor, mask: Tensor, *, mode: str, cap: float) -> tuple[Tensor, Tensor]:
    """Importance weight of each token and the mask that is left.

    prox, behavior: float [t] log-probs; mask: bool [t]. Returns (w float [t], kept bool [t]), both detached; w is 0 outside `kept`.
    The loss's denominator stays the number of tokens in `mask`: rejecting a token does not make the others count more.
    """
    if mode not in MODES:
        raise ValueError(f"algo.behavior_weight is {mode!r}; choose one of {', '.join(MODES)}")
    ratio = torch.where(mask, prox - behavior, torch.zeros_like(prox)).detach().exp()
    kept = mask
    if mode == "off":
        weight = torch.ones_like(ratio)
    elif mode == "cap":
        weight = ratio.clamp(max=cap)
    else:
        kept = mask & (ratio <= cap) & (ratio >= 1 / cap)
        weight = ratio
    return torch.where(kept, weight, torch.zeros_like(weight)), kept


def loglinear_prox(behavior: Tensor, theta: Tensor, versions: Tensor, *, version: int) -> Tensor:
    """Proximal log-probs without a forward pass: lp_behav + alpha (lp_theta - lp_behav), detached (AReaL, "proximal approximation").

    alpha = (v_prox - v) / (v_theta - v) with v a token's version, v_prox = `version` (the trainer's at the start of the step) and
    v_theta = v_prox + 1: a token sampled from the newest weights has alpha 0 and its behaviour policy is the proximal one.
    behavior, theta float [t], versions int [t] -> float [t].
    """
    age = (version - versions).clamp(min=0).to(theta.dtype)
    return (behavior + age / (age + 1) * (theta - behavior)).detach()

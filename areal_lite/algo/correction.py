"""The behavior policy is not the policy the update starts from: weights that correct for it, and the proximal log-probs they need.

With lp_behav the log-prob under the weights that sampled a token, lp_prox under the weights just before the step, d = lp_prox - lp_behav,

    token        w_t = exp(d_t)                      (detached; decoupled PPO, AReaL, arXiv 2505.24298, eq. 5)
    geometric    w_i = exp(mean_t d_t)               one weight a sequence, its tokens' geometric mean: no variance that grows with length
    product      w_i = exp(sum_t d_t)                the exact importance weight of a sequence: unbiased, and rarely of use for long ones

    cap          min(w, cap): truncated importance sampling (TIS; Espeholt et al., arXiv 1802.01561; PipelineRL, arXiv 2509.19128, eq. 5;
                 OlmoRL, arXiv 2512.13961, eq. 1)
    mask         w where low <= w <= cap, otherwise out of the loss. low = 1/cap unless given; low = 0 is one bound only, two bounds of
                 tokens are IcePop's (Ring-1T, arXiv 2510.18855), of geometric means a trust region for whole sequences
    off          w = 1, on purpose

A veto takes a whole sequence out when one of its tokens lies outside of wide bounds: such a token is a fault, not a stale policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lite.algo.sequences import sequence_mean, sequence_sum

MODES = ("cap", "mask", "off")
LEVELS = ("token", "geometric", "product")


@dataclass(frozen=True)
class Correction:
    """The keywords of `behavior_weight`. Levels other than token, and a veto, need sequence ids."""

    mode: str = "cap"
    cap: float = 5.0
    low: float | None = None
    level: str = "token"
    veto: tuple[float, float] | None = None


def finite_mask(mask: Tensor, behavior: Tensor) -> Tensor:
    """`mask` without tokens whose behavior log-prob is not finite. Count these tokens, then pass the count as the loss's denominator:
    a token whose sampling probability is unknown leaves numerator and denominator."""
    return mask & torch.isfinite(behavior)


def behavior_weight(
    prox: Tensor,
    behavior: Tensor,
    mask: Tensor,
    *,
    mode: str,
    cap: float,
    low: float | None = None,
    level: str = "token",
    veto: tuple[float, float] | None = None,
    sequence_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Importance weight of each token and the mask that is left.

    prox, behavior: float [t] log-probs; mask: bool [t]; sequence_ids: int [t]. Returns (w float [t], kept bool [t]), both detached; w is 0
    outside `kept`. Masked tokens and those without a finite behavior log-prob have no part in a sequence's weight.
    The loss's denominator stays the number of tokens in `finite_mask`: rejecting a token does not make the others count more.
    To reject at one level and weigh at another, call twice: the second time with the first `kept` as its mask.
    """
    _check(mode, cap, low, level, veto, sequence_ids)
    mask = finite_mask(mask, behavior)
    log_ratio = torch.where(mask, prox - behavior, torch.zeros_like(prox)).detach()
    kept = mask
    if veto is not None:
        ratio = log_ratio.exp()
        outlier = mask & ~((ratio >= veto[0]) & (ratio <= veto[1]))
        kept = mask & (sequence_sum(outlier.float(), mask, sequence_ids)[sequence_ids] == 0)
    if level != "token":
        combine = sequence_mean if level == "geometric" else sequence_sum
        log_ratio = combine(log_ratio, mask, sequence_ids)[sequence_ids]
    if mode == "off":
        weight = torch.ones_like(log_ratio)
    elif mode == "cap":
        weight = log_ratio.exp().clamp(max=cap)
    else:
        weight = log_ratio.exp()
        kept = kept & (weight <= cap) & (weight >= (1 / cap if low is None else low))
    return torch.where(kept, weight, torch.zeros_like(weight)), kept


def _check(
    mode: str,
    cap: float,
    low: float | None,
    level: str,
    veto: tuple[float, float] | None,
    sequence_ids: Tensor | None,
) -> None:
    if mode not in MODES:
        raise ValueError(f"algo.behavior_weight is {mode!r}; choose one of {', '.join(MODES)}")
    if level not in LEVELS:
        raise ValueError(f"the correction's level is {level!r}; choose one of {', '.join(LEVELS)}")
    if not (0 <= (low or 0) <= cap and cap > 0):
        raise ValueError(
            f"the correction's bounds are {low} and {cap}; they must be 0 <= low <= cap, cap > 0"
        )
    if sequence_ids is None and (level != "token" or veto is not None):
        raise ValueError("a correction of whole sequences, or a veto, needs sequence_ids")


def loglinear_prox(behavior: Tensor, theta: Tensor, versions: Tensor, *, version: int) -> Tensor:
    """Proximal log-probs without a forward pass: lp_behav + alpha (lp_theta - lp_behav), detached (AReaL, prox_approx.md).

    alpha = (v_prox - v) / (v_theta - v) with v a token's version, v_prox = `version` (the trainer's at the start of the step) and
    v_theta = v_prox + 1: a token sampled from the newest weights has alpha 0 and its behavior policy is the proximal one.
    behavior, theta float [t], versions int [t] -> float [t].
    """
    age = (version - versions).clamp(min=0).to(theta.dtype)
    return (behavior + age / (age + 1) * (theta - behavior)).detach()

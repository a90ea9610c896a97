"""Corrections for stale tokens: importance weights, and approximate proximal log-probs.

lp_behav is a token's log-prob under the weights that sampled it, lp_prox its log-prob under the
weights just before the step, and d = lp_prox - lp_behav.

Levels, the unit that is weighed:

    token        w_t = exp(d_t); decoupled PPO (AReaL, arXiv 2505.24298, eq. 5)
    geometric    w_i = exp(mean_t d_t), the geometric mean of a sequence's tokens: its variance does
                 not grow with length
    product      w_i = exp(sum_t d_t), the exact importance weight of a sequence: unbiased, but
                 rarely useful for long ones

Modes, the bound on w:

    cap          min(w, cap), truncated importance sampling (Espeholt et al., arXiv 1802.01561;
                 PipelineRL, arXiv 2509.19128, eq. 5; OlmoRL, arXiv 2512.13961, eq. 1)
    mask         w where low <= w <= cap; other tokens leave the loss. low is 1 / cap by default;
                 low = 0 leaves only the upper bound. Two bounds on tokens are IcePop's (Ring-1T,
                 arXiv 2510.18855); on geometric means they are a trust region of sequences
    off          w = 1
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lite.algo.sequences import sequence_mean, sequence_sum

MODES = ("cap", "mask", "off")
LEVELS = ("token", "geometric", "product")


@dataclass(frozen=True)
class Correction:
    """The keywords of `behavior_weight`. A level of sequences needs sequence ids."""

    mode: str = "cap"
    cap: float = 5.0
    low: float | None = None
    level: str = "token"


def finite_mask(mask: Tensor, behavior: Tensor) -> Tensor:
    """Remove tokens from `mask`, bool [t], whose behavior log-prob is not finite.

    Pass the number of tokens that are left as the loss's denominator: a token whose sampling
    probability is unknown leaves both numerator and denominator.
    """
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
    sequence_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute each token's importance weight, float [t], and the mask that is left, bool [t].

    Both are detached, and the weight is 0 outside that mask. Masked tokens and tokens without a
    finite behavior log-prob do not contribute to a sequence's weight. The loss's denominator stays
    the number of tokens in `finite_mask`: a rejected token does not make the others count more.

    Args:
        prox, behavior: float [t], lp_prox and lp_behav of the module
        mask: bool [t]
        mode, cap, low, level: see the module
        sequence_ids: int [t]; needed for levels of sequences

    Raises ValueError for an unknown mode or level, and for bounds that are not 0 <= low <= cap.
    """
    _check(mode, cap, low, level)
    mask = finite_mask(mask, behavior)
    log_ratio = torch.where(mask, prox - behavior, torch.zeros_like(prox)).detach()
    kept = mask
    if level != "token":
        if sequence_ids is None:
            raise ValueError("a correction of whole sequences needs sequence_ids")
        combine = sequence_mean if level == "geometric" else sequence_sum
        log_ratio = combine(log_ratio, mask, sequence_ids)[sequence_ids]
    weight = torch.ones_like(log_ratio) if mode == "off" else log_ratio.exp()
    if mode == "cap":
        weight = weight.clamp(max=cap)
    elif mode == "mask":
        kept = kept & (weight <= cap) & (weight >= (1 / cap if low is None else low))
    return torch.where(kept, weight, torch.zeros_like(weight)), kept


def _check(mode: str, cap: float, low: float | None, level: str) -> None:
    for name, value, known in (("mode", mode, MODES), ("level", level, LEVELS)):
        if value not in known:
            raise ValueError(f"algo.correction.{name}={value}: use one of {', '.join(known)}")
    if not (0 <= (low or 0) <= cap and cap > 0):
        raise ValueError(
            f"algo.correction.low={low} and algo.correction.cap={cap}:"
            " choose 0 <= low <= cap and cap > 0"
        )


def loglinear_prox(behavior: Tensor, theta: Tensor, versions: Tensor, *, version: int) -> Tensor:
    """Approximate proximal log-probs without a forward pass: float [t], detached.

    lp_behav + alpha (lp_theta - lp_behav), alpha = (v_prox - v) / (v_theta - v) (AReaL,
    prox_approx.md), where v is the token's version, v_prox = `version` is the trainer's at the
    start of the step and v_theta = v_prox + 1. A token sampled from the newest weights has alpha 0:
    its behavior policy is the proximal one.

    behavior, theta: float [t], log-probs under the weights that sampled the tokens, and under the
    weights being trained; versions: int [t], the tokens' versions.
    """
    age = (version - versions).clamp(min=0).to(theta.dtype)
    return (behavior + age / (age + 1) * (theta - behavior)).detach()

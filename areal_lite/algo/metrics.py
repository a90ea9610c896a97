"""Diagnostics: detached sums over unmasked tokens, which add up over microbatches and ranks.

Divide a sum by the number of tokens for a mean. A name that ends in `_max` is a maximum.
"""

import torch
from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""Beyond it a ratio is extreme: e^20 is 5e8."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Compute exp(x), continued by its tangent above LARGEST_LOG_RATIO.

    The value and the gradient stay finite in float32, and the gradient keeps its direction.
    """
    inside = log_ratio.clamp(max=LARGEST_LOG_RATIO)
    return inside.exp() * (1 + (log_ratio - inside))


def mismatch(prox: Tensor, behavior: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Measure how far the proximal policy is from the behavior policy, with d = lp_prox - lp_behav.

    behave_kl: k3 estimate of KL(behavior || proximal), exp(d) - d - 1 >= 0; behave_kl_k1: -d;
    behave_abs: |d|; weight_sum, weight_square_sum: of w = exp(d), for `effective_sample_size`;
    weight_max: the largest w.
    """
    difference = torch.where(mask, prox - behavior, torch.zeros_like(prox)).detach()
    weight = torch.where(mask, bounded_exp(difference), torch.zeros_like(difference))
    return {
        "behave_kl": torch.where(mask, weight - difference - 1, torch.zeros_like(difference)).sum(),
        "behave_kl_k1": -difference.sum(),
        "behave_abs": difference.abs().sum(),
        "weight_sum": weight.sum(),
        "weight_square_sum": (weight**2).sum(),
        "weight_max": weight.max() if len(weight) else weight.new_zeros(()),
    }


def combined(one: dict[str, Tensor], two: dict[str, Tensor]) -> dict[str, Tensor]:
    """Combine the metrics of two sets of tokens, which have the same names."""
    return {
        name: torch.maximum(x, two[name]) if name.endswith("_max") else x + two[name]
        for name, x in one.items()
    }


def effective_sample_size(weight_sum: float, weight_square_sum: float, count: float) -> float:
    """Compute (sum w)^2 / (N sum w^2), between 0 and 1; 0 without tokens.

    It is the share of N tokens that an equally good unweighted estimate needs (Kong, 1992;
    PipelineRL, arXiv 2509.19128, eq. 6).
    """
    return weight_sum**2 / (count * weight_square_sum) if count and weight_square_sum else 0.0


def ratio_sums(ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Sum r and (r - 1)^2, the chi-square distance of the update, and find the largest r.

    extreme_ratios: the number of ratios beyond e^20 or e^-20.
    """
    ratio = torch.where(mask, ratio, torch.ones_like(ratio)).detach()
    used = torch.where(mask, ratio, torch.zeros_like(ratio))
    return {
        "ratio": used.sum(),
        "ratio_max": used.max() if len(used) else used.new_zeros(()),
        "ratio_chi2": ((ratio - 1) ** 2).sum(),
        "extreme_ratios": (ratio.log().abs() > LARGEST_LOG_RATIO).sum(),
    }


def clip_counts(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> dict[str, Tensor]:
    """Count the tokens whose gradient a clip removes.

    `_high`: A > 0; `_low`: A < 0; `_dual`: A < 0 and r > c; clip_fraction: high + low.
    """
    above = (mask & (advantages > 0) & (ratio > 1 + eps_high)).sum()
    below = (mask & (advantages < 0) & (ratio < 1 - eps_low)).sum()
    counts = {"clip_fraction": above + below}
    counts |= {"clip_fraction_high": above, "clip_fraction_low": below}
    if dual_clip is not None:
        counts["clip_fraction_dual"] = (mask & (advantages < 0) & (ratio > dual_clip)).sum()
    return counts


def by_staleness(
    values: Tensor, versions: Tensor, mask: Tensor, *, version: int, oldest: int
) -> tuple[Tensor, Tensor]:
    """Sum `values` and count tokens by staleness: (float [oldest + 1], int64 [oldest + 1]).

    Entry i is about staleness i = version - v. Older tokens count at `oldest`.
    """
    age = (version - versions[mask]).clamp(0, oldest).long()
    values = values[mask].detach()
    sums = values.new_zeros(oldest + 1).index_add_(0, age, values)
    return sums, torch.bincount(age, minlength=oldest + 1)

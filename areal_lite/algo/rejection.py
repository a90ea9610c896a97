"""Rejection of tokens that the policy has moved too far from, besides their weight.

With p and q the probabilities of a token under the proximal and the behavior policy, r = p / q and
d = log r, its distance is

    ratio        r
    k1           d
    square       d^2, whose mean is M2PO's second moment (arXiv 2510.01161); twice k2
    k3           exp(d) - 1 - d, estimates KL(behavior || proximal); losses.py has the source
    k3_reverse   exp(-d) - 1 + d, the same estimate for tokens of the proximal policy; kl_k3 of
                 inclusionAI/AReaL (areal/utils/data.py)
    tv           |p - q|, the total variation if all other tokens count as one (DPPO's binary
                 approximation, arXiv 2602.04879)
    binary_kl    the larger of the KL divergences from and to the behavior policy, if all other
                 tokens count as one: p log(p / q) + (1 - p) log((1 - p) / (1 - q)), and the same
                 with p and q exchanged (KPop)

Levels, the unit that is rejected when its distance is above a bound or below another:

    token        a token by its own distance
    sequence     all tokens of a sequence, by the mean of their distances: of `ratio`, the
                 arithmetic mean of the sequence's ratios
    batch        the tokens with the largest distances of an update, until the mean of the others is
                 below the bound: of `square`, the mask of M2PO

With `outward`, only tokens that the update would move further away can be rejected: A d > 0, where
A is the advantage (DPPO; so does M2PO's code, Infini-AI-Lab/M2PO). The denominator counts a
rejected token, as in correction.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lite.algo.sequences import sequence_mean

LEVELS = ("token", "sequence", "batch")
# Where p or 1 - p is smaller, the divergence of KPop is computed with this (as prime-rl does).
_LEAST = 1e-6


def _binary_kl(prox: Tensor, behavior: Tensor) -> Tensor:
    bounds = math.log(_LEAST), math.log1p(-_LEAST)
    log_p, log_q = prox.clamp(*bounds), behavior.clamp(*bounds)
    chosen = log_p - log_q
    other = torch.log1p(-log_p.exp()) - torch.log1p(-log_q.exp())
    forward, reverse = (lp.exp() * chosen + (1 - lp.exp()) * other for lp in (log_p, log_q))
    return torch.maximum(forward, -reverse).clamp(min=0)


_DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ratio": lambda prox, behavior: (prox - behavior).exp(),
    "k1": lambda prox, behavior: prox - behavior,
    "square": lambda prox, behavior: (prox - behavior) ** 2,
    "k3": lambda prox, behavior: torch.expm1(prox - behavior) - (prox - behavior),
    "k3_reverse": lambda prox, behavior: torch.expm1(behavior - prox) + (prox - behavior),
    "tv": lambda prox, behavior: (prox.exp() - behavior.exp()).abs(),
    "binary_kl": _binary_kl,
}
DISTANCES = tuple(_DISTANCES)
_LARGEST = 0x7F7FFFFF  # the bits of the largest finite float32


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """Settings of the rejection; see the module. `by=None` rejects nothing."""

    by: str | None = None
    level: str = "token"
    above: float = 0.2
    below: float | None = None
    outward: bool = False


@torch.no_grad()
def distance(prox: Tensor, behavior: Tensor, mask: Tensor, *, by: str) -> Tensor:
    """Compute the distance of each token, float [t], 0 where masked."""
    if by not in _DISTANCES:
        raise ValueError(f"by={by}: use one of {', '.join(DISTANCES)}")
    zero = torch.zeros_like(prox)
    values = _DISTANCES[by](torch.where(mask, prox, zero), torch.where(mask, behavior, zero))
    return torch.where(mask, values, zero)


def accepted(
    prox: Tensor,
    behavior: Tensor,
    mask: Tensor,
    rejection: Rejection,
    *,
    sequence_ids: Tensor,
    advantages: Tensor,
    limit: Tensor | None = None,
) -> Tensor:
    """Return the unmasked tokens that are not rejected, bool [t].

    mask: bool [t], without tokens that have no finite behavior log-prob; sequence_ids: int [t];
    advantages: float [t]; limit: from `batch_limit`, for level `batch`.
    """
    if rejection.by is None:
        return mask
    values = distance(prox, behavior, mask, by=rejection.by)
    if rejection.level == "sequence":
        values = sequence_mean(values, mask, sequence_ids)[sequence_ids]
    far = values > rejection.above if limit is None else values.float() > limit
    if rejection.below is not None:
        far = far | (values < rejection.below)
    if rejection.outward:
        far = far & outward(prox, behavior, advantages)
    return mask & ~far


def outward(prox: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    """Mark the tokens whose update moves them further from the behavior policy: bool [t]."""
    return advantages * (prox - behavior) > 0


@torch.no_grad()
def batch_limit(
    values: Tensor, *, bound: float, reduce: Callable[[Tensor], Tensor] = lambda partial: partial
) -> Tensor:
    """Find the largest limit such that the values up to it have a mean below `bound`: a scalar.

    Every rank calls it, with the values of its tokens, float [t] >= 0. `reduce` sums over ranks.
    Equal values stay or leave together. The bits of positive float32 numbers are in the order of
    the numbers, so each round finds eight bits of the limit.
    """
    ordered = values.float().sort().values
    sums = torch.cat([ordered.new_zeros(1), ordered]).double().cumsum(0)
    digits = torch.arange(256, dtype=torch.int32, device=values.device)
    limit = torch.zeros_like(digits[:1])
    for shift, choices in ((24, 128), (16, 256), (8, 256), (0, 256)):
        candidates = (limit + (digits[:choices] << shift)).clamp(max=_LARGEST)
        below = torch.searchsorted(ordered, candidates.view(torch.float32), right=True)
        count, total = reduce(torch.stack([below.double(), sums[below]]))
        # The mean grows with the limit, so all candidates up to the last good one are good.
        good = (total < bound * count) | (count == 0)
        limit = candidates[good.sum() - 1].view(1)
    return limit.view(torch.float32)[0]

"""Metrics of a flat batch; algo/metrics.py has their formulas."""

import torch
from torch import Tensor

from areal_lite.algo.kl import kl_estimate
from areal_lite.algo.metrics import by_staleness, entropy_sum
from areal_lite.algo.objectives.base import FlatBatch, Reduce


@torch.no_grad()
def token_metrics(
    tokens: FlatBatch, logprobs: Tensor, entropy: Tensor, *, to_reference: bool
) -> dict[str, Tensor]:
    """Sum, over a microbatch's unmasked tokens, what every objective reports.

    Args:
        tokens: of the microbatch
        logprobs, entropy: float [t], under the weights being trained
        to_reference: measure the divergence from the reference policy
    """
    metrics = {
        "entropy": entropy_sum(entropy, tokens.mask).float(),
        "trained_tokens": tokens.mask.sum().float(),
    }
    if to_reference:
        divergence = kl_estimate(logprobs, tokens.reference, tokens.mask, estimator="k3")
        metrics["reference_kl"] = divergence.sum().float()
    return metrics


def batch_metrics(
    flat: FlatBatch, *, oldest: int, mask_truncated: bool, reduce: Reduce
) -> dict[str, float | list[float]]:
    """Count tokens by staleness and masked tokens by reason. Every rank calls it.

    `behave_abs_by_staleness` is the mean |prox - behavior| of each staleness, in nats. Where tokens
    are fresh, `mismatch_square` is the mean square of their difference, and `stale_square` what the
    older tokens have besides (algo/mismatch.py).

    Args:
        oldest: the staleness bound; an older token is overdue
        mask_truncated: sequences that ended at the token limit are masked
        reduce: the sum over data-parallel ranks
    """
    masked = flat.sampled & ~flat.mask
    truncated = masked & flat.truncated[flat.sequence_ids] & mask_truncated
    overdue = masked & ~truncated & (flat.version - flat.versions > oldest)
    reasons = {
        "masked_truncated": truncated,
        "masked_overdue": overdue,
        "masked_nonfinite": masked & ~truncated & ~overdue,
    }
    difference = (flat.prox - flat.behavior).double()
    where = {"version": flat.version, "oldest": oldest}
    absolute, tokens = by_staleness(difference.abs(), flat.versions, flat.mask, **where)
    square, _ = by_staleness(difference**2, flat.versions, flat.mask, **where)
    counts = torch.stack([reason.sum() for reason in reasons.values()])
    # One collective for all of them.
    parts = [counts, tokens, absolute, square]
    total = reduce(torch.cat(parts).double()).split([len(part) for part in parts])
    counts, tokens, absolute, square = (part.tolist() for part in total)
    return {
        **dict(zip(reasons, counts)),
        "tokens_by_staleness": tokens,
        "behave_abs_by_staleness": [d / max(n, 1.0) for d, n in zip(absolute, tokens)],
        **_two_causes(tokens, square),
    }


def _two_causes(tokens: list[float], square: list[float]) -> dict[str, float]:
    """Split the mean square of log-ratios, given counts and sums by staleness."""
    if not tokens[0]:
        return {}
    mismatch, older = square[0] / tokens[0], sum(tokens[1:])
    if not older:
        return {"mismatch_square": mismatch}
    stale = max(sum(square[1:]) / older - mismatch, 0.0)
    return {"mismatch_square": mismatch, "stale_square": stale}

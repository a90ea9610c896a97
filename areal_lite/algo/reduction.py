"""From token losses to one number: loss = sum_t weight_t L_t, with counts over all ranks and microbatches.

    token       weight = m / N                N: unmasked tokens                          (DAPO, arXiv 2503.14476, eq. 12)
    sequence    weight = m / (n_i S)          n_i: unmasked tokens of the sequence, S: sequences with any (GRPO, arXiv 2402.03300, eq. 3)
    constant    weight = m / (S L)            L: a constant length, such as max_new_tokens (Dr. GRPO, arXiv 2503.20783, listing 1)

The caller sums `reduction_count` over its minibatch and its ranks, and passes the sum as `denominator`: shares then add up however sequences
were packed. Under `sequence` a microbatch holds whole sequences. Rejected tokens keep their place in the count (algo/correction.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lite.algo.sequences import sequence_length

REDUCTIONS = ("token", "sequence", "constant")


def reduction_count(mask: Tensor, sequence_ids: Tensor, *, mode: str) -> int:
    """This part's share of the denominator: unmasked tokens (`token`) or sequences with an unmasked token (`sequence`, `constant`)."""
    _check(mode)
    return (
        int(mask.sum()) if mode == "token" else int((sequence_length(mask, sequence_ids) > 0).sum())
    )


def reduction_weights(
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    mode: str,
    denominator: float,
    length: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight of each token, float [t], 0 where masked. `denominator`: the global sum of `reduction_count`; 0, no token, is taken as 1.

    Raises ValueError for an unknown mode, and for `constant` without a `length`.
    """
    _check(mode)
    if mode == "constant" and not length:
        raise ValueError(
            "reduction 'constant' needs a length in tokens; pass length=max_new_tokens"
        )
    weights = mask.to(dtype) / max(denominator, 1)
    if mode == "sequence":
        return weights / sequence_length(mask, sequence_ids).clamp(min=1)[sequence_ids]
    return weights / length if mode == "constant" else weights


def _check(mode: str) -> None:
    if mode not in REDUCTIONS:
        raise ValueError(f"reduction is {mode!r}; choose one of {', '.join(REDUCTIONS)}")

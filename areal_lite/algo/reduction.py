"""Reductions from token losses to one number: loss = sum_t weight_t L_t.

    token       weight = m / N        N: unmasked tokens (DAPO, arXiv 2503.14476, eq. 12)
    sequence    weight = m / (n_i S)  n_i: unmasked tokens of the sequence, S: sequences with any
                                      (GRPO, arXiv 2402.03300, eq. 3)
    constant    weight = m / (S L)    L: a constant length, such as max_new_tokens
                                      (Dr. GRPO, arXiv 2503.20783, listing 1)

A sequence is all that the policy wrote in an episode. An episode of several traces is one sequence
here, whose tokens may be in several microbatches: `lengths` then has its n_i.

N and S count over all ranks and microbatches: sum `reduction_count` over them and pass the sum as
`denominator`. Shares then add up, however sequences were packed. A rejected token stays in the
count (algo/correction.py).
"""

import torch
from torch import Tensor

from areal_lite.algo.sequences import sequence_length

REDUCTIONS = ("token", "sequence", "constant")


def reduction_count(mask: Tensor, sequence_ids: Tensor, *, mode: str) -> int:
    """Count unmasked tokens, or sequences with an unmasked token, as `mode` needs."""
    _check(mode)
    if mode == "token":
        return int(mask.sum())
    return int((sequence_length(mask, sequence_ids) > 0).sum())


def reduction_weights(
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    mode: str,
    denominator: float,
    length: float | None = None,
    lengths: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute the weight of each token, float [t], 0 where masked.

    Args:
        mask: bool [t]
        sequence_ids: int [t]
        denominator: the global sum of `reduction_count`; 0 is taken as 1
        length: L of `constant`, in tokens
        lengths: int [n], n_i of `sequence`; by default those of whole sequences here

    Raises ValueError for an unknown mode, and for `constant` without a length.
    """
    _check(mode)
    weights = mask.to(dtype) / max(denominator, 1)
    if mode == "constant":
        if not length:
            raise ValueError("length is missing; reduction 'constant' needs one, in tokens")
        return weights / length
    if mode == "sequence":
        lengths = sequence_length(mask, sequence_ids) if lengths is None else lengths
        return weights / lengths.clamp(min=1)[sequence_ids]
    return weights


def _check(mode: str) -> None:
    if mode not in REDUCTIONS:
        raise ValueError(f"algo.reduction={mode}: use one of {', '.join(REDUCTIONS)}")

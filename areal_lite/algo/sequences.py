"""Sums over the sequences of a flat batch, without a loop over sequences or tokens.

`sequence_ids` (int [t], >= 0) says which sequence a token belongs to. Memory grows with the largest id: ids are places in a batch.
Sums do not care where the tokens stand. Only `discounted_sum` needs the tokens of a sequence side by side and in order.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_sum(
    values: Tensor, mask: Tensor, sequence_ids: Tensor, *, num: int | None = None
) -> Tensor:
    """Sum of the unmasked values of each sequence: [t] -> [num], by default the largest id + 1. Carries gradients. Empty ones have 0."""
    num = count_ids(sequence_ids) if num is None else num
    return values.new_zeros(num).index_add(
        0, sequence_ids, torch.where(mask, values, torch.zeros_like(values))
    )


def sequence_length(mask: Tensor, sequence_ids: Tensor, *, num: int | None = None) -> Tensor:
    """Number of unmasked tokens of each sequence: int64 [num]."""
    return torch.bincount(
        sequence_ids[mask], minlength=count_ids(sequence_ids) if num is None else num
    )


def sequence_mean(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Mean of the unmasked values of each sequence; 0 where there is none."""
    total = sequence_sum(values, mask, sequence_ids)
    return total / sequence_length(mask, sequence_ids, num=len(total)).clamp(min=1)


def count_ids(sequence_ids: Tensor) -> int:
    return int(sequence_ids.max()) + 1 if len(sequence_ids) else 0


def group_mean(values: Tensor, present: Tensor, group_ids: Tensor) -> Tensor:
    """Each member's group mean over the members that are `present`: [n] -> [n]; 0 in a group with none. Group ids are any integers."""
    _, group = torch.unique(group_ids, return_inverse=True)
    return sequence_mean(values, present, group)[group]


def discounted_sum(values: Tensor, sequence_ids: Tensor, discount: float) -> Tensor:
    """Reverse discounted sums y_t = x_t + c y_{t+1} within each sequence, whose tokens stand side by side. float [t] -> [t].

    Doubling (Hillis and Steele, 1986): after k passes y_t covers 2^k tokens, y_t += c^(2^k) y_{t + 2^k}, until it covers the longest.
    Dividing a cumulative sum by powers of c would need one pass, and overflows after some hundred tokens.
    """
    result, reach = values.clone(), 1
    longest = int(torch.bincount(sequence_ids).max()) if len(sequence_ids) else 0
    while reach < longest:
        same = sequence_ids[:-reach] == sequence_ids[reach:]
        result[:-reach] += torch.where(
            same, discount**reach * result[reach:], torch.zeros_like(result[reach:])
        )
        reach *= 2
    return result

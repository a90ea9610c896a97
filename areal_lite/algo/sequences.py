"""Sums over the sequences of a flat batch, without a loop over sequences or tokens.

`sequence_ids`, int [t] and >= 0, gives each token's sequence. Results have one entry per id, so ids
should be small, such as indices in a batch. Tokens may stand in any order, except for
`discounted_sum`.
"""

import torch
from torch import Tensor


def sequence_sum(
    values: Tensor, mask: Tensor, sequence_ids: Tensor, *, num: int | None = None
) -> Tensor:
    """Sum the unmasked values of each sequence: [t] -> [num], with gradient; 0 for an empty one.

    num: the number of sequences; the largest id + 1 by default.
    """
    num = count_ids(sequence_ids) if num is None else num
    return values.new_zeros(num).index_add(
        0, sequence_ids, torch.where(mask, values, torch.zeros_like(values))
    )


def sequence_length(mask: Tensor, sequence_ids: Tensor, *, num: int | None = None) -> Tensor:
    """Count the unmasked tokens of each sequence: int64 [num]."""
    return torch.bincount(
        sequence_ids[mask], minlength=count_ids(sequence_ids) if num is None else num
    )


def sequence_mean(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Average the unmasked values of each sequence: [t] -> [num]. An empty one has mean 0."""
    total = sequence_sum(values, mask, sequence_ids)
    return total / sequence_length(mask, sequence_ids, num=len(total)).clamp(min=1)


def count_ids(sequence_ids: Tensor) -> int:
    """Return the largest id + 1."""
    return int(sequence_ids.max()) + 1 if len(sequence_ids) else 0


def group_mean(values: Tensor, present: Tensor, group_ids: Tensor) -> Tensor:
    """Average the `present` values of each entry's group: [n] -> [n]; 0 in a group with none.

    values: float [n]; present: bool [n]; group_ids: any integers [n].
    """
    _, group = torch.unique(group_ids, return_inverse=True)
    return sequence_mean(values, present, group)[group]


def discounted_sum(values: Tensor, sequence_ids: Tensor, discount: float) -> Tensor:
    """Sum backward with a discount, y_t = x_t + c y_{t+1}, within each sequence: float [t] -> [t].

    The tokens of a sequence stand side by side, in order. By doubling (Hillis and Steele, 1986):
    after k passes y_t covers 2^k tokens, and a pass adds c^(2^k) y_{t + 2^k}, until the longest
    sequence is covered. A cumulative sum divided by powers of c would take one pass, but it
    overflows after some hundred tokens.
    """
    result = values.clone()
    reach = 1
    longest = int(torch.bincount(sequence_ids).max()) if len(sequence_ids) else 0
    while reach < longest:
        same = sequence_ids[:-reach] == sequence_ids[reach:]
        result[:-reach] += torch.where(
            same, discount**reach * result[reach:], torch.zeros_like(result[reach:])
        )
        reach *= 2
    return result

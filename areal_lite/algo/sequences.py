"""Sums over the sequences of a flat batch, and reductions from token losses to one number.

`sequence_ids`, int [t] and >= 0, gives each token's sequence. Results have one entry per id, so ids
should be small, such as indices in a batch. Tokens may stand in any order, except for
`discounted_sum`. Nothing loops over sequences or tokens.

A reduction gives every token a weight: loss = sum_t weight_t L_t.

    token       weight = m / N        N: unmasked tokens (DAPO, arXiv 2503.14476, eq. 12)
    sequence    weight = m / (n_i S)  n_i: unmasked tokens of the sequence, S: sequences with any
                                      (GRPO, arXiv 2402.03300, eq. 3)
    constant    weight = m / (S L)    L: a constant length, such as max_new_tokens
                                      (Dr. GRPO, arXiv 2503.20783, listing 1)

A sequence of a reduction is all that the policy wrote in an episode. The tokens of an episode of
several traces may be in several microbatches: `lengths` then has its n_i.

N and S count over all ranks and microbatches: sum `reduction_count` over them and pass the sum as
`denominator`. Shares then add up, however sequences were packed. A rejected token stays in the
count (correction.py).
"""

import torch
from torch import Tensor

REDUCTIONS = ("token", "sequence", "constant")


def sequence_sum(
    values: Tensor, mask: Tensor, sequence_ids: Tensor, *, num: int | None = None
) -> Tensor:
    """Sum the unmasked values of each sequence: [t] -> [num], with gradient; 0 for an empty one.

    num: the number of sequences; by default the largest id + 1.
    """
    num = count_ids(sequence_ids) if num is None else num
    unmasked = torch.where(mask, values, torch.zeros_like(values))
    return values.new_zeros(num).index_add(0, sequence_ids, unmasked)


def sequence_length(mask: Tensor, sequence_ids: Tensor, *, num: int | None = None) -> Tensor:
    """Count the unmasked tokens of each sequence: int64 [num]."""
    num = count_ids(sequence_ids) if num is None else num
    return torch.bincount(sequence_ids[mask], minlength=num)


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


def discounted_sum(values: Tensor, sequence_ids: Tensor, discount: float | Tensor) -> Tensor:
    """Sum backward, y_t = x_t + c_t y_{t+1}, within each sequence: float [t] -> [t].

    The tokens of a sequence stand side by side, in order. discount: c, or c_t as float [t].

    By doubling (Hillis and Steele, 1986): after k passes y_t covers 2^k tokens. A cumulative sum
    divided by powers of c would take one pass, but it overflows after some hundred tokens.
    """
    result, reach = values.clone(), 1
    longest = int(torch.bincount(sequence_ids).max()) if len(sequence_ids) else 0
    factor = torch.as_tensor(discount, dtype=values.dtype, device=values.device)
    factor = factor.expand(len(values)) * ~ends(sequence_ids)  # of what is `reach` tokens further
    while reach < longest:
        result[:-reach] += factor[:-reach] * result[reach:]
        factor = factor[:-reach] * factor[reach:]
        factor = torch.nn.functional.pad(factor, (0, reach))
        reach *= 2
    return result


def ends(ids: Tensor) -> Tensor:
    """Return which tokens are the last ones of a run of equal ids: int [t] -> bool [t]."""
    last = torch.ones_like(ids, dtype=torch.bool)
    last[:-1] = ids[1:] != ids[:-1]
    return last


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
        denominator: the global sum of `reduction_count`; 0 is taken as 1
        length: L of `constant`, in tokens; ValueError without it
        lengths: int [n], n_i of `sequence`; by default the lengths of the sequences here
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

"""The critic's loss: regression of values on the returns of `gae` (algo/advantages.py)."""

import torch
from torch import Tensor

from areal_lite.algo.losses import LossOutput


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    clip: float | None,
) -> LossOutput:
    """Compute sum_t weight_t max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2.

    The clip bounds how far a value moves in a step, like the ratio of a policy (the clipped value
    loss of the reference implementation of PPO, arXiv 1707.06347). Metrics are sums over unmasked
    tokens.

    Args:
        values: float [t], V, with gradient
        old_values: float [t], V_old, before the step
        returns: float [t], R
        mask: bool [t]
        weights: float [t], from algo/reduction.py
        clip: c; None for no bound
    """
    zeros = torch.zeros_like(values)
    error = (values - returns) ** 2
    clipped = torch.zeros_like(mask)
    if clip is not None:
        move = values - old_values
        bounded = (old_values + move.clamp(-clip, clip) - returns) ** 2
        clipped = mask & (move.abs() > clip) & (bounded > error)
        error = torch.maximum(error, bounded)
    loss = (weights * torch.where(mask, error, zeros)).sum() / 2
    metrics = {
        "value": torch.where(mask, values, zeros).sum(),
        "value_clip_fraction": clipped.sum(),
        "value_error": torch.where(mask, (values - returns) ** 2, zeros).sum(),
        "return": torch.where(mask, returns, zeros).sum(),
        "return_square": torch.where(mask, returns**2, zeros).sum(),
    }
    return LossOutput(loss, {name: value.detach().float() for name, value in metrics.items()})

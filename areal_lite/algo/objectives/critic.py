"""The critic's objective: its values approach the returns of generalized advantage estimation."""

from torch import Tensor

from areal_lite.algo.losses import LossOutput
from areal_lite.algo.objectives.base import FlatBatch
from areal_lite.algo.value import value_loss


def critic_loss(
    batch: FlatBatch,
    token_index: Tensor,
    values: Tensor,
    *,
    clip: float | None,
    denominator: float,
) -> LossOutput:
    """Compute one microbatch's share of the critic's loss, a mean over tokens.

    Args:
        token_index: int64 [t], the tokens of the microbatch
        values: float [t], of the critic being trained, with gradient
        clip: how far a value may move in a step; None: no bound
        denominator: the tokens of the update over all ranks, whatever the policy's reduction is
    """
    tokens = batch.at(token_index)
    weights = tokens.mask.float() / denominator
    output = value_loss(values, tokens.values, tokens.returns, tokens.mask, weights, clip=clip)
    return LossOutput(output.loss, output.metrics | {"trained_tokens": tokens.mask.sum().float()})

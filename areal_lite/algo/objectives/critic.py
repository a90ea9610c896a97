"""The critic's objective: its values approach the returns of generalized advantage estimation."""

from torch import Tensor

from areal_lite.algo.losses import LossOutput
from areal_lite.algo.objectives.base import FlatBatch, Minibatch
from areal_lite.algo.value import value_loss


def critic_loss(
    batch: FlatBatch,
    minibatch: Minibatch,
    token_index: Tensor,
    values: Tensor,
    *,
    clip: float | None,
) -> LossOutput:
    """Compute one microbatch's share of the critic's loss, a mean over tokens.

    Args:
        minibatch: its denominator counts tokens, whatever the policy's reduction is
        token_index: int64 [t], the tokens of the microbatch
        values: float [t], of the critic being trained, with gradient
        clip: how far a value may move in a step; None: no bound
    """
    tokens = batch.at(token_index)
    weights = tokens.mask.float() / minibatch.denominator
    output = value_loss(values, tokens.values, tokens.returns, tokens.mask, weights, clip=clip)
    return LossOutput(output.loss, output.metrics | {"trained_tokens": tokens.mask.sum().float()})

"""Critic: a value model on the policy's engine, from the same Hugging Face folder.

A scalar value layer, zero at first, stands in place of the output layer. Entry i of the values is
the value of the state before token i, computed from the tokens before it, as with log-probs. The
first token of a sequence has no state before it. Its entry is the value of the state after the
sequence's last token, from which a truncated sequence would continue.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from areal_lite.config import TrainerConfig
from areal_lite.megatron.head import value_head
from areal_lite.megatron.packing import Microbatch
from areal_lite.megatron.trainable import TrainableModel

# (values [t], microbatch) -> (share of the global loss, detached scalars to sum).
# The values carry gradients.
ValueLossFn = Callable[[Tensor, Microbatch], tuple[Tensor, dict[str, Tensor]]]


class Critic(TrainableModel):
    """A value model. Optimizer, schedule and clipping are those of its own TrainerConfig."""

    part = "critic"

    def __init__(self, config: TrainerConfig, model_path: str | Path, seed: int):
        super().__init__(config, model_path, seed, with_values=True)

    def values(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Compute the values of all tokens of a flat batch: float32 [T], on every rank.

        The microbatches partition the batch.
        """
        return self.outputs(microbatches, value_head)[0]

    def update(self, microbatches: Sequence[Microbatch], loss_fn: ValueLossFn) -> dict[str, float]:
        """Run one optimizer step on the sum of `loss_fn` over the microbatches.

        See `TrainableModel.step`.
        """
        return self.step(microbatches, value_head, loss_fn)

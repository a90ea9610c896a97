"""Critic: a value model on the policy's engine, from the same Hugging Face folder, with a scalar value layer instead of the output layer.

Entry i of the values is the value of the state before token i, made of the tokens before it (0 for a sequence's first token): the same
alignment as the log-probs of the policy. The value layer starts at zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from areal_lite.config import TrainerConfig
from areal_lite.megatron.head import value_head
from areal_lite.megatron.packing import Microbatch
from areal_lite.megatron.trainable import TrainableModel

# (values [t], microbatch) -> (this microbatch's share of the global loss, detached scalars to sum); values carry gradients.
ValueLossFn = Callable[[Tensor, Microbatch], tuple[Tensor, dict[str, Tensor]]]


class Critic(TrainableModel):
    """Its optimizer, learning rate, schedule and clipping are those of the TrainerConfig that it is given."""

    part = "critic"

    def __init__(self, config: TrainerConfig, model_path: str | Path, seed: int):
        super().__init__(config, model_path, seed, with_values=True)

    def values(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """float32 [T] on the critic's device, on every rank: the values of all tokens of the flat batch that `microbatches` partition."""
        return self.outputs(microbatches, value_head)

    def update(self, microbatches: Sequence[Microbatch], loss_fn: ValueLossFn) -> dict[str, float]:
        """One optimizer step on the sum of what `loss_fn` returns; see `TrainableModel.step`."""
        return self.step(microbatches, value_head, loss_fn)

"""Policy: log-probs, updates, weights out, checkpoints. One object per trainer rank; every rank calls every method.

It owns model, optimizer and learning-rate schedule, and knows nothing of rewards, advantages or servers: the loss is a function given
to `update`. Entry i of any per-token result belongs to token i: log p(token i | the tokens before it in its sequence), with 0 for each
sequence's first token, which nothing predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from areal_lite.config import TrainerConfig
from areal_lite.megatron import hf
from areal_lite.megatron.head import language_head
from areal_lite.megatron.packing import Microbatch
from areal_lite.megatron.trainable import TrainableModel

# (logprobs [t], entropy [t], microbatch) -> (this microbatch's share of the global loss, detached scalars to sum); inputs carry gradients.
LossFn = Callable[[Tensor, Tensor, Microbatch], tuple[Tensor, dict[str, Tensor]]]


class Policy(TrainableModel):
    """The trainer's policy and its optimizer on this rank. Raises ValueError for a model or a setting that is not supported."""

    def __init__(self, config: TrainerConfig, model_path: str | Path, seed: int):
        super().__init__(config, model_path, seed)
        self.weights = hf.WeightStream(self.model, self.hf_config)

    def logprobs(self, microbatches: Sequence[Microbatch], temperature: float = 1.0) -> Tensor:
        """float32 [T] on the engine's device, on every rank: log-probs of all tokens of the flat batch that `microbatches` partition."""
        return self.outputs(
            microbatches,
            language_head(temperature, self.hf_config.vocab_size, self.config.fp32_head),
        )

    def update(
        self, microbatches: Sequence[Microbatch], loss_fn: LossFn, temperature: float = 1.0
    ) -> dict[str, float]:
        """One optimizer step on the sum of what `loss_fn` returns; see `TrainableModel.step`."""
        return self.step(
            microbatches,
            language_head(temperature, self.hf_config.vocab_size, self.config.fp32_head),
            loss_fn,
        )

    def hf_weights(self, bucket_bytes: int) -> Iterator[hf.Bucket]:
        """Buckets of whole tensors under their Hugging Face names, in the training dtype; see `hf.WeightStream` for who iterates, and how."""
        return self.weights.buckets(bucket_bytes)

    def export_hf(self, folder: str | Path) -> None:
        """Write a Hugging Face checkpoint; it is complete when the call returns on any rank."""
        if self.weights.takes_part:
            buckets = self.hf_weights(hf.SHARD_BYTES)
            if dist.get_rank() == 0:
                hf.export_hf(buckets, self.source, Path(folder), self.dtype)
            else:
                for _ in buckets:
                    pass
        dist.barrier()

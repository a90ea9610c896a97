"""The models that train: the policy, with log-probs, updates and exported weights, and the critic.

Each trainer rank has one object of each, and every rank calls every method. It owns the model, the
optimizer and the learning-rate schedule. It knows nothing of rewards, advantages or servers: the
loss is a function given to `update`. Entry i of a per-token result is about token i:
log p(token i | the tokens before it). It is 0 for the first token of a sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from areal_lite.config import TrainerConfig
from areal_lite.megatron.hf.files import SHARD_BYTES, export_hf
from areal_lite.megatron.hf.stream import AdapterStream, Bucket, WeightStream
from areal_lite.megatron.logprobs import value_head
from areal_lite.megatron.lora import added_share
from areal_lite.megatron.packing import Microbatch
from areal_lite.megatron.routing_replay import changed_share, install_replay
from areal_lite.megatron.trainable import LrFactor, TrainableModel

# (logprobs [t], entropy [t], microbatch) -> (share of the global loss, detached scalars to sum).
# Log-probs and entropy carry gradients.
LossFn = Callable[[Tensor, Tensor, Microbatch], tuple[Tensor, dict[str, Tensor]]]
# (values [t], microbatch) -> (share of the global loss, detached scalars to sum).
# The values carry gradients.
ValueLossFn = Callable[[Tensor, Microbatch], tuple[Tensor, dict[str, Tensor]]]


class Policy(TrainableModel):
    """The trained policy on this rank.

    routing_replay: whether its routers follow the routes of a batch (routing_replay.py).

    Raises ValueError for a model or a setting that is not supported.
    """

    def __init__(
        self,
        config: TrainerConfig,
        model_path: str | Path,
        seed: int,
        routing_replay: bool = False,
    ):
        super().__init__(config, model_path, seed)
        self.replays_routes = routing_replay
        if routing_replay:
            for chunk in self.chunks:
                chunk.replays = install_replay(chunk, self.device)
        self.weights = WeightStream(self.chunks, self.hf_config)
        lora = config.lora.rank > 0
        self.adapters = AdapterStream(self.chunks, self.hf_config) if lora else None

    def logprobs(self, microbatches: Sequence[Microbatch], temperature: float = 1.0) -> Tensor:
        """Compute the log-probs of all tokens of a flat batch: float32 [T], on every rank.

        The microbatches partition the batch.
        """
        return self.outputs(microbatches, self.language_head(temperature))[0]

    def logprobs_and_entropies(
        self, microbatches: Sequence[Microbatch], temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Compute the log-probs and entropies of all tokens, in nats: float32 [T] each.

        The microbatches partition the batch. Every rank gets the results.
        """
        logprobs, entropies = self.outputs(microbatches, self.language_head(temperature), num=2)
        return logprobs, entropies

    def routes_changed(self) -> float:
        """Return the share of recorded routes that the policy itself would not have chosen.

        See `changed_share`.
        """
        return changed_share([replay for chunk in self.chunks for replay in chunk.replays])

    def adapter_share(self) -> float:
        """Return the size of what the adapters add to the weights; see `added_share`."""
        return added_share(self.chunks)

    def update(
        self,
        microbatches: Sequence[Microbatch],
        loss_fn: LossFn,
        temperature: float = 1.0,
        lr_factor: LrFactor | None = None,
    ) -> dict[str, float]:
        """Run one optimizer step on the sum of `loss_fn` over the microbatches.

        See `TrainableModel.step`.
        """
        return self.step(microbatches, self.language_head(temperature), loss_fn, lr_factor)

    def hf_weights(self, bucket_bytes: int) -> Iterator[Bucket]:
        """Iterate over buckets of whole tensors with their Hugging Face names, in training dtype.

        See `WeightStream.buckets` for the ranks that iterate.
        """
        return self.weights.buckets(bucket_bytes)

    def export_hf(self, folder: str | Path) -> None:
        """Write a Hugging Face checkpoint. It is complete when the call returns on any rank."""
        buckets = self.hf_weights(SHARD_BYTES)
        if dist.get_rank() == 0:
            export_hf(buckets, self.source, Path(folder), self.dtype)
        else:
            for _ in buckets:
                pass
        dist.barrier()


class Critic(TrainableModel):
    """A value model from the policy's folder, with a TrainerConfig of its own.

    A scalar value layer, zero at first, stands in place of the output layer. Entry i of the values
    is the value of the state before token i. The first token of a sequence has no state before it.
    Its entry is the value of the state after the sequence's last token, from which a truncated
    sequence would continue.
    """

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

"""The models that train: the policy, with log-probs, updates and exported weights, and the critic.

Each trainer rank has one object of each, and every rank calls every method. A model knows nothing
of rewards, advantages or servers: the loss is a function given to `update`.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import Tensor

from areal_lite.config import TrainerConfig
from areal_lite.megatron.checkpoint import PendingCheckpoint, load_checkpoint
from areal_lite.megatron.hf import SHARD_BYTES, AdapterStream, Bucket, WeightStream, export_hf
from areal_lite.megatron.logprobs import Head, value_head
from areal_lite.megatron.lora import added_share
from areal_lite.megatron.optimizer import (
    apply_gradients,
    build_optimizer,
    build_scheduler,
    is_sharded,
    offload,
    onload,
)
from areal_lite.megatron.packing import Microbatch
from areal_lite.megatron.parallel_model import ParallelModel, is_filler
from areal_lite.megatron.routing_replay import changed_share, install_replay

# (*results, microbatch) -> (share of the global loss, detached scalars to sum). Results, [t] each,
# carry gradients: log-probs and entropies of a policy, values of a critic.
LossFn = Callable[..., tuple[Tensor, dict[str, Tensor]]]


class TrainableModel(ParallelModel):
    """A ParallelModel with gradients, optimizer, schedule and checkpoints."""

    part = "policy"  # its name in a checkpoint

    def __init__(
        self, config: TrainerConfig, model_path: str | Path, seed: int, with_values: bool = False
    ):
        super().__init__(config, model_path, seed, with_values)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=is_sharded(config)
        )
        self.ddps = [
            DistributedDataParallel(config=chunk.config, ddp_config=ddp_config, module=chunk)
            for chunk in self.chunks
        ]
        self.optimizer = build_optimizer(config, self.dtype, self.ddps)
        self.scheduler = build_scheduler(config, self.optimizer)

    def step(
        self,
        microbatches: Sequence[Microbatch],
        head: Head,
        loss_fn: LossFn,
        lr_factor: float = 1.0,
    ) -> dict[str, float]:
        """Run one optimizer step on the sum of the losses, without rescaling it.

        The sum is over microbatches and data-parallel ranks. The schedule advances even when the
        step is skipped: update k, counted from 1, uses its k-th learning rate.

        Args:
            microbatches: at least one; ValueError otherwise.
            head: makes the per-token results.
            loss_fn: is called on the last pipeline stage, on all context- and tensor-parallel ranks
                alike, with whole microbatches. The scalars have the same names for every
                microbatch on every rank; `*_max` are reduced to their maximum.
            lr_factor: multiplies the learning rate of this step only.

        Returns, on every rank, the reduced scalars and what `apply_gradients` does.
        """
        if not microbatches:
            raise ValueError("an update needs at least one microbatch on every data-parallel rank")
        for ddp in self.ddps:
            ddp.train()
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        no_tokens = torch.zeros((), dtype=torch.int)

        def finish(outputs: tuple[Tensor, ...], microbatch: Microbatch):
            if is_filler(microbatch):
                return torch.stack(outputs).sum() * 0.0, no_tokens, {}
            share, scalars = loss_fn(*outputs, microbatch)
            return share, no_tokens, {**scalars, "loss": share.detach()}

        collected = self.run(self.ddps, microbatches, head, finish, forward_only=False)
        finalize_model_grads([*self.ddps])
        scalars = [one for one in collected if one]  # fillers have none
        metrics = self.share_from_last_stage(self._reduce(scalars) if collected else None)
        self.scheduler.step(1)
        return metrics | apply_gradients(
            self.optimizer, self.config.clip_grad, metrics["loss"], lr_factor
        )

    def offload(self) -> None:
        """Free the GPU of what only an update needs, until `onload`; see `optimizer.offload`."""
        offload(self.optimizer, self.ddps)

    def onload(self) -> None:
        """Undo `offload`."""
        onload(self.optimizer, self.ddps, self.device)

    def save(self, folder: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Write the training state and `extra` (plain data); any parallel sizes can load it."""
        PendingCheckpoint(Path(folder), {self.part: self}, extra or {}).publish()

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Restore the state that `save` wrote; return its `extra`.

        The schedule keeps its position and takes this configuration's shape.
        """
        return load_checkpoint(Path(folder), {self.part: self})

    def _reduce(self, scalars: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sum the scalars over microbatches and data-parallel ranks; `*_max`: their maximum."""
        names = sorted(scalars[0], key=lambda name: name.endswith("_max"))
        sums = sum(not name.endswith("_max") for name in names)
        values = torch.stack(
            [torch.stack([one[name].double() for name in names]) for one in scalars]
        )
        total, peak = values[:, :sums].sum(0), values[:, sums:].amax(0)
        dist.all_reduce(total, group=self.dp_group)
        if len(peak):
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=self.dp_group)
        return dict(zip(names, total.tolist() + peak.tolist()))


class Policy(TrainableModel):
    """The trained policy on this rank.

    routing_replay: whether its routers follow the routes of a batch (routing_replay.py).

    Raises ValueError for a model or a setting that is not supported.
    """

    def __init__(
        self, config: TrainerConfig, model_path: str | Path, seed: int, routing_replay: bool = False
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
        """Compute the log-probs and the entropies in nats: float32 [T] each; see `logprobs`."""
        logprobs, entropies = self.outputs(microbatches, self.language_head(temperature), num=2)
        return logprobs, entropies

    def routes_changed(self) -> float:
        """Return the share of recorded routes that the policy would not have chosen."""
        return changed_share([replay for chunk in self.chunks for replay in chunk.replays])

    def adapter_share(self) -> float:
        """Return the size of what the adapters add to the weights; see `added_share`."""
        return added_share(self.chunks)

    def update(
        self,
        microbatches: Sequence[Microbatch],
        loss_fn: LossFn,
        temperature: float = 1.0,
        lr_factor: float = 1.0,
    ) -> dict[str, float]:
        """Run one optimizer step on the sum of `loss_fn`; see `TrainableModel.step`."""
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
        """Compute the values of all tokens of a flat batch: float32 [T], on every rank."""
        return self.outputs(microbatches, value_head)[0]

    def update(self, microbatches: Sequence[Microbatch], loss_fn: LossFn) -> dict[str, float]:
        """Run one optimizer step on the sum of `loss_fn` over the microbatches."""
        return self.step(microbatches, value_head, loss_fn)

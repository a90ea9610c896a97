"""TrainableModel: a ParallelModel with gradients, optimizer, schedule and checkpoints."""

from collections.abc import Callable, Sequence
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
from areal_lite.megatron.logprobs import Head
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

# Reduced scalars of an update -> factor of its learning rate.
LrFactor = Callable[[dict[str, float]], float]


class TrainableModel(ParallelModel):
    """A model that trains. Every rank calls every method; see ParallelModel for the arguments."""

    part = "policy"  # its name in a checkpoint

    def __init__(
        self,
        config: TrainerConfig,
        model_path: str | Path,
        seed: int,
        with_values: bool = False,
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
        loss_fn: Callable[..., tuple[Tensor, dict[str, Tensor]]],
        lr_factor: LrFactor | None = None,
    ) -> dict[str, float]:
        """Run one optimizer step on the sum of the losses, without rescaling it.

        The sum is over microbatches and data-parallel ranks. The schedule advances even when the
        step is skipped: update k, counted from 1, uses its k-th learning rate.

        Args:
            microbatches: at least one; ValueError otherwise.
            head: makes the per-token results.
            loss_fn: (*results of the head, microbatch) -> (share of the global loss, detached
                scalars to sum). It is called on the last pipeline stage, on all context- and
                tensor-parallel ranks alike, with whole microbatches. The scalars have the same
                names for every microbatch on every rank; `*_max` are reduced to their maximum.
            lr_factor: of the reduced scalars, multiplies the learning rate of this step only.

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
        factor, clip = lr_factor(metrics) if lr_factor else 1.0, self.config.clip_grad
        return metrics | apply_gradients(self.optimizer, clip, metrics["loss"], factor)

    def offload(self) -> None:
        """Move what only an update needs to host memory, until `onload`; a server gets the GPU.

        See `optimizer.offload`.
        """
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

"""TrainableModel: a ParallelModel with gradients, optimizer, learning-rate schedule and checkpoints. The loss is a function given to `step`."""

from __future__ import annotations

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
from megatron.core.optimizer import get_megatron_optimizer
from torch import Tensor

from areal_lite.config import TrainerConfig
from areal_lite.megatron.checkpoint import Saving, load_checkpoint
from areal_lite.megatron.head import Head
from areal_lite.megatron.optimizer import (
    apply_gradients,
    build_scheduler,
    offload,
    onload,
    optimizer_config,
)
from areal_lite.megatron.packing import Microbatch
from areal_lite.megatron.parallel_model import ParallelModel, is_filler


class TrainableModel(ParallelModel):
    """Every rank calls every method."""

    part = "policy"  # its name in a checkpoint

    def __init__(
        self, config: TrainerConfig, model_path: str | Path, seed: int, with_values: bool = False
    ):
        super().__init__(config, model_path, seed, with_values)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True
        )
        self.ddps = [
            DistributedDataParallel(config=chunk.config, ddp_config=ddp_config, module=chunk)
            for chunk in self.model
        ]
        self.optimizer = get_megatron_optimizer(
            optimizer_config(config, self.dtype), self.ddps, use_gloo_process_groups=False
        )
        self.scheduler = build_scheduler(config, self.optimizer)

    def step(
        self,
        microbatches: Sequence[Microbatch],
        head: Head,
        loss_fn: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    ) -> dict[str, float]:
        """One optimizer step on the sum, over microbatches and data-parallel ranks, of what `loss_fn` returns. Nothing is rescaled.

        loss_fn(*what the head gives, microbatch) -> (this microbatch's share of the global loss, detached scalars to sum) is called on the
        last pipeline stage, on all context- and tensor-parallel ranks alike, and sees whole microbatches.
        Returns, on every rank, the summed metrics of `loss_fn` (it must give the same keys on every rank, and for every microbatch) and
        `loss`, `grad_norm` (before clipping), `lr`, and `skipped`: 1.0 when the loss or a gradient was not finite; weights and moments
        then stay as they are. The schedule advances either way: update k, counted from 1, uses its k-th learning rate.
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
                return sum(outputs).sum() * 0.0, no_tokens, {}
            share, metrics = loss_fn(*outputs, microbatch)
            return share, no_tokens, {**metrics, "loss": share.detach()}

        shares = self.run(self.ddps, microbatches, head, finish, forward_only=False)
        finalize_model_grads(self.ddps)
        metrics = self.share_from_last_stage(
            self._sum_over_ranks([s for s in shares if s]) if shares else None
        )
        self.scheduler.step(1)
        return metrics | apply_gradients(self.optimizer, self.config.clip_grad, metrics["loss"])

    def offload(self) -> None:
        """Leave the GPU to a server: what only an update needs goes to host memory until `onload`; see `optimizer.offload`."""
        offload(self.optimizer, self.ddps)

    def onload(self) -> None:
        onload(self.optimizer, self.ddps, self.device)

    def save(self, folder: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Write all that training needs to go on, and `extra` (plain data), to `folder`; readable under any parallel sizes."""
        Saving(Path(folder), {self.part: self}, extra or {}).publish()

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Take up what `save` wrote; return its `extra`. The schedule keeps its position and takes this configuration's shape."""
        return load_checkpoint(Path(folder), {self.part: self})

    def _sum_over_ranks(self, shares: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sum the scalars of all microbatches of all data-parallel ranks; of those whose name ends in `_max`, the maximum."""
        names = sorted(shares[0], key=lambda name: name.endswith("_max"))
        sums = sum(not name.endswith("_max") for name in names)
        values = torch.stack(
            [torch.stack([share[name].double() for name in names]) for share in shares]
        )
        total, peak = values[:, :sums].sum(0), values[:, sums:].amax(0)
        dist.all_reduce(total, group=self.dp_group)
        if len(peak):
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=self.dp_group)
        return dict(zip(names, total.tolist() + peak.tolist()))

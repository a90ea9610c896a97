"""MegatronEngine: log-probs, updates, weights out, checkpoints. One object per trainer rank; every rank calls every method.

It owns model, optimizer and learning-rate schedule, and knows nothing of rewards, advantages or servers: the loss is a function given
to `update`. Entry i of any per-token result belongs to token i: log p(token i | the tokens before it in its sequence), with 0 for each
sequence's first token, which nothing predicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from transformers import AutoConfig

from areal_lite.config import TrainerConfig
from areal_lite.trainer import hf
from areal_lite.trainer.checkpoint import load_checkpoint, save_checkpoint
from areal_lite.trainer.logprobs import logprobs_and_entropy
from areal_lite.trainer.model import build_model, forward_logits, inverse_frequencies
from areal_lite.trainer.packing import MicroBatch
from areal_lite.trainer.parallel import init_distributed

# (logprobs [t], entropy [t], microbatch) -> (this microbatch's share of the global loss, detached scalars to sum); inputs carry gradients.
LossFn = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]


class MegatronEngine:
    """The trainer's model and optimizer on this rank; joins the process groups if `init_distributed` has not been called yet.

    model_path: a Hugging Face folder (Qwen2 or Qwen3). Raises ValueError for a model or a setting that is not supported.
    """

    def __init__(self, config: TrainerConfig, model_path: str | Path, seed: int):
        self.config = config
        self.device = init_distributed(config, seed)
        self.dtype = _dtype(config, self.device)
        self.source = Path(model_path)
        self.hf_config = AutoConfig.from_pretrained(self.source, local_files_only=True)
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.dp_group = parallel_state.get_data_parallel_group()
        self.model = build_model(self.hf_config, self.dtype)
        hf.load_hf(self.model, self.source, self.hf_config, self.tp_group)
        self.inv_freq = inverse_frequencies(self.hf_config, self.device)
        self.ddp = DistributedDataParallel(
            config=self.model.config,
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            module=self.model,
        )
        self.optimizer = get_megatron_optimizer(_optimizer_config(config, self.dtype), [self.ddp], use_gloo_process_groups=False)
        self.scheduler = _scheduler(config, self.optimizer)
        self._forward_backward = get_forward_backward_func()

    @torch.no_grad()
    def logprobs(self, microbatches: Sequence[MicroBatch], temperature: float = 1.0) -> Tensor:
        """float32 [T] on the engine's device: the log-probs of all tokens of the flat batch that `microbatches` partition."""
        self.model.eval()
        result = torch.zeros(sum(len(m.tokens) for m in microbatches), device=self.device)
        for microbatch in microbatches:
            microbatch = microbatch.to(self.device)
            result[microbatch.where] = self._forward(self.model, microbatch, temperature)[0]
        return result

    def update(self, microbatches: Sequence[MicroBatch], loss_fn: LossFn, temperature: float = 1.0) -> dict[str, float]:
        """One optimizer step on the sum, over microbatches and data-parallel ranks, of what `loss_fn` returns. Nothing is rescaled.

        Returns the summed metrics of `loss_fn` (the same keys on every rank, and for every microbatch) and
        `loss`, `grad_norm` (before clipping), `lr`, and `skipped`: 1.0 when the loss or a gradient was not finite; weights and moments
        then stay as they are. The schedule advances either way: update k, counted from 1, uses its k-th learning rate.
        """
        if not microbatches:
            raise ValueError("an update needs at least one microbatch on every data-parallel rank")
        self.model.train()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        shares = self._forward_backward(
            forward_step_func=partial(self._forward_step, loss_fn, temperature),
            data_iterator=iter(microbatches),
            model=[self.ddp],
            num_microbatches=len(microbatches),
            seq_length=1,  # of no use without pipeline stages
            micro_batch_size=1,
            forward_only=False,
        )
        finalize_model_grads([self.ddp])
        metrics = self._sum_over_ranks(shares)
        self.scheduler.step(1)
        return metrics | self._optimizer_step(metrics["loss"])

    def hf_weights(self, bucket_bytes: int) -> Iterator[hf.Bucket]:
        """Buckets of whole tensors under their Hugging Face names, in the training dtype; see `hf.hf_weights` for who iterates, and how."""
        return hf.hf_weights(self.model, self.hf_config, self.tp_group, bucket_bytes)

    def export_hf(self, folder: str | Path) -> None:
        """Write a Hugging Face checkpoint; it is complete when the call returns on any rank."""
        if self.dp_group.rank() == 0:
            buckets = self.hf_weights(hf.SHARD_BYTES)
            if self.tp_group.rank() == 0:
                hf.export_hf(buckets, self.source, Path(folder), self.dtype)
            else:
                for _ in buckets:
                    pass
        dist.barrier()

    def save(self, folder: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Write all that training needs to go on, and `extra` (plain data), to `folder`; readable under any parallel sizes."""
        save_checkpoint(Path(folder), self.model, self.optimizer, self.scheduler, extra or {})

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Take up what `save` wrote; return its `extra`. The schedule keeps its position and takes this configuration's shape."""
        return load_checkpoint(Path(folder), self.model, self.optimizer, self.scheduler)

    def _forward(self, model: torch.nn.Module, microbatch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """(log-probs, entropy), float32 [t] each, aligned with the microbatch's tokens."""
        logits = forward_logits(model, microbatch, self.inv_freq, self.dtype)
        # Row i holds the distribution of token i + 1. The last row of each sequence, matched with the next one's first token, is dropped.
        following = microbatch.tokens.roll(-1)
        first = microbatch.position_ids == 0
        return tuple(x.roll(1).masked_fill(first, 0.0) for x in logprobs_and_entropy(logits, following, temperature, self.tp_group))

    def _forward_step(self, loss_fn: LossFn, temperature: float, microbatches: Iterator[MicroBatch], model: torch.nn.Module):
        """Megatron's forward step: the output, and the function that makes (loss, number of tokens, what to collect) of it."""
        microbatch = next(microbatches).to(self.device)
        logprobs, entropy = self._forward(model, microbatch, temperature)

        def loss(logprobs: Tensor):
            share, metrics = loss_fn(logprobs, entropy, microbatch)
            return share, torch.zeros((), dtype=torch.int), {**metrics, "loss": share.detach()}

        return logprobs, loss

    def _sum_over_ranks(self, shares: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sum the scalars of all microbatches of all data-parallel ranks, with one all-reduce."""
        names = list(shares[0])
        total = torch.stack([torch.stack([share[name].double() for name in names]) for share in shares]).sum(0)
        dist.all_reduce(total, group=self.dp_group)
        return dict(zip(names, total.tolist()))

    def _optimizer_step(self, loss: float) -> dict[str, float]:
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.prepare_grads()
        grad_norm = self.optimizer.get_grad_norm()  # of the whole model: the same on all ranks
        healthy = math.isfinite(loss) and math.isfinite(grad_norm)
        if healthy:
            if self.config.clip_grad > 0:
                clip_grad_by_total_norm_fp32(self.optimizer.get_parameters(), self.config.clip_grad, grad_norm)
            self.optimizer.step_with_ready_grads()
        return {"grad_norm": grad_norm, "lr": lr, "skipped": 0.0 if healthy else 1.0}


def _dtype(config: TrainerConfig, device: torch.device) -> torch.dtype:
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    names["auto"] = torch.bfloat16 if device.type == "cuda" else torch.float32
    if config.dtype not in names:
        raise ValueError(f"trainer.dtype={config.dtype}: use one of {', '.join(sorted(names))}")
    return names[config.dtype]


def _optimizer_config(config: TrainerConfig, dtype: torch.dtype) -> OptimizerConfig:
    """AdamW; biases and norms are not decayed."""
    return OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )


def _scheduler(config: TrainerConfig, optimizer: Any) -> OptimizerParamScheduler:
    """Update k of n = steps x minibatches: lr k / warmup up to k = warmup, then constant, or down to min_lr at k = n."""
    if config.lr_schedule not in ("constant", "linear", "cosine"):
        raise ValueError(f"trainer.lr_schedule={config.lr_schedule}: use constant, linear or cosine")
    updates = config.steps * config.minibatches
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_steps,
        lr_decay_steps=max(updates, config.lr_warmup_steps + 1),
        lr_decay_style=config.lr_schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=updates,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )

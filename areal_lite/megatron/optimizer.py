"""AdamW or SGD with float32 master weights, its learning-rate schedule, and offloading.

Schedules count updates (optimizer steps): a training step has `trainer.minibatches` of them.
AdamW's moments and master weights are sharded over the data-parallel ranks (Megatron's distributed
optimizer; ZeRO stage 1, arXiv:1910.02054). That optimizer takes AdamW only. With SGD every
data-parallel rank reduces the whole gradient and makes the whole update.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from areal_lite.config import TrainerConfig
from areal_lite.megatron.parallel import on_every_rank

ADAM_BETA1 = 0.9


def is_sharded(config: TrainerConfig) -> bool:
    """Return whether data-parallel ranks share the optimizer's state."""
    return config.optimizer == "adam"


def build_optimizer(
    config: TrainerConfig, dtype: torch.dtype, ddps: Iterable[DistributedDataParallel]
) -> Any:
    """Build the optimizer for the models in `ddps`; biases and norms are not decayed.

    One kernel makes AdamW's updates: no temporary copies, and on a CPU three times as fast as the
    loop that Megatron would choose.
    """
    described = OptimizerConfig(
        optimizer=config.optimizer,
        lr=config.lr,
        min_lr=config.min_lr,
        adam_beta1=ADAM_BETA1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        sgd_momentum=0.0,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=is_sharded(config),
    )
    optimizer: Any = get_megatron_optimizer(described, [*ddps], use_gloo_process_groups=False)
    if config.optimizer == "adam":
        for group in optimizer.param_groups:
            group["fused"] = True
    else:  # Megatron calls this before it loads state, and sets none for SGD, which has no state.
        for one in optimizer.chained_optimizers:
            one.init_state_fn = lambda *_: None
    return optimizer


def build_scheduler(config: TrainerConfig, optimizer: Any) -> OptimizerParamScheduler:
    """Build the schedule of updates k = 1, 2, ... of n = steps x minibatches.

    Up to k = warmup the learning rate is lr k / warmup. Then it stays at lr (constant), goes down
    to min_lr at k = n (linear; cosine, arXiv:1608.03983), or stays until the last fifth of the
    updates, which goes down in a straight line to min_lr at k = n (wsd, arXiv:2404.06395).
    """
    styles = {"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "WSD"}
    updates = config.steps * config.minibatches
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_steps,
        lr_decay_steps=max(updates, config.lr_warmup_steps + 1),
        lr_decay_style=styles[config.lr_schedule],
        wsd_decay_steps=max(updates // 5, 1),
        lr_wsd_decay_style="linear",
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=updates,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def apply_gradients(
    optimizer: Any, clip_grad: float, loss: float, lr_factor: float = 1.0
) -> dict[str, float]:
    """Clip the reduced gradients and update the weights. Every rank calls it.

    `lr_factor` multiplies the schedule's learning rate for this update. Returns `grad_norm` (before
    clipping), `lr` with its factor, and `skipped`: 1.0 when the loss or a gradient was not finite
    on any rank. Weights and moments then stay as they are on all ranks.
    """
    for group in optimizer.param_groups:
        group["lr"] *= lr_factor  # the schedule sets it anew before each update
    optimizer.prepare_grads()
    grad_norm = optimizer.get_grad_norm()
    healthy = on_every_rank(math.isfinite(loss) and math.isfinite(grad_norm))
    if healthy:
        if clip_grad > 0:
            for part in optimizer.chained_optimizers:  # experts have an optimizer of their own
                if parameters := part.get_parameters():
                    clip_grad_by_total_norm_fp32(parameters, clip_grad, grad_norm)
        optimizer.step_with_ready_grads()
    lr = optimizer.param_groups[0]["lr"]
    return {"grad_norm": grad_norm, "lr": lr, "skipped": 0.0 if healthy else 1.0}


def move_moments(optimizer: Any, device: torch.device) -> None:
    """Move Adam moments, if there are any, to a device."""
    for one in optimizer.chained_optimizers:
        for state in one.optimizer.state.values():
            for name in state.keys() & {"exp_avg", "exp_avg_sq"}:
                moment = state[name]
                if device.type == "cpu" and moment.is_cuda:  # page-locked: full speed of the bus
                    host = torch.empty_like(moment, device="cpu", pin_memory=True)
                    state[name] = host.copy_(moment, non_blocking=True)
                else:
                    state[name] = moment.to(device, non_blocking=True)

"""AdamW, Muon or SGD with float32 master weights, their learning-rate schedule, and offloading.

Schedules count updates (optimizer steps): a training step has `trainer.minibatches` of them.
AdamW's moments and master weights are sharded over the data-parallel ranks (Megatron's distributed
optimizer; ZeRO stage 1, arXiv:1910.02054). That optimizer takes AdamW only. With Muon or SGD every
data-parallel rank reduces the whole gradient and makes the whole update. Megatron-core's own Muon
calls a package whose only release does not fit it.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from transformers import PretrainedConfig

from areal_lite.config import TrainerConfig
from areal_lite.megatron.architectures import layout
from areal_lite.megatron.hf import split_group
from areal_lite.megatron.parallel import on_every_rank

ADAM_BETA1, MUON_MOMENTUM = 0.9, 0.95
# Of an update, about what AdamW's have, so that its learning rates suit Muon (arXiv:2502.16982).
_ROOT_MEAN_SQUARE = 0.2


def is_sharded(config: TrainerConfig) -> bool:
    """Return whether data-parallel ranks share the optimizer's state."""
    return config.optimizer == "adam"


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Bring the singular values of a matrix to about 1, computing in `dtype`.

    Five Newton-Schulz iterations X <- a X + b (X X^T) X + c (X X^T)^2 X from X = matrix / |matrix|
    (Jordan et al., 2024, kellerjordan.github.io/posts/muon).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.t()
    x = (x / x.norm().clamp_min(1e-7)).to(dtype)
    for _ in range(5):
        square = x @ x.t()
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.t()).to(matrix.dtype)


class Muon(torch.optim.AdamW):
    """Momentum M with orthogonal updates of matrices W [m, n] that have gradients G.

    M <- 0.95 M + 0.05 G
    W <- (1 - lr decay) W - 0.2 lr sqrt(max(m, n)) orthogonal(0.95 M + 0.05 G)

    Each matrix is updated as it stands in the Hugging Face checkpoint. A parameter of Megatron may
    have several (query, key and value; gate and up; experts), and ranks a part of each, which they
    exchange.
    owners: the chunk and the name of each parameter of matrices. AdamW updates the others.
    """

    def __init__(
        self, groups: Any, owners: dict[Any, Any], hf: PretrainedConfig, dtype: torch.dtype
    ):
        super().__init__(groups)
        self.owners, self.hf, self.dtype = owners, hf, dtype
        for weight in [each for group in groups for each in group["params"] if each in owners]:
            self.state[weight]["step"] = weight.new_zeros(())  # Megatron wants the same for all
            self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all weights; each has a gradient."""
        for group in self.param_groups:
            for weight in [each for each in group["params"] if each in self.owners]:
                state, gradient = self.state[weight], weight.grad
                momentum = state["momentum_buffer"].lerp_(gradient, 1 - MUON_MOMENTUM)
                update = gradient.lerp(momentum, MUON_MOMENTUM)
                chunk, name = self.owners[weight]
                for each in chunk.matrices(name, update):
                    self._orthogonalize(*each)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(update, alpha=group["lr"])
                state["step"] += 1
                weight.grad = None  # nothing is left for AdamW
        super().step()

    def _orthogonalize(self, name: str, own: Tensor) -> None:
        """Replace this rank's part of the matrices of parameter `name` by that of their updates."""
        plan, group = layout(name, self.hf), split_group(name)
        parts = [own]
        if group.size() > 1 and not plan.replicated:
            parts = [torch.empty_like(own) for _ in range(group.size())]
            dist.all_gather(parts, own, group)
        updates = [
            _ROOT_MEAN_SQUARE * max(x.shape) ** 0.5 * orthogonal(x, self.dtype)
            for x in plan.join(self.hf, parts)
        ]
        own.copy_(plan.cut(self.hf, updates, group.rank(), group.size()))


def build_optimizer(
    config: TrainerConfig, hf: PretrainedConfig, dtype: torch.dtype, ddps: Iterable[Any]
) -> Any:
    """Build the optimizer for the wrapped chunks `ddps`; biases and norms are not decayed.

    One kernel makes AdamW's updates: no temporary copies, and on a CPU three times as fast as the
    loop that Megatron would choose.
    """
    described = OptimizerConfig(
        optimizer="sgd" if config.optimizer == "sgd" else "adam",
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
    # The biases of all experts are one matrix, so the shape does not tell them from weights.
    flat = ParamWithNamePredicate("flat", lambda x, name: x.ndim == 1 or name.endswith("bias"))
    own: Any = {ParamKey(with_name_predicate=flat): {"wd_mult": 0.0}}
    optimizer: Any = get_megatron_optimizer(described, [*ddps], own, use_gloo_process_groups=False)
    if config.optimizer == "sgd":  # Megatron calls this before it loads state, and sets none.
        for one in optimizer.chained_optimizers:
            one.init_state_fn = lambda *_: None
        return optimizer
    if config.optimizer == "muon":
        owners = {
            getattr(weight, "main_param", weight): (ddp.module, name)
            for ddp in ddps
            for name, weight in ddp.module.named_parameters()
            if ".layers." in name and all(x.ndim == 2 for _, x in ddp.module.matrices(name, weight))
        }
        for one in optimizer.chained_optimizers:
            one.optimizer = Muon(one.optimizer.param_groups, owners, hf, dtype)
    for group in optimizer.param_groups:
        group["fused"] = True
    return optimizer


def build_scheduler(config: TrainerConfig, optimizer: Any) -> OptimizerParamScheduler:
    """Build the schedule of updates k = 1, 2, ... of n = steps x minibatches.

    Up to k = warmup the learning rate is lr k / warmup. Then it stays at lr (constant), goes down
    to min_lr at k = n (linear; cosine, arXiv:1608.03983), or stays until the last fifth of the
    updates, which goes down in a straight line to min_lr at k = n (wsd, arXiv:2404.06395).
    """
    updates = config.steps * config.minibatches
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_steps,
        lr_decay_steps=max(updates, config.lr_warmup_steps + 1),
        lr_decay_style="WSD" if config.lr_schedule == "wsd" else config.lr_schedule,
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


def moments(optimizer: Any) -> Iterator[dict[str, Tensor]]:
    """Yield the moments of each parameter of this rank; `step` is its number of updates."""
    for one in optimizer.chained_optimizers:
        yield from one.optimizer.state.values()


def move_moments(optimizer: Any, device: torch.device) -> None:
    """Move the moments, if there are any, to a device."""
    for state in moments(optimizer):
        for name in state.keys() & {"exp_avg", "exp_avg_sq", "momentum_buffer"}:
            moment = state[name]
            if device.type == "cpu" and moment.is_cuda:  # page-locked: full speed of the bus
                host = torch.empty_like(moment, device="cpu", pin_memory=True)
                state[name] = host.copy_(moment, non_blocking=True)
            else:
                state[name] = moment.to(device, non_blocking=True)

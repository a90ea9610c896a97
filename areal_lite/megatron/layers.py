"""The norm and the MLP of a layer, in place of Megatron's own."""

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from torch import Tensor
from torch.autograd.function import once_differentiable

from areal_lite.cpu.kernels import norms
from areal_lite.megatron.parallel import current_device, process_group


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight (Zhang & Sennrich, 2019, arXiv:1910.07467).

    Both the norm and the product are computed in float32 and rounded once, as in SGLang.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        self.eps = eps
        weight = torch.ones(hidden_size, dtype=config.params_dtype, device=current_device())
        self.weight = torch.nn.Parameter(weight)
        # Tells Megatron that a rank has the gradient of its own tokens only.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        if norms.fits(x):
            return _FusedRMSNorm.apply(x, self.weight, self.eps)  # pyright: ignore[reportReturnType]
        if x.is_cuda:  # one kernel, which keeps only its input
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # A fifth faster than torch's on a CPU, with the same result.
        h = x.float()
        return (self.weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps))).to(
            x.dtype
        )


class _FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = norms.array(x, -1, len(weight))
        out, scale = np.empty_like(rows), np.empty(len(rows), np.float32)
        norms.rms_norm(rows, weight.detach().numpy(), np.float32(eps), out, scale)
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return torch.from_numpy(out).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        rows, grad = (norms.array(y, -1, len(weight)) for y in (x, grads[0]))
        grad_x, grad_weight = np.empty_like(rows), np.zeros(len(weight), np.float32)
        norms.rms_norm_backward(rows, weight.detach().numpy(), ctx.scale, grad, grad_x, grad_weight)
        return torch.from_numpy(grad_x).view(x.shape), torch.from_numpy(grad_weight), None


class GatedMLP(MLP):
    """Megatron's MLP with SwiGLU (Shazeer, 2020, arXiv:2002.05202), which keeps less for backward.

    It is dense. Experts are Megatron's own.
    """

    layers = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)

    def __init__(self, config: TransformerConfig):
        super().__init__(
            config,
            self.layers,
            ffn_hidden_size=config.ffn_hidden_size,
            tp_group=process_group(parallel_state.get_tensor_model_parallel_group()),
        )

    def forward(self, hidden_states: Tensor, **_) -> tuple[Tensor, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        projections, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(projections))


def gated_mlp(fc1: type | ModuleSpec, fc2: type | ModuleSpec) -> type[GatedMLP]:
    """Return a GatedMLP of these linear layers. Megatron builds a layer's MLP from a class."""
    layers = MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2)
    return type(GatedMLP.__name__, (GatedMLP,), {"layers": layers})


def swiglu(projections: Tensor) -> Tensor:
    """Compute silu(a) * b from [..., 2 n], where a is the first half: [..., n].

    Only `projections` are kept for backward, which computes silu(a) again.
    """
    result = _SwiGLU.apply(projections)
    assert isinstance(result, Tensor)
    return result


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, projections: Tensor) -> Tensor:
        ctx.save_for_backward(projections)
        a, b = projections.chunk(2, -1)
        return F.silu(a) * b

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (projections,) = ctx.saved_tensors
        a, b = projections.chunk(2, -1)
        grad = torch.empty_like(projections)
        grad_a, grad_b = grad.chunk(2, -1)
        torch.mul(grads[0], F.silu(a), out=grad_b)
        grad_a.copy_(torch.ops.aten.silu_backward(grads[0] * b, a))
        return grad

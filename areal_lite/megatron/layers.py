"""The norm and the MLP of a layer, in place of Megatron's own."""

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from torch import Tensor
from torch.autograd.function import once_differentiable

from areal_lite.megatron.kernels import kernels
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
        return kernels.rms_norm(x, self.weight, self.eps)


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

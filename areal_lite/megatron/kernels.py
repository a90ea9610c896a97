"""The trainer's operators: torch's, unless the device brings its own (extensions.py)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Operator = TypeVar("Operator", bound=Callable[..., Any])

MAX_KEPT = 1 << 31
"""Logits that are kept for backward at most: 8 GiB in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The keys that m segments of packed tokens see; the last token of a segment sees all of them.

    Each token before the last one sees one key less.
    """

    queries: np.ndarray  # int64 [m + 1], the bounds of the segments
    keys: np.ndarray  # int64 [m + 1], their bounds in `index`
    index: np.ndarray  # int64 [k], the token of each key


def fused(function: Operator) -> Operator:
    """Decorate a function of tensors: a GPU computes it in few passes, rounding in between less.

    The first argument tells the device. Elsewhere each operation reads and writes memory.
    """

    @wraps(function)
    def call(x: Tensor, *rest):
        return (_compiled(function) if x.is_cuda else function)(x, *rest)

    return call  # pyright: ignore[reportReturnType]


@cache
def _compiled(function: Callable) -> Callable:
    import torch._inductor.config  # slow to import, and only needed on a GPU

    torch._inductor.config.compile_threads = 1  # no processes that could outlive this one
    torch._dynamo.config.recompile_limit = 64  # of a function, for shapes: then it is not compiled
    return torch.compile(function)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / rms(x) * weight over the last dimension, in float32, rounded once."""
    same = weight.dtype == x.dtype
    return F.rms_norm(x, weight.shape, weight, eps) if same else _mixed_norm(x, weight, eps)


@fused
def _mixed_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


@fused
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x [t, heads, dim] (Su et al., 2021, arXiv:2104.09864).

    The two coordinates of a rotation stand in the two halves of dim. The result is computed in the
    dtype of `cos` and `sin`, both [t, 1, dim], and rounded once to the dtype of x.
    """
    half = x.shape[-1] // 2
    return (x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU with the tanh in place of the error function (arXiv:1606.08415)."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x), which is close to GELU (arXiv:1606.08415)."""
    return x * (1.702 * x).sigmoid()


def _quick_gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    gate = (1.702 * x).sigmoid()
    return grad * gate * (1 + 1.702 * x * (1 - gate))


_SLOPES: dict[Callable, Callable[[Tensor, Tensor], Tensor]] = {
    F.silu: torch.ops.aten.silu_backward,
    gelu_tanh: partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    quick_gelu: _quick_gelu_backward,
}
"""Activation -> (gradient of its result, its argument) -> gradient of its argument."""


def gated(
    projections: Tensor,
    scale: Tensor | None = None,
    activation: Callable[[Tensor], Tensor] = F.silu,
    limit: float | None = None,
) -> Tensor:
    """Compute activation(a) * b from [..., 2 n]; a is the first half: [..., n] (arXiv:2002.05202).

    scale: [...], what each row is multiplied with; limit: no a is larger, and no |b|, to which 1 is
    then added (gpt-oss). Only the arguments are kept for backward, which computes the activation,
    one of `_SLOPES`, again.
    """
    return _Gated.apply(projections, scale, activation, limit)  # pyright: ignore[reportReturnType]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, projections: Tensor, scale: Tensor | None, activation: Callable, limit: float | None
    ) -> Tensor:
        ctx.save_for_backward(projections, scale)
        ctx.options = activation, limit
        return _gated(projections, scale, activation, limit)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        projections, scale = ctx.saved_tensors
        activation, limit = ctx.options
        found = _gated_backward(projections, scale, activation, limit, grads[0])
        return *found, None, None


@fused
def _gated(
    projections: Tensor, scale: Tensor | None, activation: Callable, limit: float | None
) -> Tensor:
    a, b = _limited(projections, limit)
    product = activation(a).mul_(b)
    return product if scale is None else product.mul_(scale[..., None])


def _limited(projections: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    a, b = projections.chunk(2, -1)
    return (a, b) if limit is None else (a.clamp(max=limit), b.clamp(-limit, limit) + 1)


@fused
def _gated_backward(
    projections: Tensor,
    scale: Tensor | None,
    activation: Callable,
    limit: float | None,
    grad: Tensor,
):
    (a, b), slope = _limited(projections, limit), None
    of_b = activation(a).mul_(grad)
    if scale is not None:
        slope = (of_b * b).sum(-1, dtype=scale.dtype)
        grad, of_b = grad * scale[..., None], of_b.mul_(scale[..., None])
    of_a = _SLOPES[activation](grad * b, a.to(grad.dtype))
    both = torch.cat((of_a.to(grad.dtype), of_b), -1).to(projections.dtype)
    if limit is not None:
        a, b = projections.chunk(2, -1)
        both = both * torch.cat((a <= limit, b.abs() <= limit), -1)
    return both, slope


def add_sink(out: Tensor, sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Give each head's softmax one more key, with the score `sinks` [heads] and no value.

    out: [t, heads, dim]; sums: [heads, t], the logarithm of the softmax's sum. Returns both anew.
    """
    rest = (sums - sinks[:, None].float()).sigmoid()  # what the sink leaves
    return (out * rest.t()[..., None]).to(out.dtype), sums - rest.log()


def sink_gradient(grad: Tensor, out: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of `sinks`, given the results of `add_sink` and the gradient of `out`."""
    slopes = (grad.float() * out.float()).sum(-1).t()  # [heads, t]
    return -((sinks[:, None].float() - sums).exp() * slopes).sum(1).to(sinks.dtype)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return x Wᵀ without a gradient, with the W of each group of rows: [n, out].

    x: [n, in]; weight: [groups, out, in]; ends: int32 [groups], where the rows of a group end.
    """
    if _has_grouped_products(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    parts = zip(_groups(x, ends), weight, strict=True)
    return torch.cat([kernels.linear(rows, matrix) for rows, matrix in parts])


def grouped_sums(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return yᵀ x of each group of rows without a gradient: [groups, out, in].

    y: [n, out]; x: [n, in]; ends: as in `grouped_linear`.
    """
    if _has_grouped_products(x, y):
        return F.grouped_mm(y.t(), x, offs=ends)
    result = x.new_empty(len(ends), y.shape[1], x.shape[1])
    for matrix, ours, theirs in zip(result, _groups(y, ends), _groups(x, ends), strict=True):
        matrix.copy_(kernels.linear(theirs.t(), ours.t()).t())
    return result


def _has_grouped_products(*operands: Tensor) -> bool:
    """Return whether torch multiplies all groups in one kernel: rows of 16 bytes in bfloat16."""
    return all(
        x.is_cuda
        and x.dtype == torch.bfloat16
        and len(x) > 0
        and not any(n % 8 for n in x.shape[1:])
        for x in operands
    )


def _groups(rows: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    return rows.split(ends.diff(prepend=ends.new_zeros(1)).tolist())


def logits_to_keep(device: torch.device, chunk_logits: int) -> int:
    """Return how many float32 logits may stay in the free memory of a GPU until backward.

    Four chunks of `chunk_logits` are left for the computation itself, and half of the rest for
    others.
    """
    left = (free_memory(device) - 16 * chunk_logits) // 2
    return max(min(left // 4, MAX_KEPT), 0)


def free_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that this process may still use."""
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(min(free, limit - held), 0) + held - torch.cuda.memory_allocated(device)


@dataclass
class Kernels:
    """The operators of this process."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm  # (x, weight, eps) -> as x
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate  # (x, cos, sin) -> as x
    linear: Callable[[Tensor, Tensor], Tensor] = F.linear  # (x, weight) -> x Wᵀ, no gradient
    # Causal attention of tokens [t, heads, dim] by one kernel, with gradients: (query, key, value,
    # spans, window, scale of dot products, sinks) -> as query. window: how many of its keys a token
    # sees at most, the last ones, or None; sinks: [heads], scores of a key without a value, or None
    packed_attention: Callable[..., Tensor] | None = None
    # (like these tensors, dtype, head_dim, most keys of a segment) -> whether the kernel computes
    # them, and faster than torch
    packed_fits: Callable[[Tensor, torch.dtype, int, int], bool] = lambda *_: False
    varlen: bool = True  # half precision attends over packed tokens by FlashAttention
    exact_rotation: bool = True  # the rotary embedding is in float32, as in the server
    wide_products: bool = True  # products of half-precision matrices are added up in float32
    # (device, logits of a chunk) -> logits that are kept for backward
    logits_to_keep: Callable[[torch.device, int], int] = logits_to_keep
    # a training step runs inside this context
    training_step: Callable[[], AbstractContextManager[None]] = nullcontext


kernels = Kernels()
"""The operators that every module of this package uses."""

"""The trainer's operators without a GPU: the kernels of this package with their gradients.

They compute in float32, with one thread, which is worth several of torch's. Otherwise torch
computes.
"""

from dataclasses import astuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from areal_lite.cpu import KEPT_LOGITS
from areal_lite.cpu.cores import FreeCores
from areal_lite.cpu.kernels import norms
from areal_lite.cpu.kernels.packed_attention import attend, attend_backward
from areal_lite.cpu.kernels.products import linear
from areal_lite.cpu.kernels.vectors import SIZE
from areal_lite.megatron.kernels import Kernels, Spans, add_sink, sink_gradient
from areal_lite.megatron.kernels import rotate as rotate_by_torch

# Longest sequence, in tokens, for which the kernel is faster than torch. With heads of 32 it takes
# 0.2 to 0.4 of torch's time for up to 180 tokens, with heads of 64 two thirds for 512, and 1.3
# times as long for 2,048.
MAX_KERNEL_LENGTH = 1024


def install(kernels: Kernels) -> None:
    """Replace operators of the trainer."""
    kernels.rms_norm = rms_norm
    kernels.rotate = rotate
    kernels.linear = linear
    kernels.packed_attention, kernels.packed_fits = packed_attention, packed_fits
    kernels.varlen = False
    kernels.exact_rotation = False  # SGLang rotates in the model's dtype here
    kernels.wide_products = False
    kernels.training_step = FreeCores()
    kernels.logits_to_keep = lambda device, chunk_logits: KEPT_LOGITS


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / rms(x) * weight over the last dimension, in float32, rounded once."""
    if norms.fits(x):
        return _RMSNorm.apply(x, weight.float(), eps)  # pyright: ignore[reportReturnType]
    # A fifth faster than torch's own, with the same result.
    h = x.float()
    return (weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        normed, ctx.scale = norms.normed(x, weight, eps)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        rows, grad = (norms.array(y, -1, len(weight)) for y in (x, grads[0]))
        grad_x, grad_weight = np.empty_like(rows), np.zeros(len(weight), np.float32)
        norms.rms_norm_backward(rows, weight.detach().numpy(), ctx.scale, grad, grad_x, grad_weight)
        return torch.from_numpy(grad_x).view(x.shape), torch.from_numpy(grad_weight), None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x [t, heads, dim]."""
    if norms.fits(x):
        return _Rotation.apply(x, cos, sin)  # pyright: ignore[reportReturnType]
    return rotate_by_torch(x, cos, sin)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return norms.rotated(x, cos[:, 0].numpy(), sin[:, 0].numpy(), x.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = (x[:, 0].numpy() for x in ctx.saved_tensors)
        return norms.rotated(grads[0], cos, sin, grads[0].shape[-1], sign=-1), None, None


def packed_fits(like: Tensor, dtype: torch.dtype, head_dim: int, longest: int) -> bool:
    """Return whether the kernel computes with these tensors, and faster than torch."""
    plain = norms.fits(like) and dtype == torch.float32
    return plain and head_dim % SIZE == 0 and longest <= MAX_KERNEL_LENGTH


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    window: int | None,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend within packed segments by one kernel: [t, heads, dim]."""
    rest = spans, window or MAX_KERNEL_LENGTH, scale
    return _Attention.apply(query, key, value, sinks, *rest)  # pyright: ignore[reportReturnType]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        spans: Spans,
        window: int,
        scale: float,
    ) -> Tensor:
        q, k, v = (x.contiguous() for x in (query, key, value))
        out, log_sums = torch.empty_like(q), torch.empty(q.shape[:2])
        ctx.spans, ctx.scale = (*astuple(spans), window), np.float32(scale)
        arrays = (x.numpy() for x in (q, k, v))
        attend(*arrays, ctx.spans, ctx.scale, out.numpy(), log_sums.numpy())  # pyright: ignore[reportCallIssue]
        if sinks is not None:
            out, sums = add_sink(out, log_sums.t(), sinks)
            log_sums = sums.t().contiguous()
        ctx.save_for_backward(q, k, v, sinks, out, log_sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        *saved, sinks, out, log_sums = ctx.saved_tensors
        q, k, v = (x.numpy() for x in saved)
        gradients = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
        grad, results = grads[0].contiguous(), (out.numpy(), log_sums.numpy())
        attend_backward(q, k, v, ctx.spans, ctx.scale, results, grad.numpy(), gradients)
        slope = None if sinks is None else sink_gradient(grad, out, log_sums.t(), sinks)
        return *map(torch.from_numpy, gradients), slope, None, None, None

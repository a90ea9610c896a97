"""Kernels for machines without a GPU: numpy arrays in and out, compiled by numba, one thread.

Torch computes a norm or a rotation in several passes over memory, each with a temporary array.
These kernels make one pass. `fits` says where they take the place of torch.

Times on one core in float32, in ms (torch in brackets): RMSNorm of 7,808 rows of 128, forward and
backward, 0.4 (6.0); rotation of 7,808 tokens with 4 heads of 32, 0.2 (1.3). SwiGLU is as fast in
torch: its two passes are bound by memory.

All functions are in one file, because numba's cache looks at the time of a function's own file.
"""

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, overload

_LINE_BYTES = 64
_PREFETCHED = 16
"""Keys that are fetched ahead. With pages of 16 slots, 4 take 7 % longer, and 8 or 32 1 to 3 %."""


def fits(x: torch.Tensor) -> bool:
    """Return whether the kernels can compute with `x` and are faster than torch."""
    single = torch.get_num_threads() == 1
    return single and x.device.type == "cpu" and x.dtype == torch.float32


def array(x: torch.Tensor, *shape: int) -> np.ndarray:
    """Return a CPU tensor as a contiguous array of this shape, without a copy if it can be."""
    return x.detach().reshape(shape).contiguous().numpy()


@numba.njit(cache=True, nogil=True, fastmath=True)
def rms_norm(x, weight, eps, out, scale):
    """Set scale[t] = 1 / rms(x[t]) and out[t] = weight · x[t] · scale[t], row by row.

    Args:
        x: float32 [rows, n].
        weight: float32 [n].
        eps: float32, added to the mean square.
        out: float32 [rows, n], written.
        scale: float32 [rows], written, for `rms_norm_backward`.
    """
    rows, n = x.shape
    for t in range(rows):
        row, result = x[t], out[t]
        total = np.float32(0)
        for i in range(n):
            total += row[i] * row[i]
        factor = np.float32(1) / np.sqrt(total / np.float32(n) + eps)
        scale[t] = factor
        for i in range(n):
            result[i] = weight[i] * (row[i] * factor)


@numba.njit(cache=True, nogil=True, fastmath=True)
def rms_norm_backward(x, weight, scale, grad, grad_x, grad_weight):
    """Set grad_x and add to grad_weight, given the gradient of `rms_norm`'s result.

    With s = scale and n columns: grad_x = s · (g w - x · s² · Σ g w x / n).

    Args:
        x, weight, scale: as for `rms_norm`.
        grad: float32 [rows, n].
        grad_x: float32 [rows, n], written.
        grad_weight: float32 [n], added to.
    """
    rows, n = x.shape
    for t in range(rows):
        row, g, result, s = x[t], grad[t], grad_x[t], scale[t]
        total = np.float32(0)
        for i in range(n):
            total += g[i] * weight[i] * row[i]
        common = total * s * s * s / np.float32(n)
        for i in range(n):
            grad_weight[i] += g[i] * row[i] * s
            result[i] = g[i] * weight[i] * s - row[i] * common


@numba.njit(cache=True, nogil=True, fastmath=True)
def rotate(x, cos, sin, sign, out):
    """Rotate the pairs (x[i], x[i + dim / 2]) by the angle of their token, or back.

    Args:
        x: float32 [tokens, heads, dim].
        cos, sin: float32 [tokens, dim / 2 or more], of which the first dim / 2 are read.
        sign: float32, 1 or -1 for the inverse, which is also the gradient.
        out: float32 [tokens, heads, dim], written.
    """
    tokens, heads, dim = x.shape
    half = dim // 2
    for t in range(tokens):
        c, s = cos[t], sin[t]
        for h in range(heads):
            row, result = x[t, h], out[t, h]
            for i in range(half):
                turned = sign * s[i]
                result[i] = row[i] * c[i] - row[i + half] * turned
                result[i + half] = row[i + half] * c[i] + row[i] * turned


@numba.njit(inline="always", fastmath=True)
def _exp(x):
    """Return exp(x) of float32 x <= 0, to 1.2e-7 of its value; exp(-87) below -87.

    numba calls the C library once for each number. This takes a twentieth of its time, because the
    compiler turns loops of it into vector instructions. With n the integer nearest to x / ln 2,
    exp(x) = 2^n exp(x - n ln 2). The polynomial and ln 2 in two parts are those of the Cephes
    library's expf.
    """
    x = max(x, np.float32(-87.0))
    n = np.int32(x * np.float32(1.44269504) - np.float32(0.5))
    r = x - np.float32(n) * np.float32(0.693359375)
    r = r + np.float32(n) * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return np.int32((n + np.int32(127)) * np.int32(1 << 23)).view(np.float32) * p


@intrinsic
def _prefetch(_typing, cache, offset):
    """Ask for the cache line of element `offset` of a contiguous array."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        byte_pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, flag, flag, flag])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], kind)
        pointer = builder.bitcast(builder.gep(data, [args[1]]), byte_pointer)
        read, keep, of_data = (ir.Constant(flag, value) for value in (0, 3, 1))
        builder.call(function, [pointer, read, keep, of_data])
        return context.get_dummy_value()

    return types.void(cache, types.intp), generate


@numba.njit(cache=True, nogil=True)
def _fetch_ahead(cache, slots, i, length):
    """Prefetch the keys or values, of all heads, that are read `_PREFETCHED` slots after i.

    The compiler inlines this. Inlined by numba, it would count the array's references for each
    slot, which doubles the time of the kernel with 4 heads of 32.
    """
    if i + _PREFETCHED < length:
        size = cache.shape[1] * cache.shape[2]
        first = np.int64(slots[i + _PREFETCHED]) * size
        for offset in range(0, size, _LINE_BYTES // cache.itemsize):
            _prefetch(cache, first + offset)  # pyright: ignore[reportCallIssue]


def _widen(x):
    """Return a cache element as float32, in a form that its type picks below."""
    raise NotImplementedError


@overload(_widen, inline="always")
def _widen_by_type(x):
    # The bits of a bfloat16 are the upper half of a float32's.
    if isinstance(x, numba.types.Integer):
        return lambda x: np.uint32(np.uint32(x) << 16).view(np.float32)
    return lambda x: x


@numba.njit(cache=True, nogil=True, fastmath=True)
def paged_attention(query, keys, values, req_to_token, rows, lengths, scale, out):
    """Set out[t, h] = softmax(scale · query[t, h] · K) · V for every query token t and head h.

    K and V are those of the first lengths[t] slots of request rows[t]. They are read in place, in
    float32 arithmetic for any type of cache. numpy has no bfloat16, so a bfloat16 cache is passed
    as its bits (uint16).

    Args:
        query: float32 [tokens, heads, head_dim].
        keys: float32 or bfloat16 bits [slots, kv_heads, head_dim].
        values: as `keys`.
        req_to_token: int32 [requests, context], the slots of each request.
        rows: int64 [tokens].
        lengths: int64 [tokens], at least 1.
        scale: float32.
        out: float32 [tokens, heads, head_dim], written.
    """
    (num_tokens, num_heads, head_dim), num_kv_heads = query.shape, keys.shape[1]
    group = num_heads // num_kv_heads
    scores = np.empty((num_heads, lengths.max()), np.float32)
    for t in range(num_tokens):
        slots, length = req_to_token[rows[t]], lengths[t]
        q, o = query[t], out[t]
        # All heads of a slot together: it has left the cache when the next slots have been read.
        for i in range(length):
            _fetch_ahead(keys, slots, i, length)
            key = keys[slots[i]]
            for kv_head in range(num_kv_heads):
                for head in range(kv_head * group, (kv_head + 1) * group):
                    dot = np.float32(0)
                    for d in range(head_dim):
                        dot += q[head, d] * _widen(key[kv_head, d])
                    scores[head, i] = dot * scale
        for head in range(num_heads):
            _softmax(scores[head, :length])
        o[:] = 0
        for i in range(length):
            _fetch_ahead(values, slots, i, length)
            value = values[slots[i]]
            for kv_head in range(num_kv_heads):
                for head in range(kv_head * group, (kv_head + 1) * group):
                    weight = scores[head, i]
                    for d in range(head_dim):
                        o[head, d] += weight * _widen(value[kv_head, d])


@numba.njit(cache=True, nogil=True, fastmath=True)
def _softmax(scores):
    """Replace scores, float32 [n], by their softmax."""
    highest = scores.max()
    total = np.float32(0)
    for i in range(len(scores)):
        scores[i] = _exp(scores[i] - highest)
        total += scores[i]
    scores /= total

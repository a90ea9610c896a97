"""Causal attention within packed sequences, and its gradient, without a GPU.

`ROWS` queries are computed together, so that each vector of keys or values is loaded once for all
of them. Scores are computed again for the gradient. No more than [ROWS, longest sequence] of them
exist at a time.
"""

# numba passes the first argument of an intrinsic itself.
# pyright: reportCallIssue=false

import numba
import numpy as np

from areal_lite.cpu.kernels.vectors import (
    SIZE,
    exp,
    load_row,
    multiply_add,
    softmax,
    store_row,
    zeros,
)

ROWS = 4
"""Queries that are computed together."""


@numba.njit(cache=True, nogil=True, fastmath=True)
def attend(query, key, value, bounds, scale, out, log_sums):
    """Set out[t, h] = softmax(scale · query[t, h] · K) · V over the tokens of t's sequence up to t.

    Args:
        query: float32 [tokens, heads, dim]; dim is a multiple of 16.
        key, value: float32 [tokens, groups, dim]; a group serves heads / groups heads.
        bounds: int64 [n + 1], where sequences begin and end.
        scale: float32.
        out: as query, written.
        log_sums: float32 [tokens, heads], written: log Σ exp(scale · query · K).
    """
    (_, heads, dim), groups = query.shape, key.shape[1]
    longest = _whole_vectors(np.diff(bounds).max())
    keys, weights = np.empty((dim, longest), np.float32), np.empty((ROWS, longest), np.float32)
    for i in range(len(bounds) - 1):
        start, end = bounds[i], bounds[i + 1]
        for head in range(heads):
            group = head * groups // heads
            if head * groups % heads == 0:
                _transpose(key[start:end, group], keys)
            q, v, o = query[start:end, head], value[start:end, group], out[start:end, head]
            for row in range(0, end - start, ROWS):
                some = q[row : row + ROWS]
                seen = row + len(some)
                _products(some, keys, seen, weights)
                for r in range(len(some)):
                    log_sums[start + row + r, head] = softmax(weights[r, : row + r + 1], scale)
                _clear(weights, row, len(some))
                _sums(weights, v[:seen], o[row:seen])


@numba.njit(cache=True, nogil=True, fastmath=True)
def attend_backward(query, key, value, bounds, scale, results, grad_out, gradients):
    """Set the gradients of query, key and value, given that of `attend`'s out.

    With p the softmax and g = grad_out, the gradient of a score is p · (g · V − Σ_d g · out), as in
    FlashAttention (Dao et al., 2022, arXiv:2205.14135, appendix B).

    Args:
        query, key, value, bounds, scale: of `attend`.
        results: out and log_sums of `attend`.
        grad_out: as out.
        gradients: as (query, key, value), written.
    """
    (_, heads, dim), groups = query.shape, key.shape[1]
    out, log_sums = results
    grad_query, grad_key, grad_value = gradients
    grad_key[:] = 0
    grad_value[:] = 0
    longest = _whole_vectors(np.diff(bounds).max())
    keys, values = np.empty((dim, longest), np.float32), np.empty((dim, longest), np.float32)
    weights, slopes = np.empty((ROWS, longest), np.float32), np.empty((ROWS, longest), np.float32)
    for i in range(len(bounds) - 1):
        start, end = bounds[i], bounds[i + 1]
        for head in range(heads):
            group = head * groups // heads
            k = key[start:end, group]
            if head * groups % heads == 0:
                _transpose(k, keys)
                _transpose(value[start:end, group], values)
            for row in range(start, end, ROWS):
                q, g = query[row : min(row + ROWS, end), head], grad_out[row:end, head][:ROWS]
                count, seen = len(q), row - start + len(q)
                _products(q, keys, seen, weights)
                _products(g, values, seen, slopes)
                for r in range(count):
                    delta = np.float32(0)
                    for d in range(dim):
                        delta += g[r, d] * out[row + r, head, d]
                    log_sum = log_sums[row + r, head]
                    _slopes(weights[r, : seen - count + r + 1], slopes[r], scale, log_sum, delta)
                _clear(weights, seen - count, count)
                _clear(slopes, seen - count, count)
                _sums(slopes, k[:seen], grad_query[row : row + count, head])
                _add_products(slopes, q, grad_key[start : start + seen, group])
                _add_products(weights, g, grad_value[start : start + seen, group])


@numba.njit(cache=True, nogil=True)
def _whole_vectors(length):
    return -(-length // SIZE) * SIZE


@numba.njit(cache=True, nogil=True)
def _transpose(rows, columns):
    """Set columns[:, j] to row j, and to zeros after the last row, up to a whole vector."""
    for j in range(len(rows)):
        for d in range(len(columns)):
            columns[d, j] = rows[j, d]
    columns[:, len(rows) : _whole_vectors(len(rows))] = 0


@numba.njit(cache=True, nogil=True, fastmath=True)
def _products(rows, columns, count, out):
    """Set out[r, j] = rows[r] · columns[:, j] for the first `count` columns, in whole vectors.

    There are ROWS results. Where there are fewer rows, the last one repeats.
    """
    r1, r2, r3 = min(1, len(rows) - 1), min(2, len(rows) - 1), min(3, len(rows) - 1)
    for j in range(0, count, SIZE):
        s0, s1, s2, s3 = zeros(), zeros(), zeros(), zeros()
        for d in range(len(columns)):
            column = load_row(columns, d, j)
            s0 = multiply_add(rows[0, d], column, s0)
            s1 = multiply_add(rows[r1, d], column, s1)
            s2 = multiply_add(rows[r2, d], column, s2)
            s3 = multiply_add(rows[r3, d], column, s3)
        store_row(out, 0, j, s0)
        store_row(out, 1, j, s1)
        store_row(out, 2, j, s2)
        store_row(out, 3, j, s3)


@numba.njit(cache=True, nogil=True, fastmath=True)
def _slopes(scores, slopes, scale, log_sum, delta):
    """Replace scores by their softmax, and slopes = g · V by the gradient of the scores."""
    for j in range(len(scores)):
        weight = exp(min(scale * scores[j] - log_sum, np.float32(0)))
        scores[j] = weight
        slopes[j] = scale * weight * (slopes[j] - delta)


@numba.njit(cache=True, nogil=True)
def _clear(weights, row, count):
    """Clear the weights of the rows from `row` on for later keys, and those of missing rows."""
    for r in range(ROWS):
        for j in range(row + r + 1 if r < count else 0, row + count):
            weights[r, j] = 0


@numba.njit(cache=True, nogil=True, fastmath=True)
def _sums(weights, rows, out):
    """Set out[r] = Σ_j weights[r, j] · rows[j], for at most ROWS rows of `out`."""
    for d in range(0, rows.shape[1], SIZE):
        s0, s1, s2, s3 = zeros(), zeros(), zeros(), zeros()
        for j in range(len(rows)):
            row = load_row(rows, j, d)
            s0 = multiply_add(weights[0, j], row, s0)
            s1 = multiply_add(weights[1, j], row, s1)
            s2 = multiply_add(weights[2, j], row, s2)
            s3 = multiply_add(weights[3, j], row, s3)
        store_row(out, 0, d, s0)
        if len(out) > 1:
            store_row(out, 1, d, s1)
        if len(out) > 2:
            store_row(out, 2, d, s2)
        if len(out) > 3:
            store_row(out, 3, d, s3)


@numba.njit(cache=True, nogil=True, fastmath=True)
def _add_products(weights, rows, out):
    """Add Σ_r weights[r, j] · rows[r] to out[j]. Missing rows have weights of zero."""
    r1, r2, r3 = min(1, len(rows) - 1), min(2, len(rows) - 1), min(3, len(rows) - 1)
    for d in range(0, rows.shape[1], SIZE):
        x0, x1 = load_row(rows, 0, d), load_row(rows, r1, d)
        x2, x3 = load_row(rows, r2, d), load_row(rows, r3, d)
        for j in range(len(out)):
            total = multiply_add(weights[0, j], x0, load_row(out, j, d))
            total = multiply_add(weights[1, j], x1, total)
            total = multiply_add(weights[2, j], x2, total)
            store_row(out, j, d, multiply_add(weights[3, j], x3, total))

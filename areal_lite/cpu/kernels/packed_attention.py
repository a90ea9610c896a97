"""Causal attention within packed segments, and its gradient, without a GPU.

The keys that a segment sees are copied side by side first, for each group of heads. `ROWS` queries
are computed together, so that each vector of keys or values is loaded once for all of them. Scores
are computed again for the gradient. No more than [ROWS, most keys] of them exist at a time. With a
window, keys before that of the first of these queries are left out.
"""

# numba passes the first argument of an intrinsic itself.
# pyright: reportCallIssue=false

import numba
import numpy as np

from areal_lite.cpu.kernels.vectors import SIZE, exp, load, multiply_add, softmax, store, zeros

ROWS = 4
"""Queries that are computed together."""


@numba.njit(cache=True, nogil=True, fastmath=True)
def attend(query, key, value, spans, scale, out, log_sums):
    """Set out[t, h] = softmax(scale · query[t, h] · K) · V over the keys that t sees.

    Args:
        query: float32 [tokens, heads, dim]; dim is a multiple of 16.
        key, value: float32 [tokens, groups, dim]; a group serves heads / groups heads.
        spans: queries, keys and index of areal_lite.megatron.kernels.Spans, and the window: how
            many of its keys a token sees at most.
        scale: float32.
        out: as query, written.
        log_sums: float32 [tokens, heads], written: log Σ exp(scale · query · K).
    """
    (_, heads, dim), groups = query.shape, key.shape[1]
    queries, bounds, index, window = spans
    longest = _whole_vectors(np.diff(bounds).max())
    keys, values = np.empty((dim, longest), np.float32), np.empty((longest, dim), np.float32)
    weights = np.empty((ROWS, longest), np.float32)
    for i in range(len(bounds) - 1):
        start, end, seen = queries[i], queries[i + 1], index[bounds[i] : bounds[i + 1]]
        before = len(seen) - (end - start)
        for head in range(heads):
            group = head * groups // heads
            if head * groups % heads == 0:
                _transpose(key, seen, group, keys)
                _copy(value, seen, group, values)
            for row in range(start, end, ROWS):
                some = query[row : min(row + ROWS, end), head]
                first = before + row - start
                known, low = first + len(some), _first_vector(first, window)
                _products(some, keys[:, low:], known - low, weights)
                for r in range(len(some)):
                    last = first + r + 1 - low
                    seen_by = weights[r, max(last - window, 0) : last]
                    log_sums[row + r, head] = softmax(seen_by, scale)
                _clear(weights, first - low, len(some), window)
                _sums(weights, values[low:known], out[row : row + len(some), head])


@numba.njit(cache=True, nogil=True, fastmath=True)
def attend_backward(query, key, value, spans, scale, results, grad_out, gradients):
    """Set the gradients of query, key and value, given that of `attend`'s out.

    With p the softmax and g = grad_out, the gradient of a score is p · (g · V − Σ_d g · out), as in
    FlashAttention (Dao et al., 2022, arXiv:2205.14135, appendix B).

    Args:
        query, key, value, spans, scale: of `attend`.
        results: out and log_sums of `attend`.
        grad_out: as out.
        gradients: as (query, key, value), written; the last two are zero before.
    """
    (_, heads, dim), groups = query.shape, key.shape[1]
    queries, bounds, index, window = spans
    out, log_sums = results
    grad_query, grad_key, grad_value = gradients
    longest = _whole_vectors(np.diff(bounds).max())
    keys, values = np.empty((dim, longest), np.float32), np.empty((dim, longest), np.float32)
    rows, sums = np.empty((longest, dim), np.float32), np.empty((2, longest, dim), np.float32)
    scratch = np.empty((2, ROWS, longest), np.float32)
    for i in range(len(bounds) - 1):
        own, seen = slice(queries[i], queries[i + 1]), index[bounds[i] : bounds[i + 1]]
        for group in range(groups):
            _transpose(key, seen, group, keys)
            _transpose(value, seen, group, values)
            _copy(key, seen, group, rows)
            sums[:, : len(seen)] = 0
            for head in range(group * heads // groups, (group + 1) * heads // groups):
                _head_backward(
                    (query[own, head], out[own, head], log_sums[own, head], grad_out[own, head]),
                    (keys, values, rows[: len(seen)]),
                    (scale, window),
                    scratch,
                    grad_query[own, head],
                    sums,
                )
            _add(sums[0], seen, group, grad_key)
            _add(sums[1], seen, group, grad_value)


@numba.njit(cache=True, nogil=True, fastmath=True)
def _head_backward(of_queries, of_keys, settings, scratch, grad_query, sums):
    """Set the gradient of a segment's queries; add the gradients of its keys and values to `sums`.

    Args:
        of_queries: queries, results, their log_sums and gradients, of one head.
        of_keys: columns of keys and of values, and rows of keys, of one group.
        settings: scale and window of `attend`.
        scratch: float32 [2, ROWS, most keys].
        grad_query: as the queries, written.
        sums: float32 [2, most keys, dim], added to.
    """
    query, out, log_sums, grad_out = of_queries
    keys, values, rows = of_keys
    weights, slopes = scratch
    scale, window = settings
    before = len(rows) - len(query)
    for row in range(0, len(query), ROWS):
        q, g = query[row : row + ROWS], grad_out[row : row + ROWS]
        count, first = len(q), before + row
        known, low = first + count, _first_vector(first, window)
        _products(q, keys[:, low:], known - low, weights)
        _products(g, values[:, low:], known - low, slopes)
        for r in range(count):
            delta = np.float32(0)
            for d in range(q.shape[1]):
                delta += g[r, d] * out[row + r, d]
            last = first + r + 1 - low
            least = max(last - window, 0)
            _slopes(weights[r, least:last], slopes[r, least:], scale, log_sums[row + r], delta)
        _clear(weights, first - low, count, window)
        _clear(slopes, first - low, count, window)
        _sums(slopes, rows[low:known], grad_query[row : row + count])
        _add_products(slopes, q, sums[0, low:known])
        _add_products(weights, g, sums[1, low:known])


@numba.njit(cache=True, nogil=True)
def _first_vector(first, window):
    """Return the first key that some query from `first` on sees, rounded down to whole vectors."""
    return max(first + 1 - window, 0) // SIZE * SIZE


@numba.njit(cache=True, nogil=True)
def _whole_vectors(length):
    return -(-length // SIZE) * SIZE


@numba.njit(cache=True, nogil=True)
def _transpose(tensor, index, group, columns):
    """Set columns[:, j] to tensor[index[j], group], and to zeros after the last, to a vector."""
    for j in range(len(index)):
        for d in range(len(columns)):
            columns[d, j] = tensor[index[j], group, d]
    columns[:, len(index) : _whole_vectors(len(index))] = 0


@numba.njit(cache=True, nogil=True)
def _copy(tensor, index, group, rows):
    """Set rows[j] to tensor[index[j], group]."""
    for j in range(len(index)):
        for d in range(rows.shape[1]):
            rows[j, d] = tensor[index[j], group, d]


@numba.njit(cache=True, nogil=True)
def _add(rows, index, group, tensor):
    """Add rows[j] to tensor[index[j], group]."""
    for j in range(len(index)):
        for d in range(rows.shape[1]):
            tensor[index[j], group, d] += rows[j, d]


@numba.njit(cache=True, nogil=True, fastmath=True)
def _products(rows, columns, count, out):
    """Set out[r, j] = rows[r] · columns[:, j] for the first `count` columns, in whole vectors.

    There are ROWS results. Where there are fewer rows, the last one repeats.
    """
    r1, r2, r3 = min(1, len(rows) - 1), min(2, len(rows) - 1), min(3, len(rows) - 1)
    for j in range(0, count, SIZE):
        s0, s1, s2, s3 = zeros(), zeros(), zeros(), zeros()
        for d in range(len(columns)):
            column = load(columns[d], j)
            s0 = multiply_add(rows[0, d], column, s0)
            s1 = multiply_add(rows[r1, d], column, s1)
            s2 = multiply_add(rows[r2, d], column, s2)
            s3 = multiply_add(rows[r3, d], column, s3)
        store(out[0], j, s0)
        store(out[1], j, s1)
        store(out[2], j, s2)
        store(out[3], j, s3)


@numba.njit(cache=True, nogil=True, fastmath=True)
def _slopes(scores, slopes, scale, log_sum, delta):
    """Replace scores by their softmax, and slopes = g · V by the gradient of the scores."""
    for j in range(len(scores)):
        weight = exp(min(scale * scores[j] - log_sum, np.float32(0)))
        scores[j] = weight
        slopes[j] = scale * weight * (slopes[j] - delta)


@numba.njit(cache=True, nogil=True)
def _clear(weights, row, count, window):
    """Clear the weights of missing rows, and of keys that rows from `row` on do not see."""
    for r in range(ROWS):
        last = row + r + 1 if r < count else 0
        for j in range(last - window):
            weights[r, j] = 0
        for j in range(last, row + count):
            weights[r, j] = 0


@numba.njit(cache=True, nogil=True, fastmath=True)
def _sums(weights, rows, out):
    """Set out[r] = Σ_j weights[r, j] · rows[j], for at most ROWS rows of `out`."""
    for d in range(0, rows.shape[1], SIZE):
        s0, s1, s2, s3 = zeros(), zeros(), zeros(), zeros()
        for j in range(len(rows)):
            row = load(rows[j], d)
            s0 = multiply_add(weights[0, j], row, s0)
            s1 = multiply_add(weights[1, j], row, s1)
            s2 = multiply_add(weights[2, j], row, s2)
            s3 = multiply_add(weights[3, j], row, s3)
        store(out[0], d, s0)
        if len(out) > 1:
            store(out[1], d, s1)
        if len(out) > 2:
            store(out[2], d, s2)
        if len(out) > 3:
            store(out[3], d, s3)


@numba.njit(cache=True, nogil=True, fastmath=True)
def _add_products(weights, rows, out):
    """Add Σ_r weights[r, j] · rows[r] to out[j]. Missing rows have weights of zero."""
    r1, r2, r3 = min(1, len(rows) - 1), min(2, len(rows) - 1), min(3, len(rows) - 1)
    for d in range(0, rows.shape[1], SIZE):
        x0, x1 = load(rows[0], d), load(rows[r1], d)
        x2, x3 = load(rows[r2], d), load(rows[r3], d)
        for j in range(len(out)):
            total = multiply_add(weights[0, j], x0, load(out[j], d))
            total = multiply_add(weights[1, j], x1, total)
            total = multiply_add(weights[2, j], x2, total)
            store(out[j], d, multiply_add(weights[3, j], x3, total))

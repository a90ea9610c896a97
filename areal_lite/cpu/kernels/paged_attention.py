"""Kernels of a decode step without a GPU: the KV cache and attention over it.

The cache has pages of `PAGE` slots. A page keeps its keys as [kv_heads, head_dim, PAGE], so that a
vector holds the same element of `PAGE` keys, and dot products need no sums across a vector. Values
are kept as [PAGE, kv_heads, head_dim].

Attention is bound by memory. With 128 requests of 140 tokens, 4 heads of 32 and 4 layers, it reads
20 GB/s on a core that adds up a large array at 21 GB/s.
"""

# numba passes the first argument of an intrinsic itself.
# pyright: reportCallIssue=false

from typing import Any, NamedTuple

import numba
import numpy as np

from areal_lite.cpu.kernels.vectors import (
    SIZE,
    add,
    load,
    multiply_add,
    prefetch,
    softmax,
    store,
    zeros,
)

PAGE = SIZE
"""Slots of a page."""
_PAGES_AHEAD = 2
"""Distance of the prefetch. With 1, attention takes 15 % longer; with 3, 5 % less to 10 % more."""


class Alike(NamedTuple):
    """The distinct rows of a prefill, and the repeated ones; all int64."""

    rows: np.ndarray  # the distinct ones, ascending
    place: np.ndarray  # of each row of the prefill among them
    others: np.ndarray  # the repeated ones
    source: np.ndarray  # the distinct row that each repeated one equals


def find_alike(batch: Any, slots: np.ndarray) -> Alike | None:
    """Find the requests of a prefill that extend the same cached tokens by the same tokens.

    Returns None if all rows differ, and for a decode step. batch: SGLang's ForwardBatch. slots: of
    the tokens of each request, [requests, tokens].
    """
    if not batch.forward_mode.is_extend_without_speculative():
        return None
    tokens = batch.input_ids.numpy()
    source = np.arange(len(tokens))
    first: dict[tuple[bytes, bytes], int] = {}
    lengths = batch.extend_prefix_lens.tolist(), batch.extend_seq_lens.tolist()
    end = 0
    for request, cached, new in zip(batch.req_pool_indices.tolist(), *lengths, strict=True):
        begin, end = end, end + new
        key = slots[request, :cached].tobytes(), tokens[begin:end].tobytes()
        source[begin:end] = first.setdefault(key, begin) + np.arange(new)
    if len(first) == len(batch.req_pool_indices):
        return None
    rows, place = np.unique(source, return_inverse=True)
    others = np.setdiff1d(np.arange(len(tokens)), rows)
    return Alike(rows, place, others, source[others])


def copy_tokens(keys: np.ndarray, values: np.ndarray, old: np.ndarray, new: np.ndarray) -> None:
    """Copy the keys and values of a layer from slots to others, both int64 [tokens]."""
    keys[new // PAGE, :, :, new % PAGE] = keys[old // PAGE, :, :, old % PAGE]
    values[new // PAGE, new % PAGE] = values[old // PAGE, old % PAGE]


@numba.njit(cache=True, nogil=True, fastmath=True)
def place_heads(projections, norms, eps, angles, slots, query, keys, values):
    """Norm and rotate the queries and keys of new tokens, and write keys and values to the cache.

    Args:
        projections: float32 [tokens or more, (heads + 2 kv_heads) · dim]: queries, keys, values.
        norms: float32 [2, dim], the weights of the norms of queries and keys; [0, dim] for none.
        eps: float32, of these norms.
        angles: float32 [tokens, dim]: the cosines, then the sines, of the angles of each token.
        slots: int64 [tokens], where the cache has the tokens.
        query: float32 [tokens, heads, dim], written.
        keys: float32 [pages, kv_heads, dim, PAGE], written at `slots`.
        values: float32 [pages, PAGE, kv_heads, dim], written at `slots`.
    """
    (tokens, heads, dim), kv_heads = query.shape, keys.shape[1]
    half, first_value = dim // 2, (heads + kv_heads) * dim
    for t in range(tokens):
        page, offset = slots[t] // PAGE, slots[t] % PAGE
        for h in range(heads + kv_heads):
            result = query[t, h] if h < heads else keys[page, h - heads, :, offset]
            factor = np.float32(1)
            if len(norms):
                total = np.float32(0)
                for i in range(h * dim, (h + 1) * dim):
                    total += projections[t, i] * projections[t, i]
                factor /= np.sqrt(total / np.float32(dim) + eps)
            for i in range(half):
                a, b = projections[t, h * dim + i], projections[t, h * dim + half + i]
                if len(norms):
                    weight = norms[0] if h < heads else norms[1]
                    a, b = a * factor * weight[i], b * factor * weight[half + i]
                result[i] = a * angles[t, i] - b * angles[t, half + i]
                result[half + i] = b * angles[t, i] + a * angles[t, half + i]
        for h in range(kv_heads):
            for i in range(dim):
                values[page, offset, h, i] = projections[t, first_value + h * dim + i]


@numba.njit(cache=True, nogil=True, fastmath=True)
def paged_attention(query, keys, values, req_to_token, rows, lengths, settings, out):
    """Set out[t, h] = softmax(scale · query[t, h] · K) · V for every query token t and head h.

    K and V are those of the first lengths[t] slots of request rows[t]. They are read in place, in
    float32 arithmetic for any type of cache. numpy has no bfloat16, so a bfloat16 cache is passed
    as its bits (uint16).

    Args:
        query: float32 [tokens, heads, head_dim]; head_dim is a multiple of 16.
        keys: float32 or bfloat16 bits [pages, kv_heads, head_dim, PAGE].
        values: as `keys`, [pages, PAGE, kv_heads, head_dim].
        req_to_token: int32 [requests, context], the slots of each request, in whole pages.
        rows: int64 [tokens].
        lengths: int64 [tokens], at least 1.
        settings: scale, float32; window, how many of its slots a token sees at most, the last ones;
            and sinks, float32 [heads] or [0], the scores of one more key, without a value.
        out: float32 [tokens, heads, head_dim], written.
    """
    (num_tokens, num_heads, dim), (scale, window, sinks) = query.shape, settings
    most_pages = -(-lengths.max() // PAGE)
    scores = np.empty((num_heads, most_pages * PAGE), np.float32)
    k, v, kv_heads = keys.reshape(-1), values.reshape(-1), keys.shape[1]
    page_size = PAGE * kv_heads * dim
    # The order in which pages are read: keys, values, then the first keys of the next token.
    starts = np.empty(2 * most_pages + _PAGES_AHEAD, np.int64)
    for t in range(num_tokens):
        start = max(lengths[t] - window, 0)  # the first slot that it sees
        skipped = start // PAGE * PAGE
        length, start = lengths[t] - skipped, start - skipped
        slots, count = req_to_token[rows[t], skipped:], -(-length // PAGE)
        next_slots = req_to_token[rows[min(t + 1, num_tokens - 1)]]
        _list_pages(slots, next_slots, count, page_size, starts)
        for i in range(count):
            ahead = i + _PAGES_AHEAD
            fetched = v if count <= ahead < 2 * count else k
            _score(query, t, k, starts[i], kv_heads, scores, i * PAGE, fetched, starts[ahead])
        _weigh(scores, start, length, scale, sinks)
        out[t] = 0
        for i in range(count):
            ahead = count + i + _PAGES_AHEAD
            fetched = v if ahead < 2 * count else k
            some = scores[:, i * PAGE : min(length, (i + 1) * PAGE)]
            _add_values(some, v, starts[i], kv_heads, out, t, fetched, starts[ahead])


@numba.njit(cache=True, nogil=True)
def _list_pages(slots, next_slots, count, page_size, starts):
    """Set `starts` to where `count` pages begin in the cache, twice, and the next token's first."""
    for page in range(count):
        starts[page] = slots[page * PAGE] // PAGE * page_size
        starts[count + page] = starts[page]
    for page in range(_PAGES_AHEAD):
        slot = next_slots[min(page * PAGE, len(next_slots) - 1)]
        starts[2 * count + page] = slot // PAGE * page_size


@numba.njit(cache=True, nogil=True, fastmath=True)
def _weigh(scores, start, length, scale, sinks):
    """Replace scores from `start` to `length` by their softmax, and those before by zeros."""
    for head in range(len(scores)):
        scores[head, :start] = 0
        total = softmax(scores[head, start:length], scale)
        if len(sinks):
            scores[head, start:length] /= np.float32(1) + np.exp(sinks[head] - total)


@numba.njit(cache=True, nogil=True, fastmath=True)
def _score(query, t, keys, start, kv_heads, scores, slot, fetched, ahead):
    """Set the scores of all heads of token t for the keys of a page, and prefetch another page.

    Args:
        query: float32 [tokens, heads, dim].
        keys: the cache, flat, whose element `start` is the first of the page.
        scores: float32 [heads, slots], written from `slot` on.
        fetched: the cache to prefetch from, flat, from element `ahead` on.
    """
    _, num_heads, dim = query.shape
    q, flat, group = query.reshape(-1), scores.reshape(-1), num_heads // kv_heads
    for head in range(num_heads):
        first, block = (t * num_heads + head) * dim, head // group * dim * PAGE
        even, odd = zeros(), zeros()  # two sums, since each waits for its last addition
        for d in range(0, dim, 2):
            if head % group == 0:
                prefetch(fetched, ahead + block + d * PAGE)
                prefetch(fetched, ahead + block + d * PAGE + PAGE)
            key = start + block + d * PAGE
            even = multiply_add(q[first + d], load(keys, key), even)
            odd = multiply_add(q[first + d + 1], load(keys, key + PAGE), odd)
        store(flat, head * scores.shape[1] + slot, add(even, odd))


@numba.njit(cache=True, nogil=True, fastmath=True)
def _add_values(weights, values, start, kv_heads, out, t, fetched, ahead):
    """Add the weighted values of a page to all heads of token t, out [tokens, heads, dim].

    `weights` is float32 [heads, slots of the page that are in use]. The rest is as in `_score`.
    """
    (_, num_heads, dim), used = out.shape, weights.shape[1]
    result, group, row = out.reshape(-1), num_heads // kv_heads, kv_heads * dim
    for kv_head in range(kv_heads):
        for offset in range(kv_head * dim, (kv_head + 1) * dim, PAGE):
            for i in range(PAGE):
                prefetch(fetched, ahead + offset + i * row)
            for head in range(kv_head * group, (kv_head + 1) * group):
                where = (t * num_heads + head - kv_head) * dim + offset
                even, odd = load(result, where), zeros()
                for i in range(0, used - 1, 2):
                    value = start + offset + i * row
                    even = multiply_add(weights[head, i], load(values, value), even)
                    odd = multiply_add(weights[head, i + 1], load(values, value + row), odd)
                if used % 2:
                    value = start + offset + (used - 1) * row
                    even = multiply_add(weights[head, used - 1], load(values, value), even)
                store(result, where, add(even, odd))

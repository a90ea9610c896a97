"""Kernels of a decode step without a GPU: the KV cache and attention over it, compiled by numba.

The cache has pages of `PAGE` slots. A page keeps its keys as [kv_heads, head_dim, PAGE], so that a
vector holds the same element of `PAGE` keys, and dot products need no sums across a vector. Values
are kept as [PAGE, kv_heads, head_dim].

numba turns a loop into vector instructions only if it is long. Heads of 32 or 64 elements are
short, so `Vector` gives the kernels vectors of 16 numbers. A processor without such wide registers
uses two or four of its own.

Attention is bound by memory. With 128 requests of 140 tokens, 4 heads of 32 and 4 layers, it reads
20 GB/s on a core that adds up a large array at 21 GB/s.

All functions are in one file, because numba's cache looks at the time of a function's own file.
"""

# numba passes the first argument of an intrinsic itself.
# pyright: reportCallIssue=false

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.datamodel import models, register_default
from numba.extending import intrinsic

PAGE = 16
"""Slots of a page, and numbers of a vector."""
_PAGES_AHEAD = 2
"""Distance of the prefetch. With 1, attention takes 15 % longer; with 3, 5 % less to 10 % more."""
_FLOATS = ir.VectorType(ir.FloatType(), PAGE)
_FAST = ("fast",)


class _VectorType(types.Type):
    """The type of a vector of PAGE float32 numbers in numba."""

    def __init__(self) -> None:
        super().__init__(name="Vector")


Vector = _VectorType()


@register_default(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, frontend_type) -> None:
        super().__init__(manager, frontend_type, _FLOATS)


@intrinsic
def _zeros(_typing):
    """Return a vector of zeros."""
    return Vector(), lambda *_: ir.Constant(_FLOATS, [0.0] * PAGE)


@intrinsic
def _load(_typing, array, first):
    """Return PAGE elements of a flat array as float32, from `first` on.

    An array of uint16 has the bits of bfloat16 numbers: the upper halves of float32 numbers.
    """

    def generate(context, builder, signature, args):
        if signature.args[0].dtype == types.float32:
            return builder.load(_pointer(context, builder, signature, args, _FLOATS), align=4)
        halves = _pointer(context, builder, signature, args, ir.VectorType(ir.IntType(16), PAGE))
        bits = ir.VectorType(ir.IntType(32), PAGE)
        wide = builder.zext(builder.load(halves, align=2), bits)
        return builder.bitcast(builder.shl(wide, ir.Constant(bits, [16] * PAGE)), _FLOATS)

    return Vector(array, types.intp), generate


@intrinsic
def _store(_typing, array, first, vector):
    """Write a vector to a flat array of float32, from `first` on."""

    def generate(context, builder, signature, args):
        builder.store(args[2], _pointer(context, builder, signature, args, _FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, Vector), generate


@intrinsic
def _multiply_add(_typing, number, vector, total):
    """Return number · vector + total."""

    def generate(_context, builder, _signature, args):
        number, vector, total = args
        zero = ir.Constant(ir.IntType(32), 0)
        nothing = ir.Constant(_FLOATS, ir.Undefined)
        same = ir.Constant(ir.VectorType(ir.IntType(32), PAGE), [0] * PAGE)
        first = builder.insert_element(nothing, number, zero)
        product = builder.fmul(builder.shuffle_vector(first, nothing, same), vector, flags=_FAST)
        return builder.fadd(product, total, flags=_FAST)

    return Vector(types.float32, Vector, Vector), generate


@intrinsic
def _add(_typing, a, b):
    """Return a + b."""
    return Vector(Vector, Vector), lambda _context, builder, _signature, args: builder.fadd(*args)


@intrinsic
def _prefetch(_typing, array, offset):
    """Ask for the cache line of element `offset` of a flat array."""

    def generate(context, builder, signature, args):
        byte_pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, flag, flag, flag])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], kind)
        pointer = _pointer(context, builder, signature, args, ir.IntType(8))
        read, keep, of_data = (ir.Constant(flag, value) for value in (0, 3, 1))
        builder.call(function, [pointer, read, keep, of_data])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _pointer(context, builder, signature, args, target: ir.Type) -> ir.Value:
    """Return the address of element args[1] of the array args[0], as a pointer to `target`."""
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.bitcast(builder.gep(data, [args[1]]), target.as_pointer())


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
def paged_attention(query, keys, values, req_to_token, rows, lengths, scale, out):
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
        scale: float32.
        out: float32 [tokens, heads, head_dim], written.
    """
    num_tokens, num_heads, dim = query.shape
    most_pages = -(-lengths.max() // PAGE)
    scores = np.empty((num_heads, most_pages * PAGE), np.float32)
    k, v, kv_heads = keys.reshape(-1), values.reshape(-1), keys.shape[1]
    page_size = PAGE * kv_heads * dim
    # The order in which pages are read: keys, values, then the first keys of the next token.
    starts = np.empty(2 * most_pages + _PAGES_AHEAD, np.int64)
    for t in range(num_tokens):
        slots, count = req_to_token[rows[t]], -(-lengths[t] // PAGE)
        next_slots = req_to_token[rows[min(t + 1, num_tokens - 1)]]
        for page in range(count):
            starts[page] = slots[page * PAGE] // PAGE * page_size
            starts[count + page] = starts[page]
        for page in range(_PAGES_AHEAD):
            slot = next_slots[min(page * PAGE, len(next_slots) - 1)]
            starts[2 * count + page] = slot // PAGE * page_size
        for i in range(count):
            ahead = i + _PAGES_AHEAD
            fetched = v if count <= ahead < 2 * count else k
            _score(query, t, k, starts[i], kv_heads, scores, i * PAGE, fetched, starts[ahead])
        for head in range(num_heads):
            _softmax(scores[head, : lengths[t]], scale)
        out[t] = 0
        for i in range(count):
            ahead = count + i + _PAGES_AHEAD
            fetched = v if ahead < 2 * count else k
            some = scores[:, i * PAGE : min(lengths[t], (i + 1) * PAGE)]
            _add_values(some, v, starts[i], kv_heads, out, t, fetched, starts[ahead])


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
        even, odd = _zeros(), _zeros()  # two sums, since each waits for its last addition
        for d in range(0, dim, 2):
            if head % group == 0:
                _prefetch(fetched, ahead + block + d * PAGE)
                _prefetch(fetched, ahead + block + d * PAGE + PAGE)
            key = start + block + d * PAGE
            even = _multiply_add(q[first + d], _load(keys, key), even)
            odd = _multiply_add(q[first + d + 1], _load(keys, key + PAGE), odd)
        _store(flat, head * scores.shape[1] + slot, _add(even, odd))


@numba.njit(cache=True, nogil=True, fastmath=True)
def _add_values(weights, values, start, kv_heads, out, t, fetched, ahead):
    """Add the weighted values of a page to all heads of token t, and prefetch another page.

    Args:
        weights: float32 [heads, slots of the page that are in use].
        values: the cache, flat, whose element `start` is the first of the page.
        out: float32 [tokens, heads, dim], added to.
        fetched: the cache to prefetch from, flat, from element `ahead` on.
    """
    (_, num_heads, dim), used = out.shape, weights.shape[1]
    result, group, row = out.reshape(-1), num_heads // kv_heads, kv_heads * dim
    for kv_head in range(kv_heads):
        for offset in range(kv_head * dim, (kv_head + 1) * dim, PAGE):
            for i in range(PAGE):
                _prefetch(fetched, ahead + offset + i * row)
            for head in range(kv_head * group, (kv_head + 1) * group):
                where = (t * num_heads + head - kv_head) * dim + offset
                even, odd = _load(result, where), _zeros()
                for i in range(0, used - 1, 2):
                    value = start + offset + i * row
                    even = _multiply_add(weights[head, i], _load(values, value), even)
                    odd = _multiply_add(weights[head, i + 1], _load(values, value + row), odd)
                if used % 2:
                    value = start + offset + (used - 1) * row
                    even = _multiply_add(weights[head, used - 1], _load(values, value), even)
                _store(result, where, _add(even, odd))


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


@numba.njit(cache=True, nogil=True, fastmath=True)
def _softmax(scores, scale):
    """Replace scores, float32 [n], by softmax(scale · scores)."""
    highest = scores[0]
    for i in range(1, len(scores)):
        highest = max(highest, scores[i])
    total = np.float32(0)
    for i in range(len(scores)):
        scores[i] = _exp(scale * (scores[i] - highest))
        total += scores[i]
    factor = np.float32(1) / total
    for i in range(len(scores)):
        scores[i] *= factor

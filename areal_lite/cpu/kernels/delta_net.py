"""The gated delta net of a server without a GPU, token after token (arXiv:2412.06464)."""

import numba
import numpy as np


@numba.njit(cache=True, nogil=True, fastmath=True)
def advance(x, bounds, weight, decay, step, before, states, out):
    """Compute the tokens of several requests, and update their states.

    Args:
        x: float32 [tokens, channels]: the queries of all key heads, their keys, all values.
        bounds: int64 [requests + 1], of each request's tokens.
        weight: float32 [channels, k], of the convolution.
        decay: float32 [tokens, heads], what a state is multiplied by.
        step: float32 [tokens, heads].
        before: float32 [requests, channels, k - 1], the last rows of x before; updated.
        states: float32 [requests, heads, d_v, d_k]; updated.
        out: float32 [tokens, heads, d_v], written.
    """
    channels, (_, heads, d_v, d_k) = x.shape[1], states.shape
    key_heads = (channels - heads * d_v) // (2 * d_k)
    mixed = np.empty(channels, np.float32)
    for r in range(len(bounds) - 1):
        for t in range(bounds[r], bounds[r + 1]):
            _convolve(x[t], weight, before[r], mixed)
            for h in range(2 * key_heads):
                _normalize(mixed[h * d_k : (h + 1) * d_k], h < key_heads)
            for h in range(heads):
                start = h * key_heads // heads * d_k
                q = mixed[start : start + d_k]
                k = mixed[key_heads * d_k + start : key_heads * d_k + start + d_k]
                v = mixed[2 * key_heads * d_k + h * d_v :]
                for j in range(d_v):
                    row, found, result = states[r, h, j], np.float32(0), np.float32(0)
                    for i in range(d_k):
                        row[i] *= decay[t, h]
                        found += row[i] * k[i]
                    added = step[t, h] * (v[j] - found)
                    for i in range(d_k):
                        row[i] += added * k[i]
                        result += row[i] * q[i]
                    out[t, h, j] = result


@numba.njit(cache=True, nogil=True, fastmath=True)
def _convolve(x, weight, before, mixed):
    """Set `mixed` to silu of the convolution at the token x, and move `before` on."""
    channels, taps = weight.shape
    for c in range(channels):
        total = weight[c, taps - 1] * x[c]
        for i in range(taps - 1):
            total += weight[c, i] * before[c, i]
        for i in range(taps - 2):
            before[c, i] = before[c, i + 1]
        before[c, taps - 2] = x[c]
        mixed[c] = total / (np.float32(1) + np.exp(-total))


@numba.njit(cache=True, nogil=True, fastmath=True)
def _normalize(x, is_query):
    """Divide x by its length, and a query by the root of its size, too."""
    square = np.float32(1e-6)
    for i in range(len(x)):
        square += x[i] * x[i]
    scale = np.float32(1) / np.sqrt(square * (np.float32(len(x)) if is_query else np.float32(1)))
    for i in range(len(x)):
        x[i] *= scale

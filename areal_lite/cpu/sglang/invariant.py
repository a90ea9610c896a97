"""Matrix products and sampling that do not depend on the rest of the batch, without a GPU.

SGLang's own batch-invariant products and its hash for seeded sampling are Triton kernels.

Attention, norms, softmax and activations compute each row by itself. Matrix products do not: the
library takes other kernels, and other shares of the sum for each thread, for other numbers of rows,
and the sums differ in the last bit. So a product is computed in blocks of `_ROWS` rows, the last of
which is filled up with zeros. All products with a weight then have one shape, for which the library
always does the same.
"""

import functools
from collections.abc import Callable

import numba
import numpy as np
import torch

_ROWS = 32
_TRIALS = ((64, 96), (128, 384), (896, 512))  # (inner size, columns)


def install_products(dtype: torch.dtype) -> None:
    """Let the two functions with which SGLang multiplies compute in blocks, in this process.

    Raises RuntimeError if a product of one shape depends on where a row is in its block.
    """
    if not all(_rows_are_independent(*trial, dtype) for trial in _TRIALS):
        raise RuntimeError(
            f"server.deterministic=true: a row of a matrix product of {dtype} depends on the other"
            " rows on this CPU: set it to false"
        )
    torch.nn.functional.linear = in_blocks(torch.nn.functional.linear)
    torch.matmul = in_blocks(torch.matmul)


def _rows_are_independent(inner: int, columns: int, dtype: torch.dtype) -> bool:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(_ROWS, inner, generator=random).to(dtype)
    weight = torch.randn(columns, inner, generator=random).to(dtype).t()
    product = torch.mm(rows, weight)
    moved = (torch.mm(rows.roll(by, 0), weight).roll(-by, 0) for by in range(1, _ROWS))
    return all(torch.equal(product, other) for other in moved)


def in_blocks(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `product(rows, ...)`, computed in blocks of `_ROWS` rows if they are 2-D.

    An operator of torch that is replaced by one in Python costs more than a small product.
    """

    @functools.wraps(product)
    def multiply(rows: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        if rows.dim() != 2:
            return product(rows, *others)
        filled = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % _ROWS))
        blocks = [product(block, *others) for block in filled.split(_ROWS)]
        return torch.cat(blocks)[: len(rows)]

    return multiply


def multinomial_with_seed(
    logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Sample a token of each row, as SGLang's function of this name does.

    Args:
        logprobs: float [n, vocabulary], in nats.
        seed: int64 [n].
        positions: int64 [n], of the last token before the one that is sampled.

    Returns int64 [n, 1].
    """
    tokens = torch.empty(len(logprobs), dtype=torch.int64)
    _sample_rows(
        logprobs.double().contiguous().numpy(),
        seed.to(torch.int64).numpy(),
        positions.to(torch.int64).numpy(),
        tokens.numpy(),
    )
    return tokens.view(-1, 1)


_U32 = np.uint64(0xFFFFFFFF)


@numba.njit(inline="always")
def _rotate(x, bits):
    """Rotate the low 32 bits of a uint64 to the left."""
    return ((x << np.uint64(bits)) | (x >> np.uint64(32 - bits))) & _U32


@numba.njit(inline="always")
def _mix(state, block):
    """Mix a block of 32 bits into the state of MurmurHash3."""
    block = (block * np.uint64(0xCC9E2D51)) & _U32
    block = (_rotate(block, 15) * np.uint64(0x1B873593)) & _U32
    return (_rotate(state ^ block, 13) * np.uint64(5) + np.uint64(0xE6546B64)) & _U32


@numba.njit(inline="always")
def _finish(state):
    """Return the hash of four blocks: their length in bytes, and the final mix."""
    state ^= np.uint64(16)
    state ^= state >> np.uint64(16)
    state = (state * np.uint64(0x85EBCA6B)) & _U32
    state ^= state >> np.uint64(13)
    state = (state * np.uint64(0xC2B2AE35)) & _U32
    return state ^ (state >> np.uint64(16))


@numba.njit(cache=True, nogil=True)
def _sample_rows(logprobs, seeds, positions, tokens):
    """Set tokens[i] to the largest logprobs[i] + Gumbel noise of (seed, position, token)."""
    most_negative = -np.finfo(np.float64).max
    for row in range(len(tokens)):
        seed = np.uint64(seeds[row])
        state = _mix(_mix(np.uint64(0), seed & _U32), seed >> np.uint64(32))
        state = _mix(state, np.uint64(positions[row]) & _U32)
        best = -np.inf
        tokens[row] = 0
        for token in range(logprobs.shape[1]):
            uniform = np.float64(_finish(_mix(state, np.uint64(token)))) / 4294967295.0
            waited = -min(max(np.log(uniform), most_negative), -(2.0**-32))
            noisy = logprobs[row, token] - np.log(waited)
            if noisy > best:
                best = noisy
                tokens[row] = token

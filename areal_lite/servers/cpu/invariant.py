"""Matrix products and sampling that do not depend on the rest of the batch, without a GPU.

SGLang's own batch-invariant products and its hash for seeded sampling are Triton kernels.

Attention, norms, softmax and activations compute each row by itself. Matrix products
do not: the library takes other kernels for the last rows of a small batch and for the parts of a
batch that threads share, and their sums differ in the last bit. Measured with MKL in float32: with
one thread the products of 1, 2 and 3 rows differ from those of 4 and more, with two threads also
those of 5 to 7 and 9 to 11. Products of a multiple of a few rows agree. `install_products` finds
that multiple on this machine and fills every batch up to it with rows of zeros.
"""

import functools
from collections.abc import Callable

import numba
import numpy as np
import torch

# Rows to try, for each thread, and products (inner size, columns) to try them on.
_BLOCKS = (4, 8, 16, 32)
_TRIALS = ((64, 96), (128, 384), (896, 512))
_ROWS = 256


def row_block(dtype: torch.dtype) -> int:
    """Return the smallest number of rows whose multiples give the same products row by row.

    Raises RuntimeError if there is none.
    """
    for block in (rows * torch.get_num_threads() for rows in _BLOCKS):
        if all(_agrees(block, inner, columns, dtype) for inner, columns in _TRIALS):
            return block
    raise RuntimeError(
        f"server.deterministic=true: matrix products of {dtype} on this CPU depend on the number"
        " of rows in every way that was tried: set it to false"
    )


def _agrees(block: int, inner: int, columns: int, dtype: torch.dtype) -> bool:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(_ROWS * block // 4, inner, generator=random).to(dtype)
    weight = torch.randn(columns, inner, generator=random).to(dtype).t()
    whole = torch.mm(rows, weight, out=rows.new_empty(len(rows), columns))
    for count in range(block, len(rows) + 1, block):
        part = rows[-count:]
        product = torch.mm(part, weight, out=rows.new_empty(count, columns))
        if not torch.equal(product, whole[-count:]):
            return False
    return True


def install_products(dtype: torch.dtype) -> None:
    """Let the two functions with which SGLang multiplies fill up batches, in this process."""
    block = row_block(dtype)
    torch.nn.functional.linear = filled_up(torch.nn.functional.linear, block)
    torch.matmul = filled_up(torch.matmul, block)


def filled_up(product: Callable[..., torch.Tensor], block: int) -> Callable[..., torch.Tensor]:
    """Return `product(rows, ...)`, computed with a multiple of `block` rows if they are 2-D.

    An operator of torch that is replaced by one in Python costs more than a small product.
    """

    @functools.wraps(product)
    def fill_up(rows: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        missing = -rows.shape[0] % block
        if not missing or rows.dim() != 2:
            return product(rows, *others)
        return product(torch.nn.functional.pad(rows, (0, 0, 0, missing)), *others)[: len(rows)]

    return fill_up


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

"""Draws from distributions over a vocabulary."""

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def draw(weights: np.ndarray, uniform: np.ndarray, tokens: np.ndarray) -> None:
    """Set tokens[r] to the first token up to which row r has more than uniform[r] of its weight.

    Args:
        weights: float32 [rows, vocabulary], not negative. A row need not add up to one.
        uniform: float64 [rows], at least 0 and less than 1.
        tokens: int32 [rows], the result. A token without weight is never drawn. With NaN in a row,
            its token stays as it is.
    """
    for row in range(len(tokens)):
        total = 0.0
        for token in range(weights.shape[1]):
            total += weights[row, token]
        bound, so_far = uniform[row] * total, 0.0
        for token in range(weights.shape[1]):
            so_far += weights[row, token]
            if so_far > bound:
                tokens[row] = token
                break

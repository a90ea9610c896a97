"""Draws of tokens on a server without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from areal_lite.cpu.kernels.sampling import draw

WEIGHTS = arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.integers(1, 30)),
    elements=st.one_of(st.just(0.0), st.floats(2**-20, 1, width=32)),
)


def drawn(weights: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    tokens = np.full(len(weights), -1, np.int32)
    draw(weights, uniform, tokens)
    return tokens


@given(WEIGHTS, st.floats(0, 1, exclude_max=True))
def test_it_inverts_the_cumulative_distribution(weights: np.ndarray, uniform: float) -> None:
    weights[:, 0] += weights.sum(-1) == 0
    tokens = drawn(weights, np.full(len(weights), uniform))
    for row, token in zip(weights.astype(np.float64), tokens):
        ends = np.cumsum(row)
        assert token == np.searchsorted(ends, uniform * ends[-1], side="right")
        assert row[token] > 0


def test_draws_follow_the_distribution() -> None:
    """Chi-square with 199 degrees of freedom, below its 99.9 % quantile."""
    source, count = np.random.default_rng(0), 200_000
    weights = source.exponential(size=200).astype(np.float32)
    tokens = drawn(np.broadcast_to(weights, (count, 200)).copy(), source.random(count))
    expected = weights / weights.sum() * count
    counts = np.bincount(tokens, minlength=200)
    assert ((counts - expected) ** 2 / expected).sum() < 267.5


@pytest.mark.parametrize("row", [[0.0, np.nan, 1.0], [np.nan, np.nan, np.nan]])
def test_nan_draws_nothing(row: list[float]) -> None:
    assert drawn(np.array([row], np.float32), np.array([0.5])).tolist() == [-1]

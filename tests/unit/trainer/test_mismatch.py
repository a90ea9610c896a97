"""Staleness without mismatch against loops, and against a log-ratio whose parts are known."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.recipes.mismatch import staleness_share, trainer_behavior
from tests.unit.algo.algo_batches import on_ranks

VERSION, OLDEST = 9, 3


def tokens(seed: int, n: int = 60) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-ratios, versions (some older than the bound) and a mask."""
    generator = torch.Generator().manual_seed(seed)
    difference = torch.randn(n, generator=generator, dtype=torch.float64)
    versions = torch.randint(VERSION - OLDEST - 2, VERSION + 1, (n,), generator=generator)
    return difference, versions, torch.rand(n, generator=generator) < 0.8


def plain_share(difference, versions, mask) -> list[float]:
    squares: list[list[float]] = [[] for _ in range(OLDEST + 1)]
    for d, v, m in zip(difference.tolist(), versions.tolist(), mask.tolist()):
        if m:
            squares[min(VERSION - v, OLDEST)].append(d * d)
    if not squares[0]:
        return [1.0] * (OLDEST + 1)
    mismatch = sum(squares[0]) / len(squares[0])
    return [max(0.0, 1 - mismatch / (sum(own) / len(own))) if own else 1.0 for own in squares]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.booleans())
def test_shares_are_those_of_loops_on_any_number_of_ranks(seed, ranks, fresh):
    difference, versions, mask = tokens(seed)
    mask &= fresh | (versions < VERSION)
    found = on_ranks(
        ranks,
        lambda rank, reduce: staleness_share(
            difference[rank::ranks],
            versions[rank::ranks],
            mask[rank::ranks],
            version=VERSION,
            oldest=OLDEST,
            reduce=reduce,
        ),
    )
    expected = plain_share(difference, versions, mask)
    for share in found:
        assert share.tolist() == pytest.approx(expected, abs=1e-12)


def test_the_estimate_is_the_best_linear_one():
    """With known parts s and m, no other factor of d is closer to s. Fresh tokens have s = 0."""
    generator = torch.Generator().manual_seed(3)
    n = 400_000
    versions = torch.randint(VERSION - 2, VERSION + 1, (n,), generator=generator)
    age = VERSION - versions
    stale = 0.2 * age * torch.randn(n, generator=generator, dtype=torch.float64)
    mismatch = 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)
    behavior = -3 * torch.rand(n, generator=generator, dtype=torch.float64)
    prox, mask = behavior + stale + mismatch, torch.ones(n, dtype=torch.bool)
    share = staleness_share(prox - behavior, versions, mask, version=VERSION, oldest=2)
    assert share.tolist() == pytest.approx([0.0, 0.04 / 0.05, 0.16 / 0.17], abs=0.01)
    estimate = prox - trainer_behavior(prox, behavior, versions, share, version=VERSION)
    error = ((estimate - stale) ** 2).mean()
    assert (estimate[age == 0] == 0).all()
    assert error < ((prox - behavior - stale) ** 2).mean() / 1.5
    for factor in (0.95, 1.05):
        assert error < ((factor * estimate - stale) ** 2).mean()

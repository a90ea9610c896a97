"""The parts of recipes against loops over single values in float64, on any number of ranks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.recipes.kpop import binary_kl
from examples.recipes.m2po import batch_limit
from examples.recipes.opo import optimal_baseline
from tests.unit.algo.algo_batches import on_ranks, ragged

seeds = st.integers(0, 100_000)


def bernoulli_kl(one: float, other: float) -> float:
    """KL of two coins with these log-probs of heads, of which each is within 1e-6 and 1 - 1e-6."""
    p, q = (min(max(math.exp(x), 1e-6), 1 - 1e-6) for x in (one, other))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


@settings(max_examples=60, deadline=None)
@given(st.floats(-20, 0), st.floats(-20, 0))
def test_the_binary_divergence_of_certain_and_of_rare_tokens(prox, behavior):
    both = [torch.tensor([x], dtype=torch.float32) for x in (prox, behavior)]
    there, back = (float(binary_kl(*pair)) for pair in (both, both[::-1]))
    assert there == back >= 0 and math.isfinite(there)
    expected = max(bernoulli_kl(prox, behavior), bernoulli_kl(behavior, prox))
    # float32 has 6e-8 of 1 - p, which is at least 1e-6 here.
    assert there == pytest.approx(expected, rel=0.1, abs=1e-4)


def plain_budget(values: list[float], bound: float) -> set[int]:
    """The values that stay: all, less the largest one after the other until the mean is good."""
    left = sorted(range(len(values)), key=lambda i: values[i])
    while left and sum(values[i] for i in left) >= bound * len(left):
        left.pop()
    return set(left)


@settings(max_examples=80, deadline=None)
@given(seeds, st.sampled_from([1e-4, 0.01, 0.04, 0.3, 50.0]))
def test_a_batch_loses_its_largest_distances_until_their_mean_is_good(seed, bound):
    x, _, _ = ragged(seed, sequences=12)
    # The limit is found in float32, in which random values differ.
    values = (x.prox - x.behavior)[x.mask & torch.isfinite(x.behavior)] ** 2
    kept = values.float() <= batch_limit(values, bound=bound)
    stay = plain_budget(values.tolist(), bound)
    assert kept.tolist() == [i in stay for i in range(len(values))]


@settings(max_examples=20, deadline=None)
@given(seeds, st.integers(2, 5))
def test_all_ranks_find_the_limit_of_the_whole_batch(seed, ranks):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(97, generator=generator) ** 2
    owner = torch.randint(0, ranks, (97,), generator=generator)  # a rank may have none
    expected = batch_limit(values, bound=0.3)
    found = on_ranks(
        ranks, lambda rank, reduce: batch_limit(values[owner == rank], bound=0.3, reduce=reduce)
    )
    assert found == [expected] * ranks
    stay = plain_budget(values.double().tolist(), 0.3)
    assert set(torch.nonzero(values <= expected).flatten().tolist()) == stay


def test_limits_at_the_edges():
    assert batch_limit(torch.zeros(0), bound=0.1) > 1e38
    assert batch_limit(torch.zeros(5), bound=0.1) > 1e38, "on-policy, nothing is rejected"
    assert batch_limit(torch.full((5,), 0.2), bound=0.1) < 0.2, "nothing good is left"
    mixed = torch.tensor([0.0, 0.1, math.inf, 0.1])
    assert 0.1 <= batch_limit(mixed, bound=0.07) < math.inf
    # Equal values leave together: with one of them the mean would be good.
    assert batch_limit(torch.tensor([0.0, 1.0, 1.0]), bound=0.6) < 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), seeds)
def test_the_optimal_baseline_weighs_rewards_by_squared_norms(groups, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards, norms = torch.rand(2, len(groups), generator=generator, dtype=torch.float64)
    ids = torch.tensor(groups)
    expected = []
    for group in groups:
        own = [i for i, other in enumerate(groups) if other == group]
        expected.append(float((norms * rewards)[own].sum() / norms[own].sum()))
    found = optimal_baseline(rewards, ids, norms)
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert not optimal_baseline(rewards, ids, torch.zeros_like(norms)).any()


def test_no_other_baseline_has_less_variance():
    """Two arms of unequal gradient norm: the variance of sum_i g_i (r_i - b) is least at b*."""
    generator = torch.Generator().manual_seed(1)
    n = 200_000
    long = torch.rand(n, generator=generator) < 0.3
    rewards = torch.where(long, 1.0, 0.2).double()
    norms = torch.where(long, 9.0, 1.0).double()
    score = norms.sqrt() * torch.randn(n, generator=generator, dtype=torch.float64)
    best = float(optimal_baseline(rewards, torch.zeros(n, dtype=torch.long), norms)[0])
    assert best == pytest.approx((0.3 * 9 + 0.7 * 0.2) / (0.3 * 9 + 0.7), rel=0.01)
    variance = float((score * (rewards - best)).var())
    for other in (best - 0.1, best + 0.1, float(rewards.mean())):
        assert variance < float((score * (rewards - other)).var())

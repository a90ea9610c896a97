"""Accuracy, pass@k and their intervals equal independent references."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from areal_lite.controller.evaluation import Scores, interval, pass_at_k


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), st.data())
def test_pass_at_k_counts_the_choices_with_a_correct_sample(case, data):
    samples, correct = case
    k = data.draw(st.integers(1, samples))
    choices = list(combinations([True] * correct + [False] * (samples - correct), k))
    assert pass_at_k(samples, correct, k) == pytest.approx(np.mean([any(c) for c in choices]))


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_of_a_share_is_wilsons(case):
    correct, problems = case
    reference = binomtest(correct, problems).proportion_ci(0.95, "wilson")
    assert interval(correct / problems, problems) == pytest.approx(tuple(reference), abs=1e-12)


def test_intervals_contain_the_truth_in_19_of_20_evaluations():
    """Shares of 64 problems whose difficulty varies, with pass@2 of four samples each."""
    generator = np.random.default_rng(1)
    inside = []
    for _ in range(2000):
        difficulty = generator.beta(0.5, 0.7, size=(64, 1))
        rewards = generator.random((64, 5)) < difficulty
        record = Scores(rewards.astype(np.float64), [0], 0).record()
        low, high = record["pass_at_k_intervals"]["2"]
        # E[1 - (1 - d)^2] = 2 E[d] - E[d^2] for d ~ Beta(a, b).
        mean = 0.5 / 1.2
        truth = 2 * mean - mean * 1.5 / 2.2
        inside.append(low <= truth <= high)
    assert 0.94 < np.mean(inside) <= 1


def test_a_reward_outside_0_and_1_has_no_interval():
    record = Scores(np.array([[-1.0, 0.5], [1.0, 0.0]]), [3], 0).record()
    assert record["greedy"] == 0 and record["greedy_interval"] is None
    assert record["pass_at_k"] == {"1": 0.5}

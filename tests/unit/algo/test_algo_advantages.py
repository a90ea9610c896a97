"""Advantages, reward shaping and metrics against loops, in float64."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.algo.advantages import (
    gae,
    grpo,
    moments,
    overlong_penalty,
    reinforce_plus_plus,
    rloo,
    shares,
    token_rewards,
    whiten,
)
from areal_lite.algo.correction import finite_mask
from areal_lite.algo.losses import kl_estimate
from areal_lite.algo.metrics import (
    by_staleness,
    clip_counts,
    effective_sample_size,
    ratio_sums,
)
from areal_lite.algo.sequences import discounted_sum, group_mean
from tests.unit.algo.algo_batches import ragged, rows

seeds = st.integers(0, 100_000)
rewards_of_groups = st.lists(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, -2.0]), min_size=1, max_size=5), min_size=1, max_size=5
)


def scattered(groups, seed):
    """Rewards and ids of all members in a random order, and that order."""
    rewards = torch.tensor([r for g in groups for r in g], dtype=torch.float64)
    ids = torch.tensor([17 * i for i, g in enumerate(groups) for _ in g])
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    return rewards[order], ids[order], order


@settings(max_examples=40, deadline=None)
@given(rewards_of_groups, seeds, st.booleans())
def test_rloo_and_leave_one_out_grpo(groups, seed, std):
    rewards, ids, order = scattered(groups, seed)
    expected = []
    for g in groups:
        for i, r in enumerate(g):
            rest = g[:i] + g[i + 1 :]
            a = r - sum(rest) / len(rest) if rest else 0.0
            expected.append(a / (statistics.stdev(g) + 1e-6) if std and len(set(g)) > 1 else a)
    got = grpo(rewards, ids, leave_one_out=True) if std else rloo(rewards, ids)
    torch.testing.assert_close(
        got, torch.tensor(expected, dtype=torch.float64)[order], rtol=1e-9, atol=1e-12
    )


@settings(max_examples=40, deadline=None)
@given(rewards_of_groups, seeds, st.booleans(), st.booleans())
def test_grpo_with_statistics_of_the_batch(groups, seed, batch_mean, divide):
    rewards, ids, order = scattered(groups, seed)
    flat = [r for g in groups for r in g]
    stats = moments(rewards)
    mean, std = sum(flat) / len(flat), statistics.stdev(flat) if len(flat) > 1 else 0.0
    assert (stats.count, stats.mean, stats.std) == pytest.approx((len(flat), mean, std), abs=1e-12)
    expected = []
    for g in groups:
        for r in g:
            a = r - (mean if batch_mean else sum(g) / len(g))
            expected.append((a / (std + 1e-6) if std else 0.0) if divide else a)
    got = grpo(
        rewards,
        ids,
        divide_by_std=divide,
        batch_mean=stats if batch_mean else None,
        batch_std=stats,
    )
    torch.testing.assert_close(
        got, torch.tensor(expected, dtype=torch.float64)[order], rtol=1e-9, atol=1e-12
    )


groups_of_episodes = st.lists(
    st.lists(st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=1, max_size=5), min_size=1),
    min_size=1,
    max_size=4,
)


@settings(max_examples=100, deadline=None)
@given(groups_of_episodes, seeds, st.booleans(), st.booleans(), st.sampled_from(["group", "batch"]))
def test_an_episode_counts_once_however_many_traces_it_has(groups, seed, loo, divide, over):
    rewards, ids, order = scattered([[r for e in g for r in e] for g in groups], seed)
    sizes = torch.tensor([len(e) for g in groups for e in g])
    episode_ids = torch.repeat_interleave(torch.arange(len(sizes)), sizes)[order]
    expected = []
    for g in groups:
        pool = g if over == "group" else [e for other in groups for e in other]
        means = [sum(e) / len(e) for e in pool]
        mean = sum(means) / len(means)
        spread = sum(sum((r - mean) ** 2 for r in e) / len(e) for e in pool)
        deviation = math.sqrt(spread / max(len(pool) - 1, 1))
        for e in g:
            others = [m for m, other in zip(means, pool) if other is not e]
            baseline = sum(others) / len(others) if loo and others else mean
            constant = len({r for other in pool for r in other}) == 1
            expected += [0.0 if constant else (r - baseline) for r in e]
            if divide and not constant:
                expected[-len(e) :] = [a / (deviation + 1e-6) for a in expected[-len(e) :]]
    whole = moments(rewards, weights=shares(rewards, episode_ids))
    assert whole.count == pytest.approx(len(sizes))
    got = grpo(
        rewards,
        ids,
        episode_ids=episode_ids,
        divide_by_std=divide,
        leave_one_out=loo,
        batch_mean=whole if over == "batch" else None,
        batch_std=whole if over == "batch" else None,
    )
    torch.testing.assert_close(
        got, torch.tensor(expected, dtype=torch.float64)[order], rtol=1e-8, atol=1e-9
    )


@settings(max_examples=40, deadline=None)
@given(rewards_of_groups, seeds, st.booleans())
def test_traces_that_share_a_reward_have_the_advantage_of_their_episode(groups, seed, loo):
    rewards, ids, _ = scattered(groups, seed)
    generator = torch.Generator().manual_seed(seed)
    traces = torch.randint(1, 6, (len(rewards),), generator=generator)
    episode_ids = torch.repeat_interleave(torch.arange(len(rewards)), traces)
    got = grpo(rewards[episode_ids], ids[episode_ids], episode_ids=episode_ids, leave_one_out=loo)
    alone = grpo(rewards, ids, leave_one_out=loo)
    torch.testing.assert_close(got, alone[episode_ids], rtol=1e-9, atol=1e-12)


def test_moments_over_ranks_are_those_of_the_whole():
    parts = [torch.tensor([1.0, 4.0, 2.0]), torch.tensor([]), torch.tensor([1e4])]
    whole = moments(torch.cat(parts))
    sums = [
        torch.tensor([4.0, 10007.0], dtype=torch.float64),
        sum((p.double() - whole.mean).square().sum() for p in parts),
    ]

    def all_reduce():
        """Return a reduction that gives each rank the sums over the ranks, one per call."""
        answers = iter(sums)
        return lambda partial: next(answers)

    for part in parts:
        got = moments(part, reduce=all_reduce())
        assert (got.count, got.mean, got.std) == pytest.approx(
            (whole.count, whole.mean, whole.std), rel=1e-12
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_no_signal(dtype):
    rewards, ids = torch.full((7,), 0.1, dtype=dtype), torch.tensor([1, 1, 1, 5, 5, 9, 9])
    assert (grpo(rewards, ids) == 0).all() and (rloo(rewards, ids) == 0).all()
    assert (grpo(rewards, ids, batch_mean=moments(rewards), batch_std=moments(rewards)) == 0).all()
    assert (whiten(rewards, moments(rewards)) == 0).all()


def test_no_trajectories_have_no_advantages():
    empty, ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert (
        len(grpo(empty, ids))
        == len(rloo(empty, ids))
        == len(group_mean(empty, empty.bool(), ids))
        == 0
    )
    assert moments(empty) == moments(torch.zeros(3), torch.zeros(3, dtype=torch.bool))
    assert all(len(part) == 0 for part in gae(empty, empty, empty.bool(), ids))


def plain_gae(rewards, values, mask, ids, gamma, lam, bootstrap):
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for sequence in set(ids):
        following, running = bootstrap[sequence], 0.0
        for t in reversed([t for t in range(len(mask)) if ids[t] == sequence and mask[t]]):
            running = rewards[t] + gamma * following - values[t] + gamma * lam * running
            advantages[t], returns[t], following = running, running + values[t], values[t]
    return advantages, returns


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.95, 0.0]), st.booleans())
def test_gae(seed, gamma, lam, cut_off):
    x, per_sequence, _ = ragged(seed)
    rewards, values = x.advantages + x.prox, x.logprobs.detach()
    bootstrap = per_sequence if cut_off else torch.zeros_like(per_sequence)
    got = gae(
        rewards,
        values,
        x.mask,
        x.sequence_ids,
        gamma=gamma,
        lam=lam,
        bootstrap=bootstrap if cut_off else None,
    )
    expected = plain_gae(
        *(v.tolist() for v in (rewards, values, x.mask, x.sequence_ids)),
        gamma,
        lam,
        bootstrap.tolist(),
    )
    for ours, plain in zip(got, expected):
        assert ours.tolist() == pytest.approx(plain, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("discount", [0.5, 0.95, 1.0])
def test_discounted_sums_of_long_sequences_neither_overflow_nor_drift(discount):
    ids = torch.tensor([0] * 4097 + [3] * 2 + [4] * 3000)
    values = torch.ones(len(ids))
    expected, running = [], 0.0
    for t in reversed(range(len(ids))):
        running = 1.0 + (discount * running if t + 1 < len(ids) and ids[t] == ids[t + 1] else 0.0)
        expected.append(running)
    torch.testing.assert_close(
        discounted_sum(values, ids, discount), torch.tensor(expected[::-1]), rtol=1e-5, atol=0
    )


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from([1.0, 0.9]))
def test_reinforce_plus_plus(seed, gamma):
    x, rewards, _ = ragged(seed)
    divergence = kl_estimate(x.logprobs, x.prox, x.mask, estimator="k1")
    per_token = token_rewards(rewards, x.mask, x.sequence_ids, divergence=divergence, beta=0.1)
    mask, ids, lp, ref = (v.tolist() for v in (x.mask, x.sequence_ids, x.logprobs, x.prox))
    returns: dict[int, float] = {}
    for sequence in set(ids):
        running, last = 0.0, True
        for t in reversed([t for t in range(len(ids)) if ids[t] == sequence and mask[t]]):
            running = (
                (float(rewards[sequence]) if last else 0.0)
                - 0.1 * (lp[t] - ref[t])
                + gamma * running
            )
            returns[t], last = running, False
    mean = statistics.fmean(returns.values())
    std = statistics.stdev(returns.values()) if len(returns) > 1 else 0.0
    expected = [
        (returns[t] - mean) / (std + 1e-8) if t in returns and std else 0.0 for t in range(len(ids))
    ]
    assert reinforce_plus_plus(
        per_token, x.mask, x.sequence_ids, gamma=gamma
    ).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_overlong_penalty():
    lengths = torch.tensor([0, 80, 81, 90, 99, 100, 500])
    assert overlong_penalty(lengths, max_length=100, margin=20).tolist() == pytest.approx(
        [0, 0, -0.05, -0.5, -0.95, -1, -1]
    )


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_metrics(seed):
    x, _, _ = ragged(seed, spread=0.4)
    mask = finite_mask(x.mask, x.behavior)
    tokens = [t for row in rows(x) for t in row]
    ratio = (x.logprobs - x.prox).detach().exp()
    pairs = [(math.exp(t["lp"] - t["prox"]), t["a"]) for t in tokens]
    sums = ratio_sums(ratio, mask)
    assert sums["ratio"].item() == pytest.approx(sum(r for r, _ in pairs))
    assert sums["ratio_max"].item() == pytest.approx(max([r for r, _ in pairs], default=0.0))
    assert sums["ratio_chi2"].item() == pytest.approx(sum((r - 1) ** 2 for r, _ in pairs))
    counts = clip_counts(ratio, x.advantages, mask, eps_low=0.1, eps_high=0.2, dual_clip=1.5)
    high, low = sum(a > 0 and r > 1.2 for r, a in pairs), sum(a < 0 and r < 0.9 for r, a in pairs)
    dual = sum(a < 0 and r > 1.5 for r, a in pairs)
    assert {k: int(v) for k, v in counts.items()} == {
        "clip_fraction": high + low,
        "clip_fraction_high": high,
        "clip_fraction_low": low,
        "clip_fraction_dual": dual,
    }


def test_effective_sample_size():
    assert effective_sample_size(4.0, 4.0, 4.0) == 1.0  # equal weights
    assert effective_sample_size(4.0, 16.0, 4.0) == 0.25  # one weight has it all
    assert effective_sample_size(0.0, 0.0, 0.0) == 0.0


def test_staleness_by_token():
    versions = torch.tensor([5, 5, -1, 4, 2, 0], dtype=torch.int32)
    mask, values = versions >= 0, torch.tensor([1.0, 2.0, 64.0, 4.0, 8.0, 16.0])
    sums, counts = by_staleness(values, versions, mask, version=5, oldest=3)
    assert sums.tolist() == [3.0, 4.0, 0.0, 24.0] and counts.tolist() == [2, 1, 0, 2]

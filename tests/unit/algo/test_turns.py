"""Credit for turns against loops over episodes, turns and tokens, in float64."""

import random
import statistics
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.algo.advantages import (
    credits,
    find_turns,
    gae,
    grpo,
    reinforce_plus_plus,
    relative_to_turns,
    rloo,
    steadied,
    token_rewards,
)
from areal_lite.algo.sequences import discounted_sum

seeds = st.integers(0, 100_000)
discounts = st.sampled_from([0.0, 0.7, 1.0])


def random_episodes(seed: int) -> SimpleNamespace:
    """Make groups of episodes of one or two traces, as lists, and as the tensors of a batch."""
    rng = random.Random(seed)
    traces = []
    for group in range(rng.randint(1, 3)):
        for _ in range(rng.randint(1, 4)):
            for number in range(rng.choice([1, 1, 2])):
                turns = [rng.randint(1, 3) for _ in range(rng.randint(1, 5))]
                traces.append(
                    SimpleNamespace(
                        group=group,
                        number=number,
                        turns=turns,
                        gaps=[rng.randint(1, 2) for _ in turns],
                        earned=[rng.choice([0.0, 0.5, -1.0]) for _ in turns],
                        reward=rng.choice([0.0, 1.0]),
                    )
                )
    sampled, ids, earned = [], [], []
    for i, trace in enumerate(traces):
        for length, gap, value in zip(trace.turns, trace.gaps, trace.earned):
            sampled += [False] * gap + [True] * length
            earned += [0.0] * (gap + length - 1) + [value]
            ids += [i] * (gap + length)
    return SimpleNamespace(
        traces=traces,
        sampled=torch.tensor(sampled),
        sequence_ids=torch.tensor(ids),
        earned=torch.tensor(earned, dtype=torch.float64),
        rewards=torch.tensor([trace.reward for trace in traces], dtype=torch.float64),
        groups=torch.tensor([7 * trace.group for trace in traces]),
        numbers=torch.tensor([trace.number for trace in traces]),
    )


def credits_of(trace: SimpleNamespace) -> list[float]:
    rest = trace.reward - sum(trace.earned)
    return [*trace.earned[:-1], trace.earned[-1] + rest]


def returns_of(trace: SimpleNamespace, gamma: float) -> list[float]:
    values = credits_of(trace)
    return [
        sum(gamma ** (j - k) * values[j] for j in range(k, len(values))) for k in range(len(values))
    ]


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_turns_are_the_runs_of_sampled_tokens(seed):
    x = random_episodes(seed)
    turns = find_turns(x.sampled, x.sequence_ids)
    expected = [(i, k) for i, trace in enumerate(x.traces) for k in range(len(trace.turns))]
    assert list(zip(turns.sequence.tolist(), turns.number.tolist())) == expected
    lengths = [length for trace in x.traces for length in trace.turns]
    assert torch.bincount(turns.of_token[x.sampled]).tolist() == lengths


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_credits_add_up_to_the_reward_and_are_what_turns_earned(seed):
    x = random_episodes(seed)
    turns = find_turns(x.sampled, x.sequence_ids)
    expected = [value for trace in x.traces for value in credits_of(trace)]
    got = credits(x.rewards, x.earned, turns)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))
    outcome = credits(x.rewards, None, turns)
    last = [k == len(t.turns) - 1 for t in x.traces for k in range(len(t.turns))]
    assert outcome.tolist() == [
        x.rewards[i].item() if ends else 0.0 for i, ends in zip(turns.sequence.tolist(), last)
    ]


def steady_returns(traces: list[SimpleNamespace], gamma: float) -> list[list[float]]:
    """Return G_j + c P_j of each turn of each trace, by loops."""
    rows = []  # group and trace, turn, G, P
    for trace in traces:
        values = credits_of(trace)
        for k, value in enumerate(returns_of(trace, gamma)):
            rows.append(((trace.group, trace.number, k), value, sum(values[:k])))
    covariance = variance = 0.0
    for key, g, p in rows:
        peers = [row for row in rows if row[0] == key]
        mean_g, mean_p = (statistics.fmean(row[i] for row in peers) for i in (1, 2))
        covariance += (g - mean_g) * (p - mean_p)
        variance += (p - mean_p) ** 2
    c = gamma * max(-1.0, min(1.0, -covariance / variance)) if variance > 1e-9 else 0.0
    left = iter(rows)
    return [[g + c * p for _, g, p in (next(left) for _ in t.turns)] for t in traces]


def steadied_credits(x: SimpleNamespace, gamma: float, **more: object) -> torch.Tensor:
    turns = find_turns(x.sampled, x.sequence_ids)
    own = credits(x.rewards, x.earned, turns)
    return steadied(own, turns, x.groups, x.numbers, gamma=gamma, **more)


@settings(max_examples=100, deadline=None)
@given(seeds, discounts)
def test_steadied_returns_against_loops(seed, gamma):
    x = random_episodes(seed)
    turns = find_turns(x.sampled, x.sequence_ids)
    got = discounted_sum(steadied_credits(x, gamma), turns.sequence, gamma)
    expected = [value for values in steady_returns(x.traces, gamma) for value in values]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))
    first = turns.number == 0
    whole = discounted_sum(credits(x.rewards, x.earned, turns), turns.sequence, gamma)
    torch.testing.assert_close(got[first], whole[first])


def many_episodes(scores: str) -> SimpleNamespace:
    """Make 2,000 episodes of six turns, each right or not, with credits that are exact or noise."""
    rng, traces = random.Random(0), []
    for number in range(2000):
        right = [rng.random() < 0.4 for _ in range(6)]
        told = right if scores == "exact" else [rng.random() < 0.5 for _ in right]
        earned, reward = [t / 6 for t in told], sum(right) / 6
        traces.append(SimpleNamespace(group=number // 8, earned=earned, reward=reward, right=right))
    episodes = torch.arange(len(traces)).repeat_interleave(12)
    earned = torch.tensor([[0.0, value] for t in traces for value in t.earned]).double().flatten()
    return SimpleNamespace(
        traces=traces,
        sampled=torch.tensor([False, True]).repeat(6 * len(traces)),
        sequence_ids=episodes,
        earned=earned,
        rewards=torch.tensor([t.reward for t in traces]).double(),
        groups=torch.tensor([t.group for t in traces]),
        numbers=torch.zeros(len(traces), dtype=torch.int64),
    )


@pytest.mark.parametrize("scores", ["exact", "noise"])
def test_noise_in_credits_is_taken_back_and_exact_ones_stay(scores):
    """The variance of a turn's return is at most that of the reward, and of what is to come."""
    x = many_episodes(scores)
    turns = find_turns(x.sampled, x.sequence_ids)
    got = discounted_sum(steadied_credits(x, 1.0), turns.sequence, 1.0).view(-1, 6)
    plain = discounted_sum(credits(x.rewards, x.earned, turns), turns.sequence, 1.0).view(-1, 6)
    if scores == "noise":
        assert (got.var(0) < 1.05 * x.rewards.var()).all()
        assert (plain[:, 5].var() > 1.5 * x.rewards.var()).item(), "what it would be"
    else:
        assert (got.var(0) < 1.05 * plain.var(0)).all()


def test_credits_are_steadied_by_the_batches_of_all_ranks():
    x = many_episodes("noise")
    seen = []

    def twice(sums: torch.Tensor) -> torch.Tensor:
        seen.append(sums)
        return 2 * sums

    alone = steadied_credits(x, 1.0)
    torch.testing.assert_close(steadied_credits(x, 1.0, reduce=twice), alone)
    assert len(seen) == 1 and not torch.equal(
        steadied_credits(x, 1.0, reduce=lambda s: s * 0), alone
    )


def test_equal_credits_so_far_change_nothing():
    """Their variance is rounding, and a quotient of two roundings would be any number."""
    x = many_episodes("exact")
    x.earned = 0.1 * x.sampled.double()
    turns = find_turns(x.sampled, x.sequence_ids)
    own = credits(x.rewards, x.earned, turns)
    torch.testing.assert_close(steadied_credits(x, 1.0), own)


@settings(max_examples=100, deadline=None)
@given(seeds, discounts, st.booleans())
def test_a_turn_is_compared_with_the_same_turn_of_its_group(seed, gamma, leave_one_out):
    x = random_episodes(seed)
    expected = []
    for trace in x.traces:
        before = 0.0
        for k, value in enumerate(returns_of(trace, gamma)):
            peers = [
                returns_of(other, gamma)[k]
                for other in x.traces
                if other.group == trace.group
                and other.number == trace.number
                and len(other.turns) > k
            ]
            if len(peers) == 1:
                advantage = before
            elif leave_one_out:
                advantage = value - (sum(peers) - value) / (len(peers) - 1)
            else:
                spread = statistics.stdev(peers)
                advantage = (value - statistics.mean(peers)) / (spread + 1e-6)
                advantage = advantage if len(set(peers)) > 1 else 0.0
            expected.append(before := advantage)
    turns = find_turns(x.sampled, x.sequence_ids)
    got = relative_to_turns(
        credits(x.rewards, x.earned, turns),
        turns,
        x.groups,
        x.numbers,
        gamma=gamma,
        relative=rloo if leave_one_out else grpo,
    )
    torch.testing.assert_close(
        got, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6
    )


@settings(max_examples=60, deadline=None)
@given(seeds, discounts, discounts)
def test_gae_over_turns_against_a_loop_over_tokens(seed, gamma, lam):
    x = random_episodes(seed)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(x.sampled), generator=generator, dtype=torch.float64)
    bootstrap = torch.randn(len(x.traces), generator=generator, dtype=torch.float64)
    mask = x.sampled & (torch.rand(len(x.sampled), generator=generator) < 0.8)
    turns = find_turns(x.sampled, x.sequence_ids)
    rewards = token_rewards(credits(x.rewards, x.earned, turns), mask, turns.of_token)
    got, returns = gae(
        rewards,
        values,
        mask,
        x.sequence_ids,
        gamma=gamma,
        lam=lam,
        bootstrap=bootstrap,
        turn_ids=turns.of_token,
    )
    advantage = torch.zeros_like(values)
    kept = mask.nonzero()[:, 0].tolist()
    for place in reversed(range(len(kept))):
        t, sequence = kept[place], x.sequence_ids[kept[place]]
        after = kept[place + 1] if place + 1 < len(kept) else None
        if after is None or x.sequence_ids[after] != sequence:
            delta = rewards[t] + gamma * bootstrap[sequence] - values[t]
            advantage[t] = delta
            continue
        same = turns.of_token[after] == turns.of_token[t]
        g, gl = (1.0, 1.0) if same else (gamma, gamma * lam)
        advantage[t] = rewards[t] + g * values[after] - values[t] + gl * advantage[after]
    torch.testing.assert_close(got, advantage)
    torch.testing.assert_close(returns[mask], (advantage + values)[mask])
    for turn in range(len(turns.sequence)):  # a turn has one return
        own = returns[mask & (turns.of_token == turn) & x.sampled]
        torch.testing.assert_close(own, own[:1].expand(len(own)))


@settings(max_examples=40, deadline=None)
@given(seeds, discounts)
def test_reinforce_plus_plus_discounts_from_turn_to_turn(seed, gamma):
    x = random_episodes(seed)
    turns = find_turns(x.sampled, x.sequence_ids)
    rewards = token_rewards(credits(x.rewards, x.earned, turns), x.sampled, turns.of_token)
    got = reinforce_plus_plus(
        rewards, x.sampled, x.sequence_ids, gamma=gamma, turn_ids=turns.of_token
    )
    values = torch.tensor([v for t in x.traces for v in returns_of(t, gamma)]).double()
    by_token = values[turns.of_token[x.sampled]]
    spread = by_token.std() if len(by_token) > 1 else torch.tensor(0.0)
    expected = (by_token - by_token.mean()) / (spread + 1e-8)
    if spread < 1e-12:
        expected = torch.zeros_like(by_token)
    torch.testing.assert_close(got[x.sampled], expected, rtol=1e-6, atol=1e-6)
    assert not got[~x.sampled].any()


@pytest.mark.parametrize("discount", [0.3, 1.0])
def test_a_discount_for_each_token(discount):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(50, generator=generator, dtype=torch.float64)
    factors = torch.rand(50, generator=generator, dtype=torch.float64) * discount
    ids = torch.arange(50) // 9
    expected = values.clone()
    for t in reversed(range(49)):
        if ids[t] == ids[t + 1]:
            expected[t] += factors[t] * expected[t + 1]
    torch.testing.assert_close(discounted_sum(values, ids, factors), expected)


def test_a_reward_at_the_end_alone_is_that_of_all_turns():
    """Without turn rewards and discount, equal numbers of turns give the advantages of outcomes."""
    sampled = torch.tensor([0, 1, 1, 0, 1] * 4).bool()
    ids = torch.arange(20) // 5
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.int64)
    turns = find_turns(sampled, ids)
    got = relative_to_turns(
        credits(rewards, None, turns),
        turns,
        groups,
        torch.zeros_like(groups),
        gamma=1.0,
        relative=grpo,
    )
    assert torch.equal(got, grpo(rewards, groups).repeat_interleave(2))

"""Objectives that the configuration builds, against loops over tokens in float64."""

import copy
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from areal_lite.algo.correction import behavior_weight
from areal_lite.algo.losses import value_loss
from areal_lite.algo.objective import FlatBatch, denominator
from areal_lite.config import AlgoConfig, RolloutConfig, TrainConfig
from areal_lite.config.algo import AdvantageConfig, CorrectionConfig, KLConfig, ShapingConfig
from areal_lite.config.command_line import compose_config
from areal_lite.config.fields import settings_of
from areal_lite.megatron.packing import make_microbatches
from areal_lite.train_batch import TrainBatch
from areal_lite.trainer.objective import RATIO_LOSSES, build_objective
from areal_lite.trainer.step import critic_metrics, flat_batch
from areal_lite.trajectory import Trajectory

VERSION = 5


def make_batch(seed: int, groups: int = 4, size: int = 3) -> TrainBatch:
    """Make ragged groups, some incomplete, with truncated, overdue and non-finite tokens.

    Episodes have up to three traces, which share a reward or have their own.
    """
    rng = np.random.default_rng(seed)
    trajectories = []
    episodes = [
        (group, sample_index, trace_index, shared)
        for group in range(groups)
        for sample_index in range(int(rng.integers(1, size + 1)))
        for shared in [rng.choice([0.0, 0.5, 1.0, np.nan])]
        for trace_index in range(int(rng.integers(1, 4)))
    ]
    for group, sample_index, trace_index, shared in episodes:
        prompt, length = int(rng.integers(1, 4)), int(rng.integers(1, 7))
        sampled = np.repeat([False, True], [prompt, length])
        logprobs = np.where(sampled, -np.abs(rng.normal(1, 0.5, prompt + length)), 0).astype(
            np.float32
        )
        if rng.random() < 0.2:
            logprobs[-1] = np.nan
        tokens = rng.integers(2, 9, prompt + length).astype(np.int32)
        versions = np.where(sampled, np.sort(rng.integers(1, 6, prompt + length)), -1)
        trajectory = Trajectory(
            group_id=10 * group,
            prompt_id=str(group),
            sample_index=sample_index,
            trace_index=trace_index,
            tokens=tokens,
            loss_mask=sampled,
            behavior_logprobs=logprobs,
            versions=versions.astype(np.int32),
            finish_reason=str(rng.choice(["stop", "length"])),
            reward=float(rng.choice([0.0, 0.5, 1.0]) if np.isnan(shared) else shared),
        )
        trajectories.append(trajectory.check())
    batch = TrainBatch.from_trajectories(
        [trajectories[i] for i in rng.permutation(len(trajectories))]
    )
    batch.loss_mask &= batch.versions >= 2
    return batch


def summed(x: torch.Tensor) -> torch.Tensor:
    """Sum over data-parallel ranks: there is one."""
    return x


def tensors_of(
    batch: TrainBatch, config: TrainConfig, seed: int
) -> tuple[FlatBatch, torch.Tensor, torch.Tensor]:
    """Return the tensors of a step in float64, current log-probs with gradient, and entropy."""
    t = flat_batch(batch, VERSION, torch.device("cpu"))
    t.mask = build_objective(config).mask(t)
    t.behavior, t.rewards = t.behavior.double(), t.rewards.double()
    generator = torch.Generator().manual_seed(seed)

    def near(x: torch.Tensor) -> torch.Tensor:
        return x + 0.3 * torch.randn(len(x), generator=generator, dtype=torch.float64)

    t.prox = near(t.behavior)
    t.reference = near(t.behavior)
    t.values = near(torch.zeros_like(t.behavior))
    return t, near(t.prox).requires_grad_(), near(torch.ones_like(t.behavior)).abs()


def loss_in_parts(
    t: FlatBatch, batch: TrainBatch, logprobs, entropy, config: TrainConfig, budget: int, num=1
):
    """Sum the loss over minibatches and microbatches, and its metrics."""
    objective = build_objective(config)
    objective.set_targets(t, summed)
    total, metrics = torch.zeros((), dtype=torch.float64), {}
    for indices in batch.minibatches(num):
        token_index = torch.from_numpy(batch.token_indices(indices))
        minibatch = objective.minibatch(t, token_index, logprobs.detach, summed)
        for mb in make_microbatches(batch.select(indices), budget):
            at = token_index[mb.token_index]
            output = objective.loss(t, minibatch, at, logprobs[at], entropy[at])
            total = total + output.loss
            for name, value in output.metrics.items():
                metrics[name] = (
                    max(metrics.get(name, -math.inf), float(value))
                    if name.endswith("_max")
                    else metrics.get(name, 0.0) + float(value)
                )
    return total, metrics


def traces_of_episodes(batch: TrainBatch) -> dict[tuple[int, int], list[int]]:
    """Return by group id and sample index the sequences of each episode."""
    episodes: dict[tuple[int, int], list[int]] = {}
    for s, key in enumerate(zip(batch.group_ids.tolist(), batch.sample_indices.tolist())):
        episodes.setdefault(key, []).append(s)
    return episodes


def clip(x, low, high):
    return min(max(x, low), high)


def plain_loss(t: FlatBatch, logprobs, entropy, algo: AlgoConfig, max_new_tokens: int) -> float:
    """Compute the loss of one minibatch in loops. Advantages are taken from `t`."""
    sequences: dict[int, list[int]] = {}
    for i, s in enumerate(t.sequence_ids.tolist()):
        if t.mask[i]:
            sequences.setdefault(s, []).append(i)
    lp, prox, behave, ref, adv = (
        x.tolist() for x in (logprobs, t.prox, t.behavior, t.reference, t.advantages)
    )
    correction, total = algo.correction, 0.0
    tokens = sum(map(len, sequences.values()))
    episode = dict(enumerate(t.episode_ids.tolist()))
    written = Counter(episode[s] for s, places in sequences.items() for _ in places)
    for s, places in sequences.items():
        n = len(places)
        target = lp if algo.loss == "reinforce" else prox

        def weight(i, target=target, places=places):
            d = target[i] - behave[i]
            if correction.level != "token":
                d = sum(target[j] - behave[j] for j in places) / (
                    len(places) if correction.level == "geometric" else 1
                )
            if correction.mode == "off":
                return 1.0
            if correction.mode == "cap":
                return min(math.exp(d), correction.cap)
            low = 1 / correction.cap if correction.low is None else correction.low
            return math.exp(d) if low <= math.exp(d) <= correction.cap else 0.0

        for i in places:
            share = {
                "token": 1 / tokens,
                "sequence": 1 / written[episode[s]] / len(written),
                "constant": 1 / max_new_tokens / len(written),
            }[algo.reduction]
            anchor = prox if algo.decoupled else behave
            w = weight(i) if algo.decoupled or algo.loss == "reinforce" else 1.0
            r = math.exp(lp[i] - anchor[i])
            if algo.loss == "gspo":
                r = math.exp(sum(lp[j] - anchor[j] for j in places) / n)
            low, high = 1 - algo.eps_low, 1 + algo.eps_high
            if algo.loss in ("ppo", "gspo"):
                value = max(-adv[i] * r, -adv[i] * clip(r, low, high))
                if algo.dual_clip and adv[i] < 0 and algo.loss == "ppo":
                    value = min(value, algo.dual_clip * -adv[i])
            else:
                value = -adv[i] * lp[i] * (clip(r, low, high) if algo.loss == "cispo" else 1.0)
            total += share * w * value
            d = lp[i] - ref[i]
            kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[algo.kl.estimator]
            wk = weight(i, prox)
            total += share * (algo.kl.coef * wk * kl - algo.entropy_coef * float(entropy[i]))
    return total


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    loss=st.sampled_from(sorted(RATIO_LOSSES)),
    reduction=st.sampled_from(["token", "sequence", "constant"]),
    mode=st.sampled_from(["cap", "mask", "off"]),
    level=st.sampled_from(["token", "geometric", "product"]),
    estimator=st.sampled_from(["k1", "k2", "k3"]),
    decoupled=st.booleans(),
    coef=st.sampled_from([0.0, 0.1]),
    budget=st.integers(3, 40),
)
def test_every_loss_against_loops(
    seed, loss, reduction, mode, level, estimator, decoupled, coef, budget
):
    correction = CorrectionConfig(mode, level, cap=1.5)
    algo = AlgoConfig(
        loss=loss,
        decoupled=decoupled,
        reduction=reduction,
        correction=correction,
        eps_high=0.3,
        entropy_coef=coef / 2,
    )
    algo = replace(
        algo, kl=KLConfig(coef, estimator, "loss"), dual_clip=2.0 if loss == "ppo" else None
    )
    config = TrainConfig(model="", algo=algo, rollout=RolloutConfig(max_new_tokens=11))
    batch = make_batch(seed)
    t, logprobs, entropy = tensors_of(batch, config, seed)
    got, _ = loss_in_parts(t, batch, logprobs, entropy, config, budget)
    expected = plain_loss(t, logprobs.detach(), entropy, algo, 11)
    assert float(got.detach()) == pytest.approx(
        expected, rel=1e-6, abs=1e-7
    )  # reduction weights are float32


@pytest.mark.parametrize("loss", [*RATIO_LOSSES, "tb"])
@pytest.mark.parametrize("num", [1, 2])
def test_gradients_do_not_depend_on_packing(loss, num):
    config = TrainConfig(
        model="",
        algo=AlgoConfig(
            loss=loss,
            reduction="sequence",
            correction=CorrectionConfig(level="geometric"),
            kl=KLConfig(0.5 if loss == "tb" else 0.0),
        ),
    )
    batch = make_batch(3)
    gradients, sums = [], []
    for budget in (1000, 9, 1):
        t, logprobs, entropy = tensors_of(batch, config, 1)
        total, metrics = loss_in_parts(t, batch, logprobs, entropy, config, budget, num)
        total.backward()
        gradients.append(logprobs.grad)
        sums.append(metrics)
    assert gradients[0].abs().max() > 0
    for other, metrics in zip(gradients[1:], sums[1:]):
        torch.testing.assert_close(other, gradients[0], rtol=1e-6, atol=1e-9)
        assert metrics == pytest.approx(sums[0], rel=1e-5, abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.integers(3, 40))
def test_trajectory_balance_is_the_variance_within_groups(seed, budget):
    config = TrainConfig(model="", algo=AlgoConfig(loss="tb", kl=KLConfig(0.3)))
    batch = make_batch(seed)
    t, logprobs, entropy = tensors_of(batch, config, seed)
    got, _ = loss_in_parts(t, batch, logprobs, entropy, config, budget)
    residuals: dict[int, list[float]] = {}
    episodes = traces_of_episodes(batch)
    for (group, _), traces in episodes.items():
        # Overdue tokens and those without a behavior log-prob are part of it.
        own = sum(t.sequence_ids == s for s in traces).bool() & t.sampled
        log_ratio = float((logprobs.detach() - t.reference)[own].sum())
        reward = np.mean(batch.rewards[traces], dtype=np.float64)
        residuals.setdefault(group, []).append(log_ratio - reward / 0.3)
    squares = sum((d - np.mean(group)) ** 2 for group in residuals.values() for d in group)
    assert float(got.detach()) == pytest.approx(squares / len(episodes), rel=1e-5)


def mean_of_episodes(batch: TrainBatch, rewards, group: int) -> float:
    """Average the rewards of a group of `batch`, each episode by the mean of its traces."""
    episodes = traces_of_episodes(batch).items()
    return float(
        np.mean([np.mean([rewards[s] for s in e]) for (g, _), e in episodes if g == group])
    )


def test_kl_in_the_reward_of_groups():
    config = TrainConfig(
        model="",
        algo=AlgoConfig(kl=KLConfig(0.1, "k1", "reward"), advantage=AdvantageConfig(std="off")),
    )
    batch = make_batch(4)
    t, _, _ = tensors_of(batch, config, 2)
    build_objective(config).set_targets(t, summed)
    of_token, divergence = t.episode_ids[t.sequence_ids], t.prox - t.reference
    reward = [
        float(batch.rewards[s])
        - 0.1 * float(divergence[(of_token == t.episode_ids[s]) & t.mask].sum())
        for s in range(batch.num_sequences)
    ]
    for s in range(batch.num_sequences):
        mean = mean_of_episodes(batch, reward, batch.group_ids[s])
        for value in t.advantages[t.sequence_ids == s]:
            assert float(value) == pytest.approx(reward[s] - mean, abs=1e-9)


@pytest.mark.parametrize("estimator", ["off", "grpo", "gae"])
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 0.25]))
def test_a_teacher_adds_its_log_ratio_to_the_advantage_of_a_token(estimator, seed, coef):
    batch = make_batch(seed)
    advantage = AdvantageConfig(estimator, whiten=True)
    with_teacher = AlgoConfig(advantage=advantage, kl=KLConfig(coef, "k1", "advantage"))
    t, _, _ = tensors_of(batch, TrainConfig(model="", algo=with_teacher), seed)
    build_objective(TrainConfig(model="", algo=with_teacher)).set_targets(t, summed)
    others = copy.copy(t)
    without = AlgoConfig(advantage=advantage)
    build_objective(TrainConfig(model="", algo=without)).set_targets(others, summed)
    reward = [0.0] * len(t.mask) if estimator == "off" else others.advantages.tolist()
    rows = zip(t.mask.tolist(), t.prox.tolist(), t.reference.tolist(), reward)
    for got, (kept, student, teacher, own) in zip(t.advantages.tolist(), rows):
        assert got == pytest.approx(own - coef * (student - teacher) * kept, abs=1e-12)
    if estimator == "gae":
        assert torch.equal(t.returns, others.returns), "a critic predicts the reward"


@pytest.mark.parametrize("stale", [0.0, 1.5])
def test_distillation_follows_the_gradient_of_the_reverse_kl(stale):
    """Add up the gradients of all tokens that can follow, by the probability of sampling each."""
    overrides = ["model=m", "algo=distill", "algo.reference=m", "algo.correction.cap=1e6"]
    config = OmegaConf.to_object(compose_config("train", overrides))
    objective = build_objective(config)
    generator = torch.Generator().manual_seed(3)

    def noise() -> torch.Tensor:
        return torch.randn(7, generator=generator, dtype=torch.float64)

    student = noise().requires_grad_()
    teacher = noise().log_softmax(0)
    sampler = (student.detach() + stale * noise()).log_softmax(0)
    logprobs = student.log_softmax(0)
    total = torch.zeros((), dtype=torch.float64)
    for token in range(7):
        batch = make_batch(0, groups=1, size=1)
        t = flat_batch(batch, VERSION, torch.device("cpu"))
        index = torch.arange(len(t.mask))
        t.mask = index == int(t.sampled.nonzero()[0])
        t.behavior = torch.full((len(index),), float(sampler[token]), dtype=torch.float64)
        t.prox = torch.full_like(t.behavior, float(logprobs[token].detach()))
        t.reference = torch.full_like(t.behavior, float(teacher[token]))
        objective.set_targets(t, summed)
        part = objective.minibatch(t, index, t.prox.clone, summed)
        output = objective.loss(t, part, index, logprobs[token].expand(len(index)), t.prox)
        total = total + sampler[token].exp() * output.loss
    (got,) = torch.autograd.grad(total, student, retain_graph=True)
    divergence = (logprobs.exp() * (logprobs - teacher)).sum()
    (expected,) = torch.autograd.grad(divergence, student)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_shaped_rewards_count_the_sampled_tokens():
    config = TrainConfig(
        model="",
        rollout=RolloutConfig(max_new_tokens=5),
        algo=AlgoConfig(shaping=ShapingConfig(scale=2.0, bias=-0.5, overlong_margin=2)),
    )
    batch = make_batch(5)
    t, _, _ = tensors_of(batch, config, 0)
    for s, got in enumerate(build_objective(config).shaped_rewards(t).tolist()):
        length = int(((batch.sequence_ids == s) & (batch.versions >= 0)).sum())
        expected = 2.0 * (batch.rewards[s] - 0.5) + clip((5 - 2 - length) / 2, -1.0, 0.0)
        assert got == pytest.approx(expected, abs=1e-6)


def test_truncated_trajectories_can_be_left_out():
    config = TrainConfig(model="", algo=AlgoConfig(shaping=ShapingConfig(mask_truncated=True)))
    batch = make_batch(6)
    t, _, _ = tensors_of(batch, config, 0)
    assert batch.truncated.any() and not batch.truncated.all()
    np.testing.assert_array_equal(
        t.mask.numpy(), batch.loss_mask & ~batch.truncated[batch.sequence_ids]
    )


def test_whitened_advantages_have_mean_0_and_deviation_1_over_tokens():
    config = TrainConfig(
        model="", algo=AlgoConfig(advantage=AdvantageConfig("gae", whiten=True, gamma=0.9, lam=0.8))
    )
    t, _, _ = tensors_of(make_batch(7), config, 0)
    build_objective(config).set_targets(t, summed)
    assert float(t.advantages[t.mask].mean()) == pytest.approx(0, abs=1e-9)
    assert float(t.advantages[t.mask].std()) == pytest.approx(1, abs=1e-6)
    assert not t.advantages[~t.mask].any()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(1.0, 1.0), (0.97, 0.9), (0.9, 0.0)]), st.booleans())
def test_a_truncated_sequence_is_worth_what_would_have_followed(seed, discounts, in_groups):
    """GAE of a whole batch, and of its groups one by one, against a sum over later tokens."""
    gamma, lam = discounts
    algo = AlgoConfig(
        advantage=AdvantageConfig("gae", gamma=gamma, lam=lam), kl=KLConfig(0.3, "k1", "reward")
    )
    config = TrainConfig(model="", algo=algo)
    batch = make_batch(seed)
    flat, _, _ = tensors_of(batch, config, seed)
    divergence = flat.prox - flat.reference
    parts = [torch.arange(len(flat.mask))]
    if in_groups:
        parts = [torch.from_numpy(batch.token_indices(s)) for s in batch.minibatches(4)]
    for index in parts:
        t = flat.at(index)
        kept, t.sequence_ids = t.sequence_ids.unique(return_inverse=True)
        t.rewards, t.truncated = flat.rewards[kept], flat.truncated[kept]
        build_objective(config).set_targets(t, summed)
        for s in range(len(kept)):
            own = torch.nonzero(t.sequence_ids == s)[:, 0].tolist()
            tokens = [i for i in own if t.mask[i]]
            # The state after the last token stands at the first one.
            values = [float(t.values[i]) for i in tokens]
            values.append(float(t.values[own[0]]) if t.truncated[s] else 0.0)
            rewards = [-0.3 * float(divergence[index[i]]) for i in tokens]
            if tokens:
                rewards[-1] += float(t.rewards[s])
            deltas = [r + gamma * values[k + 1] - values[k] for k, r in enumerate(rewards)]
            for k, i in enumerate(tokens):
                later = enumerate(deltas[k:])
                advantage = sum((gamma * lam) ** n * delta for n, delta in later)
                assert float(t.advantages[i]) == pytest.approx(advantage, abs=1e-9)
                assert float(t.returns[i]) == pytest.approx(advantage + values[k], abs=1e-9)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_pp", "gae"])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_credit_for_turns_is_what_an_episode_of_one_turn_earns(estimator, scale):
    """In an episode of one turn, the credit is the reward, whatever the turn is said to earn."""
    batch = make_batch(3)
    batch = batch.select(np.flatnonzero(batch.trace_indices == 0))
    batch.turn_rewards = np.zeros(len(batch.tokens), np.float32)
    batch.turn_rewards[batch.cu_seqlens[1:] - 1] = 0.75
    found = []
    for credit in ("outcome", "turns"):
        advantage = AdvantageConfig(estimator, credit=credit, gamma=1.0, lam=1.0)
        algo = AlgoConfig(advantage=advantage, shaping=ShapingConfig(scale=scale))
        t, _, _ = tensors_of(batch, config := TrainConfig(model="", algo=algo), 0)
        t.earned = t.earned.double()
        build_objective(config).set_targets(t, summed)
        found.append(t.advantages[t.mask])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_pp", "gae"])
def test_a_turn_that_earned_more_has_the_larger_advantage(estimator):
    """Two episodes with the same reward, earned in the first turn and in the second."""
    tokens = np.arange(7, dtype=np.int32)
    sampled = np.array([0, 1, 1, 0, 0, 1, 1], bool)
    pair = [
        Trajectory(
            group_id=0,
            prompt_id="p",
            sample_index=i,
            tokens=tokens,
            loss_mask=sampled,
            behavior_logprobs=np.where(sampled, -1.0, 0.0).astype(np.float32),
            versions=np.where(sampled, VERSION, -1).astype(np.int32),
            finish_reason="stop",
            reward=2.0,
            turn_rewards=earned,
        ).check()
        for i, earned in enumerate([[2.0, 0.0], [0.0, 2.0]])
    ]
    batch = TrainBatch.from_trajectories(pair)
    algo = AlgoConfig(advantage=AdvantageConfig(estimator, credit="turns", gamma=0.0, lam=0.0))
    t, _, _ = tensors_of(batch, config := TrainConfig(model="", algo=algo), 0)
    t.values, t.earned = torch.zeros_like(t.behavior), t.earned.double()
    build_objective(config).set_targets(t, summed)
    first, second = t.advantages.split(7)
    assert (first[[1, 2]] > second[[1, 2]]).all()
    if estimator in ("grpo", "rloo"):
        assert (first[[5, 6]] < second[[5, 6]]).all()
    outcome = AlgoConfig(advantage=AdvantageConfig("grpo"))
    build_objective(TrainConfig(model="", algo=outcome)).set_targets(t, summed)
    assert not t.advantages.any()


def test_credits_of_equal_rewards_give_no_signal():
    """They add up to the reward, in each episode with another rounding."""
    rng, sampled = np.random.default_rng(0), np.tile([False, True], 6)
    group = [
        Trajectory(
            group_id=0,
            prompt_id="p",
            sample_index=i,
            tokens=np.arange(12, dtype=np.int32),
            loss_mask=sampled,
            behavior_logprobs=np.where(sampled, -1.0, 0.0).astype(np.float32),
            versions=np.where(sampled, VERSION, -1).astype(np.int32),
            finish_reason="stop",
            reward=1.0,
            turn_rewards=rng.random(6).tolist(),
        ).check()
        for i in range(8)
    ]
    algo = AlgoConfig(advantage=AdvantageConfig("grpo", credit="turns"))
    t = flat_batch(TrainBatch.from_trajectories(group), VERSION, torch.device("cpu"))
    build_objective(TrainConfig(model="", algo=algo)).set_targets(t, summed)
    assert t.advantages.dtype == torch.float32
    assert t.advantages.abs().max() < 1e-6


def test_a_critic_regresses_on_returns():
    config = TrainConfig(model="", algo=AlgoConfig(advantage=AdvantageConfig("gae")))
    batch = make_batch(8)
    batch.truncated[:] = False
    t, _, _ = tensors_of(batch, config, 0)
    build_objective(config).set_targets(t, summed)
    tokens = torch.arange(len(t.mask))
    count = denominator(t, tokens, mode="token", reduce=summed)
    values = (t.values + 0.5).requires_grad_()

    def critic_loss(values: torch.Tensor, tokens: torch.Tensor):
        part = t.at(tokens)
        return value_loss(
            values[tokens], part.values, part.returns, part.mask, clip=0.2, denominator=count
        )

    outputs = [critic_loss(values, mb.token_index) for mb in make_microbatches(batch, 9)]
    loss = torch.stack([output.loss for output in outputs]).sum()
    expected = [
        max((v + 0.5 - r) ** 2, (v + 0.2 - r) ** 2) / 2
        for v, r, m in zip(t.values.tolist(), t.returns.tolist(), t.mask.tolist())
        if m
    ]
    assert float(loss.detach()) == pytest.approx(np.mean(expected), rel=1e-6)
    pairs = [
        (v + 0.5 - r, v + 0.2 - r)
        for v, r, m in zip(t.values.tolist(), t.returns.tolist(), t.mask.tolist())
        if m
    ]
    assert sum(output.metrics["value_clip_fraction"] for output in outputs) == sum(
        bounded**2 > free**2 for free, bounded in pairs
    )
    sums = {
        name: sum(float(output.metrics[name]) for output in outputs) for name in outputs[0].metrics
    }
    metrics = critic_metrics([sums | {"loss": 0.0, "grad_norm": 0.0, "lr": 0.0, "skipped": 0.0}])
    returns, left = t.returns[t.mask], (t.returns - t.values - 0.5)[t.mask]
    share = 1 - float(left.var() / returns.var())
    assert metrics["value_explained"] == pytest.approx(share, rel=1e-5)
    unmoved = critic_loss(t.values * (1 + 1e-15), tokens)
    assert unmoved.metrics["value_clip_fraction"] == 0, "rounding is not a move"
    # gamma = lambda = 1: the return is the reward, at every token.
    for s in range(batch.num_sequences):
        for value in t.returns[(t.sequence_ids == s) & t.mask]:
            assert float(value) == pytest.approx(float(batch.rewards[s]), abs=1e-9)


def test_every_choice_of_a_loss_builds_an_objective():
    choices = settings_of(AlgoConfig)["loss"].choices
    assert set(choices) == {*RATIO_LOSSES, "tb"}
    for loss in choices:
        build_objective(TrainConfig(model="", algo=AlgoConfig(loss=loss)))
    with pytest.raises(ValueError, match="algo.loss=word must be module:name"):
        build_objective(TrainConfig(model="", algo=AlgoConfig(loss="word")))


def test_the_kl_term_shares_the_weight_of_a_decoupled_loss(monkeypatch):
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return behavior_weight(*args, **kwargs)

    monkeypatch.setattr("areal_lite.algo.losses.behavior_weight", counted)
    monkeypatch.setattr("areal_lite.algo.objective.behavior_weight", counted)
    config = TrainConfig(model="", algo=AlgoConfig(kl=KLConfig(0.1, "k2", "loss")))
    batch = make_batch(9)
    t, logprobs, entropy = tensors_of(batch, config, 0)
    loss_in_parts(t, batch, logprobs, entropy, config, budget=10**6)
    assert len(calls) == 1


@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_a_reference_policy_is_there_only_if_something_needs_it(coef):
    algo = AlgoConfig(kl=KLConfig(coef, "k2", "loss"))
    objective = build_objective(TrainConfig(model="", algo=algo))
    assert objective.needs_reference == bool(coef)
    assert objective.prox_pass == algo.prox_pass == "rest"


def test_selected_tokens_keep_their_sequence_ids():
    batch = make_batch(10)
    t = flat_batch(batch, VERSION, torch.device("cpu"))
    part = t.at(torch.tensor([3, 1]))
    assert part.sequence_ids.tolist() == t.sequence_ids[[3, 1]].tolist()
    assert len(part.rewards) == batch.num_sequences
    with pytest.raises(AttributeError, match="reference"):
        _ = part.reference

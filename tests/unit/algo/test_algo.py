"""Losses, advantages and corrections against plain loops over tokens, in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.algo.advantages import grpo
from areal_lite.algo.correction import Correction, behavior_weight, loglinear_prox
from areal_lite.algo.losses import LossInputs, ppo_loss


def tokens(seed: int, n: int, spread: float = 0.7) -> LossInputs:
    g = torch.Generator().manual_seed(seed)
    behavior = -3 * torch.rand(n, generator=g, dtype=torch.float64)
    prox = behavior + spread * torch.randn(n, generator=g, dtype=torch.float64)
    theta = prox + spread * torch.randn(n, generator=g, dtype=torch.float64)
    advantages = torch.randn(n, generator=g, dtype=torch.float64)
    return LossInputs(
        theta.requires_grad_(), prox, behavior, advantages, torch.rand(n, generator=g) < 0.7
    )


def reference(x: LossInputs, n: float, low, high, dual, decoupled, mode, cap) -> float:
    total = 0.0
    for lp, prox, behav, a, m in zip(
        x.logprobs.tolist(),
        x.prox.tolist(),
        x.behavior.tolist(),
        x.advantages.tolist(),
        x.mask.tolist(),
    ):
        if not m:
            continue
        w = 1.0
        if decoupled and mode != "off":
            w = math.exp(prox - behav)
            if mode == "cap":
                w = min(w, cap)
            elif not 1 / cap <= w <= cap:
                continue
        r = math.exp(lp - (prox if decoupled else behav))
        loss = max(-a * r, -a * min(max(r, 1 - low), 1 + high))
        if dual is not None and a < 0:
            loss = min(loss, dual * abs(a))
        total += w * loss
    return total / n


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 40),
    low=st.sampled_from([0.1, 0.2]),
    high=st.sampled_from([0.2, 0.28]),
    dual=st.sampled_from([None, 3.0]),
    decoupled=st.booleans(),
    mode=st.sampled_from(["cap", "mask", "off"]),
)
def test_ppo_loss_is_the_sum_over_tokens(seed, n, low, high, dual, decoupled, mode):
    x = tokens(seed, n)
    got = ppo_loss(
        x,
        denominator=7.0,
        eps_low=low,
        eps_high=high,
        dual_clip=dual,
        decoupled=decoupled,
        correction=Correction(mode, 1.5),
    )
    assert got.loss.item() == pytest.approx(
        reference(x, 7.0, low, high, dual, decoupled, mode, 1.5), abs=1e-12
    )


def test_ppo_gradient_by_finite_differences():
    x = tokens(3, 12)

    def loss(lp):
        return ppo_loss(
            LossInputs(lp, x.prox, x.behavior, x.advantages, x.mask),
            denominator=5.0,
            eps_low=0.2,
            eps_high=0.3,
        ).loss

    assert torch.autograd.gradcheck(loss, (x.logprobs,), eps=1e-7, atol=1e-6)


def test_decoupled_with_prox_equal_behavior_is_naive_ppo():
    x = tokens(4, 30)
    x = LossInputs(x.logprobs, x.behavior, x.behavior, x.advantages, x.mask)
    losses = [
        ppo_loss(
            x,
            denominator=9.0,
            eps_low=0.2,
            eps_high=0.2,
            decoupled=d,
            correction=Correction(cap=math.inf),
        ).loss
        for d in (True, False)
    ]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-14)


def test_unclipped_decoupled_gradient_is_the_unclipped_naive_gradient():
    """Decoupling moves the clip, not the objective: w r = exp(theta - behavior) for any prox."""
    x = tokens(5, 30)
    grads = []
    for decoupled in (True, False):
        out = ppo_loss(
            x,
            denominator=1.0,
            eps_low=1e9,
            eps_high=1e9,
            decoupled=decoupled,
            correction=Correction(cap=math.inf),
        )
        grads.append(torch.autograd.grad(out.loss, x.logprobs)[0])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), cut=st.integers(1, 29))
def test_shares_of_micro_batches_add_up(seed, cut):
    x = tokens(seed, 30)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(seed))

    def share(index):
        part = LossInputs(
            x.logprobs[index], x.prox[index], x.behavior[index], x.advantages[index], x.mask[index]
        )
        return ppo_loss(part, denominator=11.0, eps_low=0.2, eps_high=0.2).loss

    whole = torch.autograd.grad(share(torch.arange(30)), x.logprobs)[0]
    parts = torch.autograd.grad(share(order[:cut]) + share(order[cut:]), x.logprobs)[0]
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-10)


def test_masked_tokens_do_not_matter_even_if_they_are_extreme():
    x = tokens(6, 10)
    wild = LossInputs(
        torch.where(x.mask, x.logprobs, torch.full_like(x.prox, 500.0)),
        x.prox,
        x.behavior,
        x.advantages,
        x.mask,
    )
    one, two = (ppo_loss(v, denominator=3.0, eps_low=0.2, eps_high=0.2) for v in (x, wild))
    assert one.loss.item() == two.loss.item()
    assert torch.isfinite(torch.autograd.grad(two.loss, x.logprobs)[0]).all()


def test_unknown_correction_is_refused():
    x = tokens(7, 4)
    with pytest.raises(ValueError, match="cap, mask, off"):
        behavior_weight(x.prox, x.behavior, x.mask, mode="clip", cap=2.0)


def test_mismatch_metrics_against_a_loop():
    x = tokens(8, 25)
    got = ppo_loss(x, denominator=1.0, eps_low=0.2, eps_high=0.2).metrics
    d = [p - b for p, b, m in zip(x.prox.tolist(), x.behavior.tolist(), x.mask.tolist()) if m]
    assert got["behave_kl"].item() == pytest.approx(sum(math.exp(v) - v - 1 for v in d), rel=1e-5)
    assert got["behave_kl_k1"].item() == pytest.approx(-sum(d), rel=1e-5)
    assert got["weight_max"].item() == pytest.approx(math.exp(max(d)), rel=1e-5)
    assert got["weight_square_sum"].item() == pytest.approx(
        sum(math.exp(2 * v) for v in d), rel=1e-5
    )


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 1.0, -2.0]), min_size=1, max_size=5),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 99),
    std=st.booleans(),
)
def test_grpo_against_a_loop_over_groups(groups, seed, std):
    rewards = torch.tensor([r for g in groups for r in g], dtype=torch.float64)
    ids = torch.tensor([17 * i for i, g in enumerate(groups) for _ in g])
    expected = []
    for g in groups:
        mean = sum(g) / len(g)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in g) / (len(g) - 1)) if len(g) > 1 else 0.0
        expected += [
            (r - mean) / (deviation + 1e-6 if std else 1.0) if deviation else 0.0 for r in g
        ]
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    got = grpo(rewards[order], ids[order], divide_by_std=std)
    torch.testing.assert_close(
        got, torch.tensor(expected, dtype=torch.float64)[order], rtol=1e-9, atol=1e-9
    )


def test_a_group_without_variance_has_no_advantage_in_float32():
    rewards = torch.full((7,), 0.1)
    assert (grpo(rewards, torch.zeros(7, dtype=torch.int64)) == 0).all()


def test_loglinear_prox_of_fresh_tokens_is_the_behavior_policy():
    behavior, theta = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -1.0, -2.0])
    got = loglinear_prox(behavior, theta, torch.tensor([4, 3, 1]), version=4)
    # ages 0, 1, 3 -> alpha 0, 1/2, 3/4
    torch.testing.assert_close(got, torch.tensor([-1.0, -1.5, -2.25]))

"""Losses and their terms against loops over single tokens, on ragged batches in float64."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.algo.correction import Correction, behavior_weight, finite_mask
from areal_lite.algo.losses import (
    LossInputs,
    cispo_loss,
    entropy_loss,
    gspo_loss,
    kl_estimate,
    kl_loss,
    ppo_loss,
    reinforce_loss,
)
from areal_lite.algo.metrics import bounded_exp
from areal_lite.algo.sequences import REDUCTIONS, reduction_count, reduction_weights
from areal_lite.algo.trajectory_balance import trajectory_balance_loss
from tests.unit.algo.algo_batches import ragged, rows

seeds = st.integers(0, 100_000)
corrections = st.builds(
    Correction,
    mode=st.sampled_from(["cap", "mask", "off"]),
    cap=st.sampled_from([1.2, 2.0]),
    low=st.sampled_from([None, 0.0, 0.7]),
    level=st.sampled_from(["token", "geometric", "product"]),
)


def plain_weights(row: list[dict], c: Correction, target: str = "prox") -> list[float | None]:
    """The weight of each token of a sequence, None where the token is rejected."""
    ratios = [math.exp(x[target] - x["behav"]) for x in row]
    if c.mode == "off":
        return [1.0] * len(row)
    if c.level != "token" and row:
        product = math.prod(ratios)
        ratios = [product if c.level == "product" else product ** (1 / len(row))] * len(row)
    if c.mode == "cap":
        return [min(r, c.cap) for r in ratios]
    low = 1 / c.cap if c.low is None else c.low
    return [r if low <= r <= c.cap else None for r in ratios]


def plain_clip(a: float, r: float, low: float, high: float) -> float:
    return max(-a * r, -a * min(max(r, 1 - low), 1 + high))


@settings(max_examples=60, deadline=None)
@given(seeds, corrections)
def test_behavior_weight(seed, c):
    x, _, _ = ragged(seed)
    weight, kept = behavior_weight(
        x.prox, x.behavior, x.mask, sequence_ids=x.sequence_ids, **vars(c)
    )
    usable = finite_mask(x.mask, x.behavior)
    expected = [w for row in rows(x) for w in plain_weights(row, c)]
    assert kept[usable].tolist() == [w is not None for w in expected]
    assert weight[usable].tolist() == pytest.approx([w or 0.0 for w in expected], rel=1e-12)
    assert not kept[~usable].any() and (weight[~usable] == 0).all()


@settings(max_examples=40, deadline=None)
@given(seeds, corrections, st.booleans())
def test_gspo(seed, c, decoupled):
    x, _, _ = ragged(seed)
    expected, rejected = 0.0, 0
    for row in rows(x):
        if not row:
            continue
        anchor = "prox" if decoupled else "behav"
        s = math.exp(sum(t["lp"] - t[anchor] for t in row) / len(row))
        weights = plain_weights(row, c) if decoupled else [1.0] * len(row)
        expected += sum(
            w * plain_clip(t["a"], s, 0.1, 0.2) for t, w in zip(row, weights) if w is not None
        )
        rejected += weights.count(None)
    got = gspo_loss(
        x, denominator=7.0, eps_low=0.1, eps_high=0.2, decoupled=decoupled, correction=c
    )
    assert got.loss.item() == pytest.approx(expected / 7, abs=1e-12)
    assert got.metrics["rejected"].item() == rejected


@settings(max_examples=40, deadline=None)
@given(seeds, corrections, st.booleans(), st.sampled_from([0.3, 1.0]))
def test_cispo(seed, c, decoupled, low):
    x, _, _ = ragged(seed)
    expected, gradient = 0.0, []
    for row in rows(x):
        for t, w in zip(row, plain_weights(row, c) if decoupled else [1.0] * len(row)):
            r = math.exp(t["lp"] - t["prox" if decoupled else "behav"])
            coefficient = -(w or 0.0) * min(max(r, 1 - low), 1.4) * t["a"]
            expected += coefficient * t["lp"]
            gradient.append(coefficient)
    got = cispo_loss(x, eps_low=low, eps_high=0.4, decoupled=decoupled, correction=c).loss
    assert got.item() == pytest.approx(expected, abs=1e-12)
    usable = finite_mask(x.mask, x.behavior)
    assert torch.autograd.grad(got, x.logprobs)[0][usable].tolist() == pytest.approx(
        gradient, abs=1e-12
    )


@settings(max_examples=40, deadline=None)
@given(seeds, corrections)
def test_reinforce(seed, c):
    x, _, _ = ragged(seed)
    gradient = [
        -(w or 0.0) * t["a"] / 3
        for row in rows(x)
        for t, w in zip(row, plain_weights(row, c, "lp"))
    ]
    got = torch.autograd.grad(reinforce_loss(x, denominator=3.0, correction=c).loss, x.logprobs)[0]
    usable = finite_mask(x.mask, x.behavior)
    assert got[usable].tolist() == pytest.approx(gradient, abs=1e-12)
    assert (got[~usable] == 0).all()


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from(REDUCTIONS))
def test_reductions(seed, mode):
    x, _, _ = ragged(seed)
    mask = finite_mask(x.mask, x.behavior)
    count = reduction_count(mask, x.sequence_ids, mode=mode)
    x.weights = reduction_weights(
        mask, x.sequence_ids, mode=mode, denominator=count, length=11, dtype=torch.float64
    )
    got = ppo_loss(x, eps_low=0.2, eps_high=0.3).loss.item()
    losses = [
        [
            min(math.exp(t["prox"] - t["behav"]), 5.0)
            * plain_clip(t["a"], math.exp(t["lp"] - t["prox"]), 0.2, 0.3)
            for t in row
        ]
        for row in rows(x)
        if row
    ]
    expected = {
        "token": sum(map(sum, losses)) / sum(map(len, losses)),
        "sequence": sum(sum(s) / len(s) for s in losses) / len(losses),
        "constant": sum(sum(s) / 11 for s in losses) / len(losses),
    }
    assert got == pytest.approx(expected[mode], abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_terms(estimator):
    x, _, _ = ragged(1)
    weights, importance = (
        torch.linspace(0.1, 0.9, len(x.mask)).double(),
        torch.linspace(2, 3, len(x.mask)).double(),
    )
    formula = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}[
        estimator
    ]
    d = [a - b for a, b in zip(x.logprobs.tolist(), x.prox.tolist())]
    expected = sum(
        w * i * formula(v)
        for w, i, v, m in zip(weights.tolist(), importance.tolist(), d, x.mask.tolist())
        if m
    )
    got = kl_loss(x.logprobs, x.prox, x.mask, weights, estimator=estimator, importance=importance)
    assert got.item() == pytest.approx(expected, abs=1e-12)
    entropy = -x.behavior.clamp(min=-9)
    bonus = sum(w * h for w, h, m in zip(weights.tolist(), entropy.tolist(), x.mask.tolist()) if m)
    assert entropy_loss(entropy, x.mask, weights).item() == pytest.approx(-bonus, abs=1e-12)


@pytest.mark.parametrize("estimator,forward", [("k1", None), ("k2", False), ("k3", True)])
def test_expected_kl_gradients(estimator, forward):
    """Expect gradient 0 from k1, that of KL(theta || ref) from k2, KL(ref || theta) from k3."""
    g = torch.Generator().manual_seed(1)
    logits, ref = torch.randn(2, 7, generator=g, dtype=torch.float64).log_softmax(1)
    logits.requires_grad_()
    lp, everything = logits.log_softmax(0), torch.ones(7, dtype=torch.bool)
    got = torch.autograd.grad(
        kl_loss(lp, ref, everything, lp.exp().detach(), estimator=estimator),
        logits,
        retain_graph=True,
    )[0]
    exact = {
        None: 0 * lp.sum(),
        False: (lp.exp() * (lp - ref)).sum(),
        True: (ref.exp() * (ref - lp)).sum(),
    }[forward]
    torch.testing.assert_close(got, torch.autograd.grad(exact, logits)[0], rtol=1e-10, atol=1e-12)


def plain_balance(x, rewards, groups, beta):
    """Residuals d_k + logZ by sequence, of the sequences with an unmasked token."""
    d: dict[int, float] = {}
    for i, lp, ref, m in zip(
        x.sequence_ids.tolist(), x.logprobs.tolist(), x.prox.tolist(), x.mask.tolist()
    ):
        if m:
            d[i] = d.get(i, -float(rewards[i]) / beta) + lp - ref
    members: dict[int, list[int]] = {}
    for i in d:
        members.setdefault(int(groups[i]), []).append(i)
    return {
        i: d[i] - sum(d[j] for j in members[int(groups[i])]) / len(members[int(groups[i])])
        for i in d
    }


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from([0.1, 1.0]))
def test_trajectory_balance_is_the_variance_within_groups(seed, beta):
    x, rewards, groups = ragged(seed)
    residual = plain_balance(x, rewards, groups, beta)
    count = reduction_count(x.mask, x.sequence_ids, mode="sequence")
    out = trajectory_balance_loss(
        x.logprobs, x.prox, x.mask, x.sequence_ids, rewards, groups, beta=beta, denominator=count
    )
    assert out.loss.item() == pytest.approx(
        sum(v * v for v in residual.values()) / len(residual), rel=1e-10, abs=1e-12
    )
    got = torch.autograd.grad(out.loss, x.logprobs)[0].tolist()
    for i, m, value in zip(x.sequence_ids.tolist(), x.mask.tolist(), got):
        assert value == pytest.approx(
            2 * residual[i] / len(residual) if m else 0.0, rel=1e-9, abs=1e-12
        )


def test_losses_are_differentiated_right():
    """Compare with finite differences, away from kinks.

    The weights of CISPO and REINFORCE, and log Z, are constants by definition.
    """
    x, rewards, groups = ragged(5)
    options = {"eps_low": 0.1, "eps_high": 0.2, "denominator": 5.0}
    for loss in (
        lambda lp: ppo_loss(replace(x, logprobs=lp), dual_clip=3.0, **options).loss,
        lambda lp: ppo_loss(replace(x, logprobs=lp), decoupled=False, **options).loss,
        lambda lp: gspo_loss(replace(x, logprobs=lp), **options).loss,
        lambda lp: kl_loss(lp, x.prox, x.mask, x.advantages, estimator="k3"),
        lambda lp: kl_loss(lp, x.prox, x.mask, x.advantages, estimator="k2"),
        lambda lp: (
            trajectory_balance_loss(
                lp,
                x.prox,
                x.mask,
                x.sequence_ids,
                rewards,
                groups,
                beta=0.5,
                denominator=9,
                log_z=torch.linspace(0, 1, len(rewards)).double(),
            ).loss
        ),
    ):
        assert torch.autograd.gradcheck(loss, (x.logprobs,), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("loss", [ppo_loss, gspo_loss, cispo_loss])
@pytest.mark.parametrize("decoupled", [True, False])
def test_a_token_without_finite_behavior_logprob_leaves_loss_gradient_and_metrics(loss, decoupled):
    x, _, _ = ragged(8)
    gone = replace(
        x, mask=finite_mask(x.mask, x.behavior), behavior=torch.nan_to_num(x.behavior, neginf=-1.0)
    )
    outs = [loss(v, eps_low=0.2, eps_high=0.2, decoupled=decoupled) for v in (x, gone)]
    assert outs[0].loss.item() == outs[1].loss.item() and outs[0].metrics == outs[1].metrics
    grads = [torch.autograd.grad(out.loss, x.logprobs)[0] for out in outs]
    assert torch.equal(*grads) and torch.isfinite(grads[0]).all()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-1000.0, -95.0, -21.0, 21.0, 89.0, 95.0, 1000.0])
def test_extreme_ratios_have_finite_losses_and_gradients(log_ratio: float, advantage: float):
    """In float32, where e^89 is infinite. A gradient keeps its direction, a value its limit."""
    x, _, _ = ragged(8)
    prox = x.prox.float()
    extreme = LossInputs(
        logprobs=(prox + log_ratio).requires_grad_(),
        prox=prox,
        behavior=prox,
        advantages=torch.full_like(prox, advantage),
        mask=torch.ones_like(x.mask),
        sequence_ids=x.sequence_ids,
    )
    n = len(prox)
    for loss, limit in (
        (lambda: ppo_loss(extreme, eps_low=0.2, eps_high=0.2, dual_clip=3.0), 3.0),
        (lambda: ppo_loss(extreme, eps_low=0.2, eps_high=0.2), None),
        (lambda: gspo_loss(extreme, eps_low=0.2, eps_high=0.2), None),
        (lambda: cispo_loss(extreme), None),
    ):
        out = loss()
        (gradient,) = torch.autograd.grad(out.loss, extreme.logprobs)
        assert torch.isfinite(out.loss) and torch.isfinite(gradient).all()
        assert all(torch.isfinite(value).all() for value in out.metrics.values())
        assert out.metrics["extreme_ratios"] == n
        assert (gradient * advantage <= 0).all()  # it raises what has an advantage
        if log_ratio > 0 and limit:
            assert out.loss.item() == pytest.approx(n * (-1.2 if advantage > 0 else limit))
    for estimator in ("k2", "k3"):
        ones = torch.ones_like(prox)
        divergence = kl_loss(extreme.logprobs, prox, extreme.mask, ones, estimator=estimator)
        (gradient,) = torch.autograd.grad(divergence, extreme.logprobs)
        assert torch.isfinite(divergence) and torch.isfinite(gradient).all()
        assert (gradient * log_ratio > 0).all()  # down the gradient the policies come closer


def test_a_bounded_exponential_is_the_exponential_where_that_is_small():
    x = torch.linspace(-30, 20, 1001, dtype=torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad(bounded_exp(x).sum(), x)
    assert torch.equal(bounded_exp(x), x.exp()) and torch.allclose(gradient, x.exp(), rtol=1e-12)


def test_empty_batches_have_loss_zero():
    x, rewards, groups = ragged(3)
    nothing = replace(x, mask=torch.zeros_like(x.mask))
    for out in (
        ppo_loss(nothing, eps_low=0.2, eps_high=0.2),
        gspo_loss(nothing),
        cispo_loss(nothing),
        reinforce_loss(nothing),
    ):
        assert out.loss.item() == 0 and (torch.autograd.grad(out.loss, x.logprobs)[0] == 0).all()
    out = trajectory_balance_loss(
        x.logprobs, x.prox, nothing.mask, x.sequence_ids, rewards, groups, beta=1.0, denominator=1
    )
    assert out.loss.item() == 0


def test_mistakes_are_named():
    x, _, _ = ragged(2)
    with pytest.raises(ValueError, match="token, geometric, product"):
        behavior_weight(x.prox, x.behavior, x.mask, mode="cap", cap=2.0, level="word")
    with pytest.raises(ValueError, match="needs sequence_ids"):
        behavior_weight(x.prox, x.behavior, x.mask, mode="cap", cap=2.0, level="product")
    with pytest.raises(ValueError, match="low <= cap"):
        behavior_weight(x.prox, x.behavior, x.mask, mode="mask", cap=2.0, low=3.0)
    with pytest.raises(ValueError, match="gspo_loss needs sequence_ids"):
        gspo_loss(replace(x, sequence_ids=None), decoupled=False)
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(x.logprobs, x.prox, x.mask, estimator="k4")
    with pytest.raises(ValueError, match="token, sequence, constant"):
        reduction_count(x.mask, x.sequence_ids, mode="batch")
    with pytest.raises(ValueError, match="length"):
        reduction_weights(x.mask, x.sequence_ids, mode="constant", denominator=3)

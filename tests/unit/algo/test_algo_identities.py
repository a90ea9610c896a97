"""Identities between objectives, and results that packing must not change."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.algo.advantages import grpo
from areal_lite.algo.correction import Correction, finite_mask
from areal_lite.algo.losses import cispo_loss, gspo_loss, ppo_loss, reinforce_loss
from areal_lite.algo.sequences import REDUCTIONS, reduction_count, reduction_weights, sequence_sum
from areal_lite.algo.trajectory_balance import log_partition, log_ratios, trajectory_balance_loss
from tests.unit.algo.algo_batches import ragged, take

seeds = st.integers(0, 100_000)
OFF = Correction("off")
LOSSES = {
    "ppo": lambda x: ppo_loss(x, eps_low=0.2, eps_high=0.28, dual_clip=3.0),
    "naive ppo": lambda x: ppo_loss(x, eps_low=0.2, eps_high=0.28, decoupled=False),
    "icepop": lambda x: ppo_loss(
        x, eps_low=0.2, eps_high=0.28, correction=Correction("mask", 2.0, low=0.5)
    ),
    "gspo": lambda x: gspo_loss(
        x, eps_low=0.1, eps_high=0.1, correction=Correction("mask", 1.5, level="geometric")
    ),
    "cispo": lambda x: cispo_loss(x, correction=Correction("cap", 2.0, level="product")),
    "reinforce": lambda x: reinforce_loss(x),
}


def gradient(out, x):
    return torch.autograd.grad(out.loss, x.logprobs)[0]


def same(one, two, x):
    torch.testing.assert_close(one.loss, two.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(one, x), gradient(two, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", [ppo_loss, gspo_loss, cispo_loss])
@settings(max_examples=15, deadline=None)
@given(seed=seeds)
def test_decoupled_with_prox_equal_to_behavior_is_the_naive_loss(loss, seed):
    x, _, _ = ragged(seed)
    x = replace(x, prox=x.behavior)
    same(*(loss(x, eps_low=0.1, eps_high=0.2, decoupled=d) for d in (True, False)), x)


@settings(max_examples=15, deadline=None)
@given(seeds)
def test_gspo_of_single_tokens_is_ppo(seed):
    x, _, _ = ragged(seed)
    x = replace(
        x, sequence_ids=torch.randperm(len(x.mask), generator=torch.Generator().manual_seed(seed))
    )
    clip = {"eps_low": 0.1, "eps_high": 0.2}
    same(gspo_loss(x, **clip), ppo_loss(x, **clip), x)
    same(gspo_loss(x, decoupled=False, **clip), ppo_loss(x, decoupled=False, **clip), x)


@settings(max_examples=15, deadline=None)
@given(seeds)
def test_unclipped_everything_token_level_has_one_gradient(seed):
    """Without bounds all losses agree, since w r = exp(theta - behavior); only bounds differ."""
    x, _, _ = ragged(seed)
    free, clip = Correction("cap", float("inf")), {"eps_low": 1e9, "eps_high": 1e9}
    expected = gradient(ppo_loss(x, decoupled=False, **clip), x)
    for out in (
        ppo_loss(x, correction=free, **clip),
        cispo_loss(x, correction=free, **clip),
        cispo_loss(x, decoupled=False, **clip),
        reinforce_loss(x, correction=free),
    ):
        torch.testing.assert_close(gradient(out, x), expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=15, deadline=None)
@given(seeds)
def test_reinforce_with_truncated_importance_sampling_is_naive_cispo(seed):
    x, _, _ = ragged(seed)
    same(
        reinforce_loss(x, correction=Correction("cap", 1.3)),
        cispo_loss(x, decoupled=False, eps_high=0.3),
        x,
    )


@settings(max_examples=15, deadline=None)
@given(seeds)
def test_on_policy_all_policy_gradients_agree(seed):
    x, _, _ = ragged(seed)
    x = replace(x, prox=x.logprobs.detach(), behavior=x.logprobs.detach())
    expected = torch.where(x.mask, -x.advantages, torch.zeros_like(x.advantages))
    ppo = partial(ppo_loss, eps_low=0.2, eps_high=0.2)
    for loss in (ppo, partial(ppo, correction=OFF), cispo_loss, reinforce_loss, gspo_loss):
        x.weights = None
        torch.testing.assert_close(gradient(loss(x), x), expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(seeds, st.sampled_from([0.05, 1.0]))
def test_on_policy_trajectory_balance_is_reinforce_on_kl_shaped_reward(seed, beta):
    """Expect 2 / beta times REINFORCE on r - beta KL with a group baseline (TBA, appendix)."""
    x, rewards, groups = ragged(seed)
    reference, policy = x.prox, x.logprobs.detach()
    present = torch.tensor([bool(x.mask[x.sequence_ids == i].any()) for i in range(len(rewards))])
    divergence = sequence_sum(policy - reference, x.mask, x.sequence_ids, num=len(rewards))
    shaped = rewards - beta * divergence
    advantages = torch.zeros_like(rewards)
    advantages[present] = grpo(
        shaped[present], groups[present], divide_by_std=False
    )  # Dr. GRPO's: r - mean
    on_policy = replace(x, prox=policy, behavior=policy, advantages=advantages[x.sequence_ids])
    expected = 2 / beta * gradient(reinforce_loss(on_policy, denominator=5.0), x)
    out = trajectory_balance_loss(
        x.logprobs, reference, x.mask, x.sequence_ids, rewards, groups, beta=beta, denominator=5.0
    )
    torch.testing.assert_close(gradient(out, x), expected, rtol=1e-9, atol=1e-9)


def split(ids: torch.Tensor, seed: int, whole: bool) -> list[torch.Tensor]:
    """Split token indices into three random packs; with `whole`, a sequence stays in one pack."""
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(ids), generator=g)
    pack = (
        torch.randint(0, 3, (int(ids.max()) + 1,), generator=g)[ids]
        if whole
        else torch.randint(0, 3, (len(ids),), generator=g)
    )
    return [order[pack[order] == p] for p in range(3)]


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15, deadline=None)
@given(seed=seeds, mode=st.sampled_from(REDUCTIONS))
def test_packing_does_not_matter(name, seed, mode):
    """Shuffle tokens over packs: loss, gradient and metrics stay the same."""
    x, _, _ = ragged(seed)
    mask = finite_mask(x.mask, x.behavior)
    whole = mode == "sequence" or name in ("icepop", "gspo", "cispo")
    packs = [index for index in split(x.sequence_ids, seed, whole) if len(index)]
    if whole:
        count = sum(
            reduction_count(mask[index], x.sequence_ids[index], mode=mode) for index in packs
        )
        assert count == reduction_count(mask, x.sequence_ids, mode=mode)
    count = reduction_count(mask, x.sequence_ids, mode=mode)

    def out(part):
        usable = finite_mask(part.mask, part.behavior)
        options = {"mode": mode, "denominator": count, "length": 8, "dtype": torch.float64}
        return LOSSES[name](
            replace(part, weights=reduction_weights(usable, part.sequence_ids, **options))
        )

    one, parts = out(x), [out(take(x, index)) for index in packs]
    total = sum(part.loss for part in parts)
    torch.testing.assert_close(total, one.loss, rtol=0, atol=1e-10)
    torch.testing.assert_close(
        torch.autograd.grad(total, x.logprobs)[0], gradient(one, x), rtol=0, atol=1e-10
    )
    for key, value in one.metrics.items():
        combine = max if key.endswith("_max") else sum
        assert combine(part.metrics[key].item() for part in parts) == pytest.approx(
            value.item(), rel=1e-5, abs=1e-5
        )


@settings(max_examples=15, deadline=None)
@given(seeds)
def test_packing_does_not_matter_for_trajectory_balance(seed):
    """With log Z of whole groups, sequences may be anywhere."""
    x, rewards, groups = ragged(seed)
    ratios, present = log_ratios(x.logprobs, x.prox, x.mask, x.sequence_ids, num=len(rewards))
    log_z = log_partition(ratios, present, rewards, groups, beta=0.5)

    def loss(p, log_z=None):
        arguments = (p.logprobs, p.prox, p.mask, p.sequence_ids, rewards, groups)
        return trajectory_balance_loss(*arguments, beta=0.5, denominator=7.0, log_z=log_z).loss

    one = loss(x)
    total = sum(loss(take(x, index), log_z) for index in split(x.sequence_ids, seed, True))
    torch.testing.assert_close(total, one, rtol=1e-12, atol=1e-10)
    grads = [torch.autograd.grad(value, x.logprobs, retain_graph=True)[0] for value in (total, one)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-10)

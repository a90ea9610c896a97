"""Rejected tokens against loops over single tokens in float64, on any number of ranks."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.algo.correction import Correction, finite_mask
from areal_lite.algo.losses import LossInputs, cispo_loss, gspo_loss, ppo_loss, reinforce_loss
from areal_lite.algo.rejection import DISTANCES, Rejection, accepted, batch_limit, distance
from tests.unit.algo.algo_batches import on_ranks, ragged

seeds = st.integers(0, 100_000)
NONNEGATIVE = [by for by in DISTANCES if by not in ("ratio", "k1")]


def plain_distance(prox: float, behavior: float, by: str) -> float:
    r = math.exp(prox - behavior)
    return {
        "ratio": r,
        "k1": math.log(r),
        "square": math.log(r) ** 2,
        "k3": r - 1 - math.log(r),
        "k3_reverse": 1 / r - 1 + math.log(r),
        "tv": abs(math.exp(prox) - math.exp(behavior)),
        "binary_kl": max(bernoulli_kl(prox, behavior), bernoulli_kl(behavior, prox)),
    }[by]


def bernoulli_kl(one: float, other: float) -> float:
    """KL of two coins with these log-probs of heads, of which each is within 1e-6 and 1 - 1e-6."""
    p, q = (min(max(math.exp(x), 1e-6), 1 - 1e-6) for x in (one, other))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


@settings(max_examples=60, deadline=None)
@given(st.floats(-20, 0), st.floats(-20, 0))
def test_the_binary_divergence_of_certain_and_of_rare_tokens(prox, behavior):
    both = [torch.tensor([x], dtype=torch.float32) for x in (prox, behavior)]
    mask = torch.ones(1, dtype=torch.bool)
    there, back = (float(distance(*pair, mask, by="binary_kl")) for pair in (both, both[::-1]))
    assert there == back >= 0 and math.isfinite(there)
    expected = max(bernoulli_kl(prox, behavior), bernoulli_kl(behavior, prox))
    # float32 has 6e-8 of 1 - p, which is at least 1e-6 here.
    assert there == pytest.approx(expected, rel=0.1, abs=1e-4)


def accepted_of(x: LossInputs, rejection: Rejection, limit=None) -> torch.Tensor:
    mask = finite_mask(x.mask, x.behavior)
    return accepted(
        x.prox,
        x.behavior,
        mask,
        rejection,
        sequence_ids=x.sequence_ids,
        advantages=x.advantages,
        limit=limit,
    )


def plain_accepted(x: LossInputs, rejection: Rejection) -> list[bool]:
    """Reject tokens as levels `token` and `sequence` do, in a loop over tokens."""
    usable = (x.mask & torch.isfinite(x.behavior)).tolist()
    ids, prox, behavior = x.sequence_ids.tolist(), x.prox.tolist(), x.behavior.tolist()
    values = {
        i: plain_distance(prox[i], behavior[i], rejection.by) for i in range(len(ids)) if usable[i]
    }
    result = []
    for i, sequence in enumerate(ids):
        if not usable[i]:
            result.append(False)
            continue
        value = values[i]
        if rejection.level == "sequence":
            own = [values[j] for j in values if ids[j] == sequence]
            value = sum(own) / len(own)
        far = value > rejection.above or (rejection.below is not None and value < rejection.below)
        if rejection.outward and x.advantages[i] * (prox[i] - behavior[i]) <= 0:
            far = False
        result.append(not far)
    return result


@settings(max_examples=80, deadline=None)
@given(
    seeds,
    st.sampled_from(DISTANCES),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from([0.02, 0.2, 1.2]),
    st.sampled_from([None, -0.1, 0.9]),
    st.booleans(),
)
def test_tokens_and_sequences_are_rejected_by_their_distance(seed, by, level, above, below, out):
    x, _, _ = ragged(seed)
    rejection = Rejection(by=by, level=level, above=above, below=below, outward=out)
    assert accepted_of(x, rejection).tolist() == plain_accepted(x, rejection)


def plain_budget(values: list[float], bound: float) -> set[int]:
    """The values that stay: all, less the largest one after the other until the mean is good."""
    left = sorted(range(len(values)), key=lambda i: values[i])
    while left and sum(values[i] for i in left) >= bound * len(left):
        left.pop()
    return set(left)


@settings(max_examples=80, deadline=None)
@given(seeds, st.sampled_from(NONNEGATIVE), st.sampled_from([1e-4, 0.01, 0.04, 0.3, 50.0]))
def test_a_batch_loses_its_largest_distances_until_their_mean_is_good(seed, by, bound):
    x, _, _ = ragged(seed, sequences=12)
    mask = finite_mask(x.mask, x.behavior)
    # The limit is found in float32, in which random values differ.
    values = distance(x.prox, x.behavior, mask, by=by)[mask]
    kept = accepted_of(
        x, Rejection(by=by, level="batch", above=bound), batch_limit(values, bound=bound)
    )
    stay = plain_budget(values.tolist(), bound)
    assert kept[mask].tolist() == [i in stay for i in range(len(values))]


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


def test_outward_tokens_only_are_rejected_from_a_batch():
    """As the code of M2PO does: only they count in the mean, and only they can leave."""
    x, _, _ = ragged(7, sequences=12)
    mask = finite_mask(x.mask, x.behavior)
    moved = (x.prox - x.behavior) * x.advantages > 0
    values = ((x.prox - x.behavior) ** 2)[mask & moved]
    kept = accepted_of(
        x,
        Rejection(by="square", level="batch", above=0.04, outward=True),
        batch_limit(values, bound=0.04),
    )
    assert kept[mask & ~moved].all()
    stay = plain_budget(values.tolist(), 0.04)
    assert kept[mask & moved].tolist() == [i in stay for i in range(len(values))]
    assert 0 < len(stay) < len(values)


@pytest.mark.parametrize("loss", [ppo_loss, gspo_loss, cispo_loss, reinforce_loss])
@pytest.mark.parametrize("level", ["token", "product"])
def test_a_rejected_token_has_no_share_in_loss_and_weights(loss, level):
    """As if it were masked, but for the denominator, the metrics, and the ratio of a sequence."""
    x, _, _ = ragged(4)
    mask = finite_mask(x.mask, x.behavior)
    kept = accepted_of(x, Rejection(by="tv", above=0.1))
    assert 0 < int(kept.sum()) < int(mask.sum())
    options = {"denominator": 7.0, "correction": Correction("cap", 1.3, level=level)}
    if loss is not reinforce_loss:
        options |= {"eps_low": 0.1, "eps_high": 0.2}
    out = loss(replace(x, accepted=kept), **options)
    assert out.metrics["rejected"] == (mask & ~kept).sum()
    if loss is not gspo_loss:
        assert out.loss.item() == loss(replace(x, mask=kept), **options).loss.item()
    gradient = torch.autograd.grad(out.loss, x.logprobs)[0]
    if loss is not gspo_loss:
        assert not gradient[~kept].any()


@pytest.mark.parametrize("loss", [ppo_loss, cispo_loss])
def test_a_naive_loss_rejects_too(loss):
    x, _, _ = ragged(5)
    kept = accepted_of(x, Rejection(by="k3", above=0.05))
    options = {"eps_low": 0.1, "eps_high": 0.2, "decoupled": False}
    out = loss(replace(x, accepted=kept), **options)
    assert out.loss.item() == loss(replace(x, mask=kept), **options).loss.item()
    assert out.metrics["behavior_weight"] == kept.sum()


def test_an_unknown_distance_is_named():
    with pytest.raises(ValueError, match="by=hellinger: use one of ratio, k1"):
        distance(torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool), by="hellinger")

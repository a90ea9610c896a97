"""Routing replay in one router, against its definition in float64."""

import pytest
import torch

import areal_lite.megatron  # noqa: F401  (prepares megatron.core)
from areal_lite.megatron.experts import RoutingReplay
from tests.unit.megatron.routers import make_router

TOKENS, EXPERTS, TOP_K = 40, 12, 3


def route(
    logits: torch.Tensor, replay: RoutingReplay | None, normalized: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a router's weight of each expert, and which are chosen."""
    router = make_router(torch.eye(EXPERTS), TOP_K, not normalized)
    router.replay = replay
    chosen, weights = router(logits)
    mask = torch.zeros(logits.shape, dtype=torch.bool).scatter(1, chosen, True)
    return torch.zeros_like(logits).scatter(1, chosen, weights), mask


def routes_of(dtype: torch.dtype) -> torch.Tensor:
    """Random routes; every fourth token has none."""
    generator = torch.Generator().manual_seed(1)
    routes = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    routes = routes.sort(1).values
    routes[::4] = torch.iinfo(dtype).max
    return routes.to(dtype)


def brute_force(logits: torch.Tensor, routes: torch.Tensor, normalized: bool) -> torch.Tensor:
    """Return the weight of each expert for each token, token by token."""
    rows = []
    for scores, recorded in zip(logits.double(), routes.tolist()):
        chosen = scores.detach().topk(TOP_K).indices.tolist()
        if max(recorded) < EXPERTS:
            chosen = recorded
        exp = scores.exp()
        total = exp[chosen].sum() if normalized else exp.sum()
        mask = torch.zeros(EXPERTS, dtype=torch.float64)
        mask[chosen] = 1
        rows.append(exp / total * mask)
    return torch.stack(rows)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_weights_and_gradients_are_those_of_the_recorded_experts(normalized, dtype) -> None:
    torch.manual_seed(2)
    logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    weights = torch.randn(TOKENS, EXPERTS)
    replay = RoutingReplay(0, torch.device("cpu"))
    replay.routes = routes_of(dtype)
    probs, chosen = route(logits, replay, normalized)
    expected = brute_force(logits, replay.routes, normalized)
    torch.testing.assert_close(probs.double(), expected, atol=1e-6, rtol=0)
    assert torch.equal(chosen, expected > 0)
    (got,) = torch.autograd.grad((probs * weights).sum(), logits)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), logits)
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)


def test_it_counts_the_routes_that_it_would_not_have_chosen() -> None:
    torch.manual_seed(3)
    logits = torch.randn(TOKENS, EXPERTS)
    replay = RoutingReplay(0, torch.device("cpu"))
    best = logits.topk(TOP_K + 1).indices.to(torch.uint8)
    replay.routes = best[:, :TOP_K].sort(1).values
    replay.routes[:5] = 255  # no record: never counted
    replay.routes[5:12] = best[5:12, 1:].sort(1).values  # without the best one
    for _ in range(2):
        route(logits, replay)
    assert replay.counts.tolist() == [2 * (TOKENS - 5), 2 * 7]


def test_without_routes_it_is_the_routers_own_choice() -> None:
    logits = torch.randn(TOKENS, EXPERTS)
    replay = RoutingReplay(0, torch.device("cpu"))
    got = route(logits, replay)
    wanted = route(logits, None)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted))
    assert replay.counts.tolist() == [0, 0]

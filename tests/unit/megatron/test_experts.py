"""All experts at once against one token after the other, for routes of every kind."""

import sys
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeConfig, Glm4MoeMoE

import areal_lite.megatron  # noqa: F401  (prepares megatron.core)
from areal_lite.megatron.experts import Rows, _GroupedLinear
from areal_lite.megatron.hf import export_hf
from areal_lite.megatron.kernels import gated, grouped_linear, grouped_sums
from tests.unit.megatron.routers import make_router

operators = sys.modules["areal_lite.megatron.kernels"]
TOKENS, EXPERTS, TOP_K, HIDDEN, WIDTH = 23, 6, 3, 16, 8
# The routes of a batch: at random, without two of the experts, and all to the same experts.
ROUTES = ["random", "without", "same"]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


WEIGHT = random(EXPERTS, HIDDEN, seed=3, dtype=torch.float32)  # of a router


def routes(kind: str) -> torch.Tensor:
    scores = random(TOKENS, EXPERTS, seed=7)
    if kind == "without":
        scores[:, [0, 3]] = -torch.inf
    if kind == "same":
        scores[:] = scores[0]
    return scores.topk(TOP_K).indices


def together(x, weights, chosen, fc1, fc2) -> torch.Tensor:
    """Compute a mixture as a rank does."""
    rows = Rows.sort(chosen, EXPERTS)
    inner = _GroupedLinear.apply(rows.spread(x), fc1, rows.ends)
    scale = weights.flatten().gather(0, rows.order)
    return rows.collect(
        cast(Any, _GroupedLinear.apply(gated(cast(Any, inner), scale), fc2, rows.ends))
    )


def one_by_one(x, weights, chosen, fc1, fc2) -> torch.Tensor:
    """Compute it by its definition."""
    results = []
    for token, own, numbers in zip(x, weights, chosen.tolist(), strict=True):
        total = torch.zeros_like(token)
        for weight, number in zip(own, numbers, strict=True):
            gate, up = (fc1[number] @ token).chunk(2)
            total = total + weight * (fc2[number] @ (F.silu(gate) * up))
        results.append(total)
    return torch.stack(results)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", ROUTES)
def test_all_experts_at_once_are_one_token_after_the_other(kind, grouped, monkeypatch):
    dtype = torch.float32 if grouped else torch.float64  # torch has no grouped product in float64
    monkeypatch.setattr(operators, "_has_grouped_products", lambda *_: grouped)
    sizes = (
        (TOKENS, HIDDEN),
        (TOKENS, TOP_K),
        (EXPERTS, 2 * WIDTH, HIDDEN),
        (EXPERTS, HIDDEN, WIDTH),
    )
    given = [random(*size, seed=i, dtype=dtype) for i, size in enumerate(sizes)]
    found = []
    for function in (together, one_by_one):
        x, weights, *matrices = own = [one.clone().requires_grad_() for one in given]
        out = function(x, weights, routes(kind), *matrices)
        grads = torch.autograd.grad(out, own, random(TOKENS, HIDDEN, seed=9, dtype=dtype))
        found.append((out, *grads))
    tolerance = 1e-4 if grouped else 1e-12
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    used = torch.zeros(EXPERTS, dtype=torch.bool)
    used[routes(kind)] = True
    assert torch.equal(found[0][3].flatten(1).any(1), used)
    assert used.all() == (kind == "random")


def test_rows_stand_in_the_order_of_experts_and_then_of_tokens():
    chosen = torch.tensor([[2, 0], [0, 3], [3, 2]])
    rows = Rows.sort(chosen, 5)
    assert rows.spread(torch.arange(3)[:, None])[:, 0].tolist() == [0, 1, 0, 2, 1, 2]
    assert rows.ends.tolist() == [2, 2, 4, 6, 6]
    assert rows.places.tolist() == [[2, 0], [1, 4], [5, 3]]


def test_the_rows_of_a_token_are_added_up_and_then_rounded():
    chosen = routes("random")
    rows = Rows.sort(chosen, EXPERTS)
    x = random(TOKENS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    grad = random(TOKENS * TOP_K, HIDDEN, seed=1, dtype=torch.bfloat16)
    exact = torch.stack([grad.double()[places].sum(0) for places in rows.places])
    (got,) = torch.autograd.grad(rows.spread(x), x, grad)
    assert torch.equal(got, exact.bfloat16()) and torch.equal(rows.collect(grad), got)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_products_of_each_group(dtype, grouped, monkeypatch):
    monkeypatch.setattr(operators, "_has_grouped_products", lambda *_: grouped)
    sizes = [5, 0, 11, 0, 1]
    ends = torch.tensor(sizes).cumsum(0).int()
    x, y = (random(17, n, seed=n, dtype=dtype) for n in (8, 24))
    weight = random(5, 24, 8, dtype=dtype)
    got = grouped_linear(x, weight, ends), grouped_sums(y, x, ends)
    groups = list(zip(x.split(sizes), y.split(sizes), weight, strict=True))
    exact = (
        torch.cat([rows.double() @ matrix.double().t() for rows, _, matrix in groups]),
        torch.stack([theirs.double().t() @ rows.double() for rows, theirs, _ in groups]),
    )
    for ours, theirs in zip(got, exact, strict=True):
        assert ours.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "rows", "width", "expected"),
    [
        (torch.bfloat16, 4, 16, True),
        (torch.bfloat16, 4, 12, False),  # rows that do not begin at 16 bytes
        (torch.bfloat16, 0, 16, False),
        (torch.float32, 4, 16, False),
    ],
)
def test_a_gpu_multiplies_groups_in_one_kernel_where_it_can(
    dtype, rows, width, expected, monkeypatch
):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x, weight = torch.zeros(rows, width, dtype=dtype), torch.zeros(2, 8, width, dtype=dtype)
    assert operators._has_grouped_products(x, weight) == expected


def test_weights_of_rows_are_applied_in_between():
    x, scale = random(5, 8).requires_grad_(), random(5, seed=1).requires_grad_()
    a, b = x.chunk(2, -1)
    torch.testing.assert_close(gated(x, scale), F.silu(a) * b * scale[:, None])
    assert torch.autograd.gradcheck(gated, (x, scale))


@pytest.mark.parametrize("over_all", [True, False])
def test_a_router_chooses_and_weighs_as_megatrons_does(over_all):
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    router = make_router(WEIGHT, TOP_K, over_all)
    x = random(TOKENS, HIDDEN, dtype=torch.float32)
    chosen, weights = router(x)
    dense, mask = topk_routing_with_score_function(
        x @ router.weight.t(), TOP_K, use_pre_softmax=over_all
    )
    assert torch.equal(torch.zeros_like(mask).scatter(1, chosen, True), mask)
    torch.testing.assert_close(torch.zeros_like(dense).scatter(1, chosen, weights), dense)


@pytest.mark.parametrize("groups", [(1, 1), (3, 2)])
def test_sigmoids_choose_by_groups_and_biases_as_in_transformers(groups):
    bias = 0.3 * random(EXPERTS, seed=4, dtype=torch.float32)
    router = make_router(WEIGHT, TOP_K, bias=bias, groups=groups)
    config = Glm4MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_group=groups[0],
        topk_group=groups[1],
        routed_scaling_factor=2.5,
    )
    theirs, x = Glm4MoeMoE(config), random(TOKENS, HIDDEN, dtype=torch.float32)
    assert router.correction is not None and not router.correction.requires_grad
    theirs.gate.weight.data, theirs.gate.e_score_correction_bias = WEIGHT, bias
    found = []
    for chosen, weights in (router(x), theirs.route_tokens_to_experts(theirs.gate(x))):
        dense = torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, weights)
        (grad,) = torch.autograd.grad(
            (dense * random(TOKENS, EXPERTS, seed=5, dtype=torch.float32)).sum(),
            router.weight if not found else theirs.gate.weight,
        )
        found.append((dense, grad))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)
    without = (x @ router.weight.t()).topk(TOP_K).indices
    assert not torch.equal(without.sort().values, router(x)[0].sort().values)  # both decide


def test_exports_keep_the_bias_of_a_router_as_it_was(tmp_path):
    name, source = "model.layers.1.mlp.gate.e_score_correction_bias", tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    bias = random(EXPERTS, dtype=torch.float32)
    old, new = torch.zeros(2), torch.full((2,), 0.1)
    save_file({name: bias, "a": old}, source / "model.safetensors")
    export_hf(iter([[("a", new)]]), source, tmp_path / "out", torch.bfloat16)
    tensors = {
        key: tensor
        for path in (tmp_path / "out").glob("*.safetensors")
        for key, tensor in load_file(path).items()
    }
    assert torch.equal(tensors[name], bias) and torch.equal(tensors["a"], new.bfloat16())

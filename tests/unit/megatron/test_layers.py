"""SwiGLU, the norm and the rotation against float64, and what they keep for backward."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

import areal_lite.megatron  # noqa: F401  (prepares megatron.core)
from areal_lite.cpu.kernels import norms
from areal_lite.megatron.kernels import gated, gelu_tanh, quick_gelu, rotate
from areal_lite.megatron.model import RMSNorm


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_is_the_plain_composition_bit_for_bit(dtype):
    x = random(37, 1, 64, dtype=dtype).requires_grad_()
    grad = random(37, 1, 32, dtype=dtype, seed=1)
    a, b = x.chunk(2, -1)
    plain, ours = F.silu(a) * b, gated(x)
    assert torch.equal(plain, ours)
    assert torch.equal(*(torch.autograd.grad(y, x, grad)[0] for y in (plain, ours)))


def test_the_gradient_of_swiglu_matches_finite_differences():
    x = random(5, 8).double().requires_grad_()
    assert torch.autograd.gradcheck(gated, x)


@pytest.mark.parametrize("scale", [None, [0.3, -2.0, 1.5]])
def test_a_gate_of_gelu_is_the_plain_composition(scale):
    x = random(3, 8).double().requires_grad_()
    scale = None if scale is None else torch.tensor(scale).double().requires_grad_()
    a, b = x.chunk(2, -1)
    tanh = (math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)).tanh()
    plain = 0.5 * a * (1 + tanh) * b * (1 if scale is None else scale[:, None])
    torch.testing.assert_close(gated(x, scale, gelu_tanh), plain)
    assert torch.autograd.gradcheck(lambda x, s: gated(x, s, gelu_tanh), (x, scale))


def test_gpt_oss_limits_both_halves_of_a_gate():
    x = 12 * random(40, 8).double()
    a, b = x.chunk(2, -1)
    near = a.clamp(max=7)
    expected = near * (1.702 * near).sigmoid() * (b.clamp(-7, 7) + 1)
    scale = random(40, seed=2).double().requires_grad_()
    found = gated(x.requires_grad_(), scale, quick_gelu, 7.0)
    assert (a > 7).any() and (b.abs() > 7).any()
    torch.testing.assert_close(found, expected * scale[:, None])
    check = torch.autograd.gradcheck
    assert check(lambda x, s: gated(x, s, quick_gelu, 7.0), (x, scale))


def test_swiglu_keeps_its_input_only():
    x = random(5, 8).requires_grad_()
    result = gated(x)
    kept, scale = cast(Any, result.grad_fn).saved_tensors
    assert kept is x and scale is None


def norm(weight: torch.Tensor) -> RMSNorm:
    config = SimpleNamespace(params_dtype=weight.dtype, sequence_parallel=False)
    module = RMSNorm(cast(Any, config), len(weight), eps=1e-6)
    module.weight.data = weight
    return module


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()


def test_the_norm_without_kernels_is_torchs_bit_for_bit(monkeypatch):
    monkeypatch.setattr(norms, "fits", lambda x: False)
    x, weight = random(50, 1, 64), random(64, seed=1)
    assert torch.equal(norm(weight)(x), F.rms_norm(x, (64,), weight, 1e-6))


def share_of_wrong_roundings(got: torch.Tensor, exact: torch.Tensor) -> float:
    return (got != exact.to(got.dtype)).double().mean().item()


def test_the_norm_is_rounded_once():
    x, weight = (random(*shape, dtype=torch.bfloat16) for shape in ((500, 64), (64,)))
    exact = exact_norm(x, weight)
    assert share_of_wrong_roundings(norm(weight)(x), exact) < 1e-3
    twice = weight * exact_norm(x, torch.ones(64)).bfloat16()
    assert share_of_wrong_roundings(twice, exact) > 0.1


def test_a_rotation_by_float32_angles_is_rounded_once():
    x = random(200, 4, 32, dtype=torch.bfloat16)
    angles = random(200, 1, 16).repeat(1, 1, 2) * 100
    cos, sin = angles.cos(), angles.sin()
    exact = rotate(x.double(), cos.double(), sin.double())
    got = rotate(x, cos, sin)
    assert got.dtype == torch.bfloat16
    assert share_of_wrong_roundings(got, exact) < 1e-3
    coarse = rotate(x, cos.bfloat16(), sin.bfloat16())
    assert share_of_wrong_roundings(coarse, exact) > 0.1

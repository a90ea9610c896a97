"""The operators that a GPU fuses: traced whole, they compute what they compute step by step."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from areal_lite.megatron import logprobs
from areal_lite.megatron.logprobs import lm_logprobs

operators = sys.modules["areal_lite.megatron.kernels"]
GENERATOR = torch.Generator().manual_seed(0)


def traced(function: Callable) -> Callable:
    """Trace without generating code. Raises where the function cannot be traced in one piece."""
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR).to(dtype)


def arguments(name: str, tokens: int, dtype: torch.dtype) -> tuple[Callable, list[Any]]:
    column = torch.randint(0, 50, (tokens,), generator=GENERATOR)
    x, per_token = random(tokens, 50), [random(tokens) for _ in range(4)]
    return {
        "rotate": (operators.rotate, [random(tokens, 4, 8, dtype=dtype), *random(2, tokens, 1, 8)]),
        "swiglu": (operators._gated, [random(tokens, 1, 12, dtype=dtype), None, F.silu, None]),
        "its gradient": (
            operators._gated_backward,
            [
                random(tokens, 1, 12, dtype=dtype),
                None,
                operators.gelu_tanh,
                None,
                random(tokens, 1, 6, dtype=dtype),
            ],
        ),
        "weighted swiglu": (
            operators._gated,
            [random(tokens, 12, dtype=dtype), per_token[0], operators.quick_gelu, 0.5],
        ),
        "its gradients": (
            operators._gated_backward,
            [
                random(tokens, 12, dtype=dtype),
                per_token[0],
                operators.quick_gelu,
                0.5,
                random(tokens, 6, dtype=dtype),
            ],
        ),
        "reduce": (logprobs._reduce, [x, column]),
        "slope": (logprobs._slope, [x, per_token[0], dtype, *per_token[1:3], column]),
        "slope with entropy": (
            logprobs._slope,
            [x, per_token[0], dtype, *per_token[1:3], column, *random(2, tokens)],
        ),
    }[name]


NAMES = [
    "rotate",
    "swiglu",
    "its gradient",
    "weighted swiglu",
    "its gradients",
    "reduce",
    "slope",
    "slope with entropy",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_fused_operator_computes_what_its_steps_do(name, dtype, monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for tokens in (7, 9):  # the second is traced with a symbol
        fused, given = arguments(name, tokens, dtype)
        plain = fused.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
        results = []
        for function in (plain, traced(plain)):
            own = [one.clone() if isinstance(one, torch.Tensor) else one for one in given]
            if name == "rotate":
                own[0].requires_grad_()
            found = function(*own)
            found = found if isinstance(found, tuple) else (found,)
            if name == "rotate":
                found += torch.autograd.grad(found[0].sum(), own[0])
            # What it leaves in its argument counts for `reduce`, whose caller keeps it.
            results.append([*found, *own[: name == "reduce"]])
        for ours, theirs in zip(*([x for x in own if x is not None] for own in results)):
            torch.testing.assert_close(ours, theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2


def test_the_log_probs_of_a_gpu_are_fused(monkeypatch):
    """Where tensors are on a GPU, the compiled functions are called; here all tensors claim it."""
    called = []

    def compiled(function: Callable) -> Callable:
        called.append(function.__name__)
        return function

    monkeypatch.setattr(operators, "_compiled", compiled)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    hidden = random(5, 8).requires_grad_()
    sum(x.sum() for x in lm_logprobs(hidden, random(20, 8), torch.arange(5))).backward()
    operators.gated(random(3, 8).requires_grad_()).sum().backward()
    assert called == ["_reduce", "_slope", "_gated", "_gated_backward"]

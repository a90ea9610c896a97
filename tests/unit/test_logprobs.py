"""Log-probs and entropy against float64 and finite differences. Slices of the vocabulary are tested in tests/integration/test_engine.py."""

from __future__ import annotations

import pytest
import torch

from areal_lite.trainer.logprobs import logprobs_and_entropy

TOKENS, VOCAB = 23, 41


def reference(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logp = (logits.double() / temperature).log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def example(scale: float = 4.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, targets, and weights [2, T] that make a scalar of log-probs and entropy."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(TOKENS, VOCAB, generator=generator)
    return logits, torch.randint(0, VOCAB, (TOKENS,), generator=generator), torch.randn(2, TOKENS, generator=generator)


def scalar(results: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    return (weights[0] * results[0]).sum() + (weights[1] * results[1]).sum()


@pytest.mark.parametrize("temperature", (1.0, 0.7))
@pytest.mark.parametrize("chunk", (1, 5, 1000))
def test_values_and_gradients_match_float64(temperature, chunk):
    logits, targets, weights = example()
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    got, want = logprobs_and_entropy(ours, targets, temperature, chunk=chunk), reference(exact, targets, temperature)
    for a, b in zip(got, want):
        assert a.dtype == torch.float32
        assert torch.allclose(a.double(), b, atol=5e-6, rtol=1e-6)
    scalar(got, weights).backward()
    scalar(want, weights.double()).backward()
    assert torch.allclose(ours.grad.double(), exact.grad, atol=5e-6)


@pytest.mark.parametrize("which", ((1.0, 0.0), (0.0, 1.0)), ids=("logprob", "entropy"))
def test_gradients_match_finite_differences(which):
    logits, targets, weights = example(2.0)
    weights = weights * torch.tensor(which)[:, None]
    ours = logits.clone().requires_grad_()
    scalar(logprobs_and_entropy(ours, targets, 0.7), weights).backward()
    for seed in range(5):
        direction = torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(seed)).double()
        ahead, behind = (scalar(reference(logits.double() + s * direction, targets, 0.7), weights.double()) for s in (1e-5, -1e-5))
        assert float((ours.grad.double() * direction).sum()) == pytest.approx(float(ahead - behind) / 2e-5, rel=1e-5)


def test_an_unused_result_costs_no_gradient():
    logits, targets, weights = example()
    for index in (0, 1):
        ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
        (weights[index] * logprobs_and_entropy(ours, targets)[index]).sum().backward()
        (weights[index].double() * reference(exact, targets, 1.0)[index]).sum().backward()
        assert torch.allclose(ours.grad.double(), exact.grad, atol=5e-6)


def test_huge_logits_stay_finite():
    logits = torch.tensor([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0]], requires_grad=True)
    logprob, entropy = logprobs_and_entropy(logits, torch.tensor([2, 1]))
    assert logprob.tolist() == pytest.approx([-2e4, -1.0986123])
    assert entropy.tolist() == pytest.approx([0.0, 1.0986123])
    (logprob.sum() + entropy.sum()).backward()
    assert logits.grad.isfinite().all()


def test_bfloat16_logits_leave_no_float32_copy_behind():
    logits, targets, _ = example()
    logits = logits.bfloat16().requires_grad_()
    logprob, entropy = logprobs_and_entropy(logits, targets)
    want = reference(logits.detach(), targets, 1.0)
    assert torch.allclose(logprob.double(), want[0], atol=5e-6, rtol=1e-6)
    kept = logprob.grad_fn.saved_tensors
    assert [t for t in kept if t.ndim == 2 and t.dtype == torch.float32] == []
    (logprob.sum() + entropy.sum()).backward()
    assert logits.grad.dtype == torch.bfloat16

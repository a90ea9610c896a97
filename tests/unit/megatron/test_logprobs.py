"""Log-probs, entropy and their gradients against float64 and finite differences.

Slices of the vocabulary are tested in tests/ranks/test_two_ranks.py.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal_lite.megatron import logprobs as module
from areal_lite.megatron.kernels import free_memory, kernels, logits_to_keep
from areal_lite.megatron.logprobs import lm_logprobs

WIDTH, VOCAB = 8, 41


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab: int
) -> tuple[Tensor, Tensor]:
    logp = (hidden @ weight[:vocab].t() / temperature).log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


class Example:
    """Random inputs of `dtype`, the same numbers in float64, and weights of the two results."""

    def __init__(
        self,
        tokens: int,
        vocab: int = VOCAB,
        dtype: torch.dtype = torch.float32,
        padding: int = 0,
        seed: int = 0,
    ):
        g = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self.hidden = torch.randn(tokens, WIDTH, generator=g).to(dtype).requires_grad_()
        self.weight = torch.randn(vocab + padding, WIDTH, generator=g).to(dtype).requires_grad_()
        self.targets = torch.randint(0, vocab, (tokens,), generator=g)
        self.exact = [x.detach().double().requires_grad_() for x in (self.hidden, self.weight)]
        self.weights = torch.randn(2, tokens, generator=g).double()

    def scalar(
        self, results: tuple[Tensor, Tensor], use: tuple[bool, bool] = (True, True)
    ) -> Tensor:
        return sum((w * r).sum() for w, r, wanted in zip(self.weights, results, use) if wanted)

    def compare(
        self,
        tolerance: float,
        gradient: float | None = None,
        temperature: float = 1.0,
        use: tuple[bool, bool] = (True, True),
        **options,
    ):
        """Compare values and gradients with those of float64."""
        got = lm_logprobs(
            self.hidden, self.weight, self.targets, temperature, vocab_size=self.vocab, **options
        )
        want = reference(*self.exact, self.targets, temperature, self.vocab)
        for a, b in zip(got, want):
            assert torch.allclose(a.double(), b, atol=tolerance, rtol=tolerance)
        self.scalar(got, use).backward()
        self.scalar(want, use).backward()
        for mine, exact in zip((self.hidden, self.weight), self.exact):
            assert mine.grad.dtype == mine.dtype
            assert torch.allclose(
                mine.grad.double(),
                exact.grad,
                atol=gradient or tolerance,
                rtol=gradient or tolerance,
            )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 60),
    st.integers(0, 9),
    st.sampled_from((1.0, 0.7, 2.5)),
    st.booleans(),
    st.data(),
)
def test_values_and_gradients_match_float64(tokens, vocab, padding, temperature, kept, data):
    """Any tokens and chunk, with and without padded vocabulary, logits kept or computed again."""
    chunk = data.draw(st.integers(1, tokens + 1))
    kept_before = kernels.logits_to_keep
    if not kept:
        kept = data.draw(st.integers(0, tokens * vocab))
        kernels.logits_to_keep = lambda *_: kept
    try:
        Example(tokens, vocab, padding=padding, seed=data.draw(st.integers(0, 99))).compare(
            1e-5, 3e-5, temperature, chunk=chunk
        )
    finally:
        kernels.logits_to_keep = kept_before


@pytest.mark.parametrize("kept", (0, 1 << 20))
def test_gradients_match_finite_differences(monkeypatch, kept):
    monkeypatch.setattr(kernels, "logits_to_keep", lambda *_: kept)
    x = Example(7, 9, torch.float64, padding=2)
    assert torch.autograd.gradcheck(
        lambda h, w: lm_logprobs(h, w, x.targets, 0.7, vocab_size=x.vocab, chunk=3),
        (x.hidden, x.weight),
        nondet_tol=1e-12,
    )


@pytest.mark.parametrize("use", ((True, False), (False, True)), ids=("logprob", "entropy"))
def test_one_result_may_stay_unused(use):
    Example(23).compare(5e-6, use=use, chunk=5)


def test_a_float32_head_is_exact_for_bfloat16_inputs():
    Example(23, dtype=torch.bfloat16).compare(5e-6, 5e-3, fp32=True, chunk=5)


def test_bfloat16_products_are_as_good_as_bfloat16_gets():
    Example(23, dtype=torch.bfloat16).compare(0.03, 0.1, chunk=5)


def test_the_gradient_of_a_bfloat16_weight_adds_up_in_float32():
    """Add up 512 equal chunks, each 1/512 of the whole: bfloat16 would lose them one by one."""
    hidden, weight = torch.ones(512, 1).bfloat16(), torch.zeros(2, 1).bfloat16().requires_grad_()
    lm_logprobs(hidden, weight, torch.zeros(512, dtype=torch.int64), chunk=1)[0].sum().backward()
    assert weight.grad[:, 0].tolist() == [256.0, -256.0]


def test_padding_is_never_predicted_and_gets_no_gradient():
    x = Example(5, 7, padding=3)
    x.weight.data[7:] = 100.0
    x.targets[0] = 8
    logprob, entropy = lm_logprobs(x.hidden, x.weight, x.targets, vocab_size=7)
    assert (
        logprob[0] == -math.inf
        and logprob[1:].isfinite().all()
        and (entropy <= math.log(7) + 1e-5).all()
    )
    (logprob[1:].sum() + entropy.sum()).backward()
    assert (x.weight.grad[7:] == 0).all() and x.weight.grad[:7].any()


def test_huge_logits_stay_finite():
    hidden, weight = (
        torch.tensor([[1e4], [0.0]], requires_grad=True),
        torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True),
    )
    logprob, entropy = lm_logprobs(hidden, weight, torch.tensor([2, 1]))
    assert logprob.tolist() == pytest.approx([-2e4, -1.0986123])
    assert entropy.tolist() == pytest.approx([0.0, 1.0986123])
    (logprob.sum() + entropy.sum()).backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


@pytest.mark.parametrize("tied", (False, True))
def test_the_gradient_goes_to_megatrons_buffer_once(tied):
    """Megatron's hook adds `grad` to `main_grad` unless told that it is there already.

    For tied weights it adds what others contribute.
    """
    x = Example(9)
    expected = torch.autograd.grad(lm_logprobs(x.hidden, x.weight, x.targets)[0].sum(), x.weight)[0]
    x.weight.main_grad, x.weight.grad_added_to_main_grad, x.weight.zero_out_wgrad = (
        torch.ones_like(x.weight),
        False,
        tied,
    )
    loss = lm_logprobs(x.hidden, x.weight, x.targets, chunk=4)[0].sum()
    (loss + (x.weight[0].sum() if tied else 0)).backward()
    assert x.weight.grad_added_to_main_grad
    assert torch.allclose(x.weight.main_grad, 1 + expected, atol=1e-5)
    if tied:
        assert torch.equal(x.weight.grad[0], torch.ones(WIDTH)) and not x.weight.grad[1:].any()


def test_a_frozen_head_gets_no_gradient():
    x = Example(9)
    frozen = x.weight.detach()
    lm_logprobs(x.hidden, frozen, x.targets)[0].sum().backward()
    assert frozen.grad is None and x.hidden.grad.any()


def test_nothing_as_large_as_all_logits_outlives_the_forward(monkeypatch):
    monkeypatch.setattr(kernels, "logits_to_keep", lambda *_: 3 * 4 * VOCAB)
    x = Example(23)
    logprobs, _ = lm_logprobs(x.hidden, x.weight, x.targets, chunk=4)
    node = logprobs.grad_fn
    assert [len(kept) for kept in node.kept] == [4, 4, 4]
    assert max(t.numel() for t in node.saved_tensors) <= max(x.hidden.numel(), x.weight.numel())
    with torch.no_grad():
        assert lm_logprobs(x.hidden, x.weight, x.targets)[0].grad_fn is None


def test_backward_may_run_twice():
    x = Example(9)
    loss = lm_logprobs(x.hidden, x.weight, x.targets, chunk=4)[0].sum()
    first, second = (torch.autograd.grad(loss, x.weight, retain_graph=True)[0] for _ in range(2))
    assert torch.allclose(first, second, atol=1e-6)


@pytest.mark.parametrize(
    ("gpu", "weight", "fp32", "inputs", "logits", "wide"),
    [
        (True, torch.bfloat16, True, torch.bfloat16, torch.float32, True),
        (True, torch.bfloat16, False, torch.bfloat16, torch.bfloat16, True),
        (True, torch.float32, True, torch.float32, torch.float32, False),
        (False, torch.bfloat16, True, torch.float32, torch.float32, False),
        (False, torch.bfloat16, False, torch.bfloat16, torch.bfloat16, False),
        (False, torch.float32, False, torch.float32, torch.float32, False),
        (False, torch.float64, True, torch.float64, torch.float64, False),
    ],
)
def test_products_by_device_and_dtype(monkeypatch, gpu, weight, fp32, inputs, logits, wide):
    monkeypatch.setattr(kernels, "wide_products", gpu)
    assert module.choose_products(weight, fp32) == (inputs, logits, wide)


@pytest.fixture
def like_a_gpu(monkeypatch):
    """Choose products as on a GPU. They are emulated: torch has them on GPUs only."""

    def mm(a, b, out_dtype):
        return a.to(out_dtype) @ b.to(out_dtype)

    def addmm(total, a, b, out_dtype, *, beta=1, alpha=1, out):
        return out.copy_(beta * total + alpha * mm(a, b, out_dtype))

    monkeypatch.setattr(kernels, "wide_products", True)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("mm.dtype", mm, "CPU")
        library.impl("addmm.dtype_out", addmm, "CPU")
        yield


@pytest.mark.parametrize("kept", (0, 1 << 20))
@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_a_float32_head_on_a_gpu_is_exact_for_bfloat16_inputs(
    like_a_gpu, monkeypatch, kept, temperature
):
    monkeypatch.setattr(kernels, "logits_to_keep", lambda *_: kept)
    x = Example(23, dtype=torch.bfloat16, padding=3)
    x.compare(5e-6, 0.05, temperature, fp32=True, chunk=5)


def test_the_gradient_of_a_weight_on_a_gpu_is_added_in_float32(like_a_gpu, monkeypatch):
    """The gradient of the logits is rounded to bfloat16, and nothing after it."""
    x = Example(64, dtype=torch.bfloat16)
    slopes = []
    add = module._add_product

    def record(total, a, b, wide):
        slopes.append(a.t().double())
        add(total, a, b, wide)

    monkeypatch.setattr(module, "_add_product", record)
    x.weight.main_grad = torch.zeros(x.weight.shape)
    x.scalar(lm_logprobs(x.hidden, x.weight, x.targets, fp32=True, chunk=7)).backward()
    exact = torch.cat(slopes).t() @ x.hidden.double()
    assert torch.allclose(x.weight.main_grad.double(), exact, rtol=1e-5, atol=1e-5)


def test_logits_are_kept_where_a_gpu_has_memory_for_them(monkeypatch):
    chunk = 1024 * 151936
    cases = {0: 0, 16 * chunk: 0, 16 * chunk + 2**33: 2**30, 100 * 2**30: 2**31}
    for free, expected in cases.items():
        monkeypatch.setitem(logits_to_keep.__globals__, "free_memory", lambda _, free=free: free)
        assert logits_to_keep(torch.device("cuda", 0), chunk) == expected


@pytest.mark.parametrize(
    ("free", "fraction", "expected"),
    [(30, 1.0, 30 + 8), (30, 0.5, 10 + 8), (30, 0.3, 0 + 8), (0, 1.0, 8)],
)
def test_free_memory_is_what_this_process_may_still_use(monkeypatch, free, fraction, expected):
    """A GPU of 80 bytes; torch holds 30 of them and uses 22."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 22)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction)
    assert free_memory(torch.device("cuda", 0)) == expected

"""FlashAttention 4 is used only if it is asked for, loads, and computes the right thing."""

import pytest
import torch
import torch.nn.functional as F

from areal_lite.megatron import attention
from areal_lite.megatron.kernels import kernels

CPU = torch.device("cpu")


def per_sequence(causal: bool):
    def attend(query, key, value, bounds, longest):
        parts = [x.split(bounds.diff().tolist()) for x in (query, key, value)]
        outputs = [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in sequence), is_causal=causal, enable_gqa=True
            )
            for sequence in zip(*parts)
        ]
        return torch.cat([out[0].transpose(0, 1) for out in outputs])

    return attend


def across_sequences(query, key, value, bounds, longest):
    whole = torch.tensor([0, len(query)])
    return per_sequence(causal=True)(query, key, value, whole, len(query))


@pytest.mark.parametrize("heads, groups, dim", [(4, 2, 64), (3, 3, 32)])
def test_the_check_tells_right_from_wrong(heads, groups, dim):
    right, *wrong = (
        attention._worst_error(attend, CPU, heads, groups, dim)
        for attend in (per_sequence(causal=True), per_sequence(causal=False), across_sequences)
    )
    assert right < attention._TOLERANCE / 2
    assert min(wrong) > 0.1


def test_a_wrong_gradient_is_noticed():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, grad):
            return 1.1 * grad

    def attend(query, key, *rest):
        return per_sequence(causal=True)(query, Wrong.apply(key), *rest)

    assert attention._worst_error(attend, CPU, 4, 2, 64) > 0.05


def missing() -> None:
    raise ModuleNotFoundError("flash_attn.cute")


@pytest.mark.parametrize(
    ("activate", "error", "used"),
    [(lambda: None, 0.005, True), (lambda: None, 0.5, False), (missing, 0.0, False)],
)
@pytest.mark.parametrize("nan", [False, True])
def test_it_is_restored_unless_it_is_right(activate, error, used, nan):
    restored = []
    worst = float("nan") if nan else error
    got = attention.activate_if_right(activate, lambda: restored.append(1), lambda: worst)
    assert got == (used and not nan)
    assert bool(restored) == (not got)


def test_it_is_not_tried_unless_asked_for(monkeypatch):
    assert kernels.flash_attention == 2
    assert not attention.use_flash4.__wrapped__(CPU, 4, 2, 64)
    monkeypatch.setattr(kernels, "flash_attention", 4)  # here it cannot load
    assert not attention.use_flash4.__wrapped__(CPU, 4, 2, 64)


def old_kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
    """Take fewer heads of keys than of queries without being told, as torch 2.11 does."""
    assert (window_size, max_q, max_k) == ((-1, 0), 300, 300) and torch.equal(cu_seq_q, cu_seq_k)
    return per_sequence(causal=True)(query, key, value, cu_seq_q, max_q)


def kernel(*packed, window_size=(-1, -1), enable_gqa=False):
    """Refuse fewer heads of keys than of queries unless told, as torch 2.13 does."""
    assert enable_gqa == (packed[0].shape[1] != packed[1].shape[1])
    return old_kernel(*packed, window_size=window_size)


@pytest.mark.parametrize("torchs", [old_kernel, kernel])
@pytest.mark.parametrize("heads, groups", [(4, 2), (3, 3)])
def test_every_torch_gets_the_arguments_that_it_takes(torchs, heads, groups, monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", torchs)
    assert (
        attention._worst_error(attention._attend, CPU, heads, groups, 32) < attention._TOLERANCE / 2
    )

"""Attention over packed tokens in half precision, by whichever kernel torch has."""

import pytest
import torch
import torch.nn.functional as F

from areal_lite.megatron import attention
from benchmarks.gpu_parts import attend, worst_error

CPU = torch.device("cpu")
TOLERANCE = 0.01  # relative errors of bfloat16 attention are about 0.005


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
        worst_error(attend, CPU, heads, groups, dim)
        for attend in (per_sequence(causal=True), per_sequence(causal=False), across_sequences)
    )
    assert right < TOLERANCE
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

    assert worst_error(attend, CPU, 4, 2, 64) > 0.05


def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, enable_gqa, scale):
    """Refuse fewer heads of keys than of queries unless told, as torch does."""
    assert (window_size, max_q, max_k) == ((-1, 0), 300, 300) and torch.equal(cu_seq_q, cu_seq_k)
    assert scale is None and enable_gqa == (query.shape[1] != key.shape[1])
    return per_sequence(causal=True)(query, key, value, cu_seq_q, max_q)


@pytest.mark.parametrize("heads, groups", [(4, 2), (3, 3)])
def test_torch_gets_the_arguments_that_it_takes(heads, groups, monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    assert worst_error(attend, CPU, heads, groups, 32) < TOLERANCE


@pytest.mark.parametrize("heads, groups, dim", [(4, 2, 64), (3, 3, 32)])
def test_one_segment_after_the_other_is_right(heads, groups, dim):
    def attend(query, key, value, bounds, longest):
        lengths = bounds.diff().tolist()
        return attention.by_segment(query, key, value, list(zip(lengths, lengths)))

    assert worst_error(attend, CPU, heads, groups, dim) < TOLERANCE


def test_a_window_counts_the_token_itself(monkeypatch):
    found = []

    def note(*tensors, window_size, enable_gqa, scale):
        assert scale == 0.3
        found.append(window_size)
        return tensors[0]

    monkeypatch.setattr(attention, "varlen_attn", note)
    x, bounds = torch.zeros(4, 1, 8), torch.tensor([0, 4])
    for window in (None, 1, 3):
        attention.causal_varlen(x, x, x, bounds, bounds, 4, 4, window, 0.3)
    assert found == [(-1, 0), (0, 0), (2, 0)]


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_window_is_the_last_keys_of_a_token(window):
    """The second segment has keys before its own."""
    torch.manual_seed(0)
    lengths, known = [6, 4], [6, 9]
    query = torch.randn(10, 2, 8, dtype=torch.float64)
    key, value = (torch.randn(15, 1, 8, dtype=torch.float64) for _ in range(2))
    found = attention.by_segment(query, key, value, list(zip(lengths, known)), window, 0.3)
    rows = []
    for length, first, count, start in ((6, 0, 6, 0), (4, 6, 9, 6)):
        for i in range(length):
            last = start + count - length + i + 1
            seen = slice(max(start, last - window), last)
            scores = torch.einsum("hd,kd->hk", query[first + i], key[seen, 0]) * 0.3
            rows.append(scores.softmax(-1) @ value[seen, 0])
    torch.testing.assert_close(found, torch.stack(rows), atol=1e-12, rtol=0)


def with_sinks(query, key, value, sinks, window) -> torch.Tensor:
    """Attend by the definition of a sink: a key with its score and no value."""
    place = torch.arange(len(query))
    back = place[:, None] - place
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
    scores = scores.masked_fill((back < 0) | (back >= (window or len(query))), -torch.inf)
    column = sinks[:, None, None].expand(-1, len(query), 1)
    weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("flash", [False, True])
def test_a_sink_takes_a_share_of_the_softmax(flash, window, monkeypatch):
    """FlashAttention is stood in for: its results, and its gradients from these alone."""
    torch.manual_seed(0)
    inputs = [torch.randn(7, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    inputs.append(torch.randn(2, dtype=torch.float64, requires_grad=True))

    def scores(query, key, window_size):
        back = torch.arange(7)[:, None] - torch.arange(7)
        seen = (back >= 0) & ((back <= window_size[0]) | (window_size[0] < 0))
        found = torch.einsum("qhd,khd->hqk", query, key) * 0.3
        return found.masked_fill(~seen, -torch.inf)

    def forward(query, key, value, *_, return_aux, window_size, **__):
        assert return_aux.lse
        found = scores(query, key, window_size)
        return torch.einsum("hqk,khd->qhd", found.softmax(-1), value), found.logsumexp(-1)

    def backward(grad, query, key, value, out, sums, *rest):
        weights = (scores(query, key, rest[-1]) - sums[..., None]).exp()
        slopes = torch.einsum("qhd,khd->hqk", grad, value) - (grad * out).sum(-1).t()[..., None]
        slopes = 0.3 * weights * slopes
        return (
            torch.einsum("hqk,khd->qhd", slopes, key),
            torch.einsum("hqk,qhd->khd", slopes, query),
            torch.einsum("hqk,qhd->khd", weights, grad),
        )

    monkeypatch.setattr(attention, "varlen_attn", forward)
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn_backward", backward)
    *qkv, sinks = inputs
    if flash:
        bounds = torch.tensor([0, 7])
        found = attention.causal_varlen(*qkv, bounds, bounds, 7, 7, window, 0.3, sinks)
    else:
        found = attention.by_segment(*qkv, [(7, 7)], window, 0.3, sinks)
    exact = with_sinks(*inputs, window)
    torch.testing.assert_close(found, exact, atol=1e-7, rtol=0)
    weight = torch.randn_like(exact)
    ours, theirs = (torch.autograd.grad((y * weight).sum(), inputs) for y in (found, exact))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)

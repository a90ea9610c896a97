"""The kernels for machines without a GPU agree with torch in float64, gradients included."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import areal_lite.megatron  # noqa: F401  (prepares megatron.core)
from areal_lite.cpu.kernels import norms
from areal_lite.cpu.kernels.products import PackedWeights, linear
from areal_lite.cpu.trainer import packed_attention, rotate
from areal_lite.megatron.attention import PackedSequences, Rotation
from areal_lite.megatron.kernels import Spans
from areal_lite.megatron.model import RMSNorm
from areal_lite.megatron.packing import local_tokens, make_microbatches
from tests.unit.megatron.sequences import batch_of

shapes = st.tuples(st.integers(1, 9), st.integers(1, 3), st.sampled_from([2, 8, 34, 128]))


def norm_of(weight: torch.Tensor, eps: float) -> RMSNorm:
    norm = RMSNorm.__new__(RMSNorm)
    torch.nn.Module.__init__(norm)
    norm.eps, norm.weight = eps, torch.nn.Parameter(weight)
    return norm


def rotate_plainly(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def assert_same_with_gradients(function, reference, inputs, tolerance=3e-6):
    """Compare results and gradients with those of `reference` in float64."""
    plain = [x.detach().double().requires_grad_() for x in inputs]
    expected, got = reference(*plain), function(*inputs)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weights).sum(), plain)
    found = torch.autograd.grad((got * weights.float()).sum(), inputs)
    for a, b in zip((got, *found), (expected, *wanted), strict=True):
        scale = b.detach().abs().max().clamp(min=1).item()
        torch.testing.assert_close(a.double(), b, atol=tolerance * scale, rtol=0)


@settings(max_examples=40, deadline=None)
@given(shape=shapes, scale=st.sampled_from([1e-2, 1.0, 1e3]), seed=st.integers(0, 2**31))
def test_rms_norm_and_its_gradients(shape, scale, seed):
    torch.manual_seed(seed)
    x, weight = torch.randn(shape).requires_grad_(), torch.randn(shape[-1]).requires_grad_()
    norm = norm_of(weight, eps=1e-6)

    def plain(x, weight):
        x = scale * x
        return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def fused(x, weight):
        return torch.func.functional_call(norm, {"weight": weight}, (scale * x,))

    assert norms.fits(x)
    assert_same_with_gradients(fused, plain, [x, weight])


def test_a_bfloat16_weight_of_float32_rows():
    """As in a gated delta net in bfloat16, whose state is float32."""
    torch.manual_seed(0)
    x, weight = torch.randn(7, 16), torch.randn(16).bfloat16()
    norm, exact = norm_of(weight, 1e-6), norm_of(weight.float(), 1e-6)
    assert torch.equal(norm(x), exact(x))
    for module in (norm, exact):
        module(x).sin().sum().backward()
    assert torch.equal(norm.weight.grad, exact.weight.grad.bfloat16())


@settings(max_examples=40, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**31))
def test_rotation_and_its_gradient(shape, seed):
    torch.manual_seed(seed)
    x = torch.randn(shape).requires_grad_()
    angles = 6 * torch.rand(shape[0], 1, shape[-1] // 2)
    cos, sin = (f(torch.cat((angles, angles), -1)) for f in (torch.cos, torch.sin))
    assert_same_with_gradients(
        lambda x: rotate(x, cos, sin),
        lambda x: rotate_plainly(x, cos.double(), sin.double()),
        [x],
    )


def test_a_strided_input_and_a_strided_gradient(monkeypatch):
    torch.manual_seed(0)
    whole = torch.randn(6, 2, 16).requires_grad_()
    angles = torch.randn(6, 1, 4).repeat(1, 1, 2)
    norm = norm_of(torch.randn(8), 1e-6)

    def result_and_gradient():
        result = rotate(norm(whole[..., 4:12]), angles.cos(), angles.sin()).transpose(0, 1)
        return result, torch.autograd.grad(result.square().sum(), [whole])[0]

    fused = result_and_gradient()
    monkeypatch.setattr(norms, "fits", lambda x: False)
    torch.testing.assert_close(fused, result_and_gradient())


@settings(max_examples=40, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**31))
def test_a_sum_is_normed_and_kept(shape, seed):
    torch.manual_seed(seed)
    rows, n = shape[0] * shape[1], shape[2]
    x, added, weight = torch.randn(rows, n), torch.randn(rows + 2, n), torch.randn(n)
    total = x.double() + added[:rows].double()
    out = torch.zeros(rows + 2, n)
    arrays = (y.numpy() for y in (x, added, weight))
    norms.add_and_norm(*arrays, np.float32(1e-6), out.numpy())
    torch.testing.assert_close(x.double(), total, atol=1e-6, rtol=0)
    expected = weight.double() * total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(out[:rows].double(), expected, atol=3e-6, rtol=3e-6)
    assert not out[rows:].any()


@settings(max_examples=60, deadline=None)
@given(
    segments=st.lists(
        st.tuples(st.integers(1, 70), st.sampled_from([0, 0, 1, 30])), min_size=1, max_size=5
    ),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]),
    dim=st.sampled_from([16, 32, 80]),
    scale=st.sampled_from([0.1, 1.0, 4.0]),
    window=st.sampled_from([None, None, 1, 3, 20, 64]),
    factor=st.sampled_from([0.1, 0.3]),
    sink=st.sampled_from([None, -3.0, 2.0]),
    seed=st.integers(0, 2**31),
)
def test_packed_attention_and_its_gradients(
    segments, heads, dim, scale, window, factor, sink, seed
):
    """A segment sees its own tokens, and before them some of all tokens."""
    torch.manual_seed(seed)
    lengths = [length for length, _ in segments]
    tensors = [scale * torch.randn(sum(lengths), n, dim) for n in (heads[0], heads[1], heads[1])]
    # A part of wider rows, as Megatron's projections give it. The gradient is not contiguous.
    query, key, value = (torch.cat([x, x], -1)[..., :dim].requires_grad_() for x in tensors)
    queries = np.cumsum([0, *lengths])
    seen = [
        torch.cat((torch.randint(0, sum(lengths), (before,)), torch.arange(start, start + length)))
        for start, (length, before) in zip(queries, segments)
    ]

    inputs = [query, key, value]
    inputs += [] if sink is None else [(sink + torch.randn(heads[0])).requires_grad_()]

    def packed(query, key, value, sinks=None):
        keys = np.cumsum([0, *map(len, seen)])
        spans = Spans(queries=queries, keys=keys, index=torch.cat(seen).numpy())
        rest = spans, window, factor, sinks
        return packed_attention(query, key, value, *rest).transpose(0, 1)

    def plain(query, key, value, sinks=None):
        attended = []
        for q, index in zip(query.split(lengths), seen, strict=True):
            tensors = (x.transpose(0, 1) for x in (q, key[index], value[index]))
            place = torch.arange(len(q))[:, None] + len(index) - len(q)
            back = place - torch.arange(len(index))
            mask = (back >= 0) & (back < (window or len(index)))
            q, k, v = tensors
            ratio = heads[0] // heads[1]
            k, v = (x.repeat_interleave(ratio, 0) for x in (k, v))
            scores = (factor * q @ k.transpose(1, 2)).masked_fill(~mask, -torch.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(mask), 1)), -1)
            attended.append(scores.softmax(-1)[..., : len(index)] @ v)
        return torch.cat(attended, 1)

    # The gradient of a query is a sum of differences between numbers of about scale², times scale.
    # Rounding of scores, of about factor * dim**0.5 * scale², is a relative error of weights.
    tolerance = 5e-6 * max(1, factor * dim**0.5) * max(1, scale) ** 3
    assert_same_with_gradients(packed, plain, inputs, tolerance)


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ({}, True),
        ({"dim": 24}, False),
        ({"dtype": torch.bfloat16}, False),
        ({"length": 2000}, False),
    ],
)
def test_packed_attention_is_used_where_it_fits(changed, fits):
    case = {"dim": 32, "dtype": torch.float32, "length": 50} | changed
    (whole,) = make_microbatches(batch_of([case["length"]]), case["length"])
    local = local_tokens(whole, 1, 0, case["length"])
    rotation = Rotation(torch.ones(4), 1.0)  # of a part of each head
    packed = PackedSequences.build(local, [rotation], case["dim"], case["dtype"])
    assert (packed.spans is not None) == fits and (packed.segments is None) == fits


@pytest.mark.parametrize(("rows", "bias"), [(3, True), (700, True), (700, False)])
def test_products_by_both_libraries(rows, bias):
    x, weight = torch.randn(rows, 64), torch.randn(128, 64)
    added = torch.randn(128) if bias else None
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), added.double() if added is not None else None
    )
    strided = weight.t().contiguous().t()
    for form in (weight, strided):
        found = linear(x, form, added).double()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 7, 48, 49, 300])
def test_packed_weights_give_the_same_products_until_they_are_cleared(rows):
    x, weight, bias = torch.randn(rows, 512), torch.randn(4096, 512) / 20, torch.randn(4096)
    packed = PackedWeights()

    def check(expected):
        for _ in range(12):
            found = packed.linear(x, weight, bias)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)

    check(before := torch.nn.functional.linear(x, weight, bias))
    weight.mul_(2)
    after = torch.nn.functional.linear(x, weight, bias)
    if 2 <= rows <= 48:  # the copy is in use
        check(before)
    packed.clear()
    check(after)


def test_other_types_are_left_to_torch():
    assert not norms.fits(torch.zeros(2, dtype=torch.bfloat16))
    assert norms.fits(torch.zeros(2))

"""The kernels over the KV cache agree with torch in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.cpu.kernels.paged_attention import PAGE, paged_attention, place_heads
from areal_lite.cpu.kernels.vectors import softmax

NUM_PAGES = 32


@st.composite
def cases(draw) -> dict:
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    # (cached prefix, new tokens) of each request: decoding has one new token, prefill has many,
    # and a chunk of a prompt has a prefix and many.
    requests = draw(
        st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=6)
    )
    return {
        "kv_heads": kv_heads,
        "heads": kv_heads * group,
        "head_dim": draw(st.sampled_from([16, 32, 48])),
        "requests": requests,
        "seed": draw(st.integers(0, 2**31)),
    }


def attend_plainly(query, keys, values, scale, window, sinks):
    """Attend with torch: query [n, H, D] at the last n positions, keys and values [L, Hkv, D]."""
    n, length = len(query), len(keys)
    back = torch.arange(length - n, length)[:, None] - torch.arange(length)
    hidden = (back < 0) | (back >= (window or length))
    group = query.shape[1] // keys.shape[1]
    query, keys, values = (x.transpose(0, 1).double() for x in (query, keys, values))
    keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
    scores = (scale * query @ keys.transpose(1, 2)).masked_fill(hidden, -torch.inf)
    if len(sinks):
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, n, 1)), -1)
    return (scores.softmax(-1)[..., :length] @ values).transpose(0, 1)


def as_pages(keys: torch.Tensor) -> torch.Tensor:
    """Turn keys [slots, Hkv, D] into the pages of the cache, [pages, Hkv, D, PAGE]."""
    return keys.unflatten(0, (-1, PAGE)).permute(0, 2, 3, 1).contiguous()


def as_array(cache: torch.Tensor) -> np.ndarray:
    return cache.view(torch.uint16).numpy() if cache.dtype == torch.bfloat16 else cache.numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=40, deadline=None)
@given(case=cases(), window=st.sampled_from([None, 1, 5, 17, 40]), sink=st.booleans())
def test_equals_plain_attention(dtype, case, window, sink):
    generator = torch.Generator().manual_seed(case["seed"])
    dim, scale = case["head_dim"], case["head_dim"] ** -0.5
    sinks = torch.randn(case["heads"] if sink else 0, generator=generator)
    # What no request has written is never read into a result.
    keys, values = torch.full((2, NUM_PAGES * PAGE, case["kv_heads"], dim), torch.nan, dtype=dtype)
    pages = torch.randperm(NUM_PAGES, generator=generator)
    rows_of_request = torch.randperm(len(case["requests"]), generator=generator)
    table = torch.zeros(len(case["requests"]), 64, dtype=torch.int32)
    queries, expected, rows, lengths, used = [], [], [], [], 0
    for row, (prefix, new) in zip(rows_of_request, case["requests"]):
        count = -(-(prefix + new) // PAGE)
        slots = (pages[used : used + count, None] * PAGE + torch.arange(PAGE)).flatten()
        used += count
        mine = slots[: prefix + new]
        table[row, : prefix + new] = mine.int()
        for cache in (keys, values):
            cache[mine] = torch.randn(len(mine), *cache.shape[1:], generator=generator).to(dtype)
        query = torch.randn(new, case["heads"], dim, generator=generator)
        queries.append(query)
        expected.append(attend_plainly(query, keys[mine], values[mine], scale, window, sinks))
        rows += [int(row)] * new
        lengths += range(prefix + 1, prefix + new + 1)
    query = torch.cat(queries)
    out = torch.full_like(query, torch.nan)
    paged_attention(
        query.numpy(),
        as_array(as_pages(keys)),
        as_array(values.unflatten(0, (-1, PAGE))),
        table.numpy(),
        np.array(rows),
        np.array(lengths),
        (np.float32(scale), window or 2**62, sinks.numpy()),
        out.numpy(),
    )
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=2e-6, rtol=0)


PLAIN = np.float32(1), 2**62, np.empty(0, np.float32)


def test_large_scores_do_not_overflow():
    query = torch.full((1, 1, 16), 100.0)
    keys, values = torch.zeros(2, PAGE, 1, 16)
    keys[0], keys[1], values[0], values[1] = 100, -100, 3, 5
    out = torch.empty(1, 1, 16)
    table = torch.arange(PAGE, dtype=torch.int32)[None]
    arrays = (x.numpy() for x in (query, as_pages(keys), values[None], table))
    paged_attention(*arrays, np.array([0]), np.array([2]), PLAIN, out.numpy())
    assert (out == 3).all()


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 9),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    dim=st.sampled_from([16, 32, 80]),
    normed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_heads_are_normed_rotated_and_placed(tokens, heads, dim, normed, seed):
    torch.manual_seed(seed)
    num_heads, kv_heads = heads
    projections = torch.randn(tokens + 3, (num_heads + 2 * kv_heads) * dim)  # some rows more
    norms, angles = torch.randn(2 if normed else 0, dim), torch.randn(tokens, dim // 2)
    slots = torch.randperm(4 * PAGE)[:tokens]
    cosines_and_sines = torch.cat([angles.cos(), angles.sin()], -1)
    query = torch.empty(tokens, num_heads, dim)
    keys, values = torch.zeros(4, kv_heads, dim, PAGE), torch.zeros(4, PAGE, kv_heads, dim)
    arrays = (x.numpy() for x in (cosines_and_sines, slots, query, keys, values))
    place_heads(projections.numpy(), norms.numpy(), np.float32(1e-6), *arrays)

    def rotated(x, weight):
        x = x.unflatten(-1, (-1, dim)).double()
        if normed:
            x = weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        a, b = x.chunk(2, -1)
        cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    q, k, v = projections[:tokens].split([num_heads * dim, kv_heads * dim, kv_heads * dim], -1)
    same = dict(atol=3e-6, rtol=1e-5)
    placed = keys.permute(0, 3, 1, 2).flatten(0, 1)
    torch.testing.assert_close(query.double(), rotated(q, norms[:1].double()), **same)
    torch.testing.assert_close(placed[slots].double(), rotated(k, norms[1:].double()), **same)
    assert torch.equal(values.flatten(0, 1)[slots], v.unflatten(-1, (-1, dim)))
    others = torch.ones(4 * PAGE, dtype=torch.bool).index_fill(0, slots, False)
    assert not placed[others].any() and not values.flatten(0, 1)[others].any()


def test_exponentials_are_right_to_the_last_bits():
    x = -np.concatenate([np.linspace(0, 87, 200_001), np.logspace(-12, 1, 1001)]).astype(np.float32)
    scores = x.copy()
    log_sum = softmax(scores, np.float32(1))
    exact = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(scores / scores.max(), exact, rtol=5e-7, atol=1e-37)
    assert math.isclose(float(scores.astype(np.float64).sum()), 1, rel_tol=1e-5)
    assert math.isclose(log_sum, np.log(exact.sum()), rel_tol=1e-6)

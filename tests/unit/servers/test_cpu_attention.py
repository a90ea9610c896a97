"""The paged attention kernel agrees with torch's attention over the same keys."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.cpu_kernels import paged_attention

SLOTS = 512


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
        "head_dim": draw(st.sampled_from([8, 16, 33])),
        "requests": requests,
        "seed": draw(st.integers(0, 2**31)),
    }


def attend_plainly(query, keys, values, scale):
    """Attend with torch: query [n, H, D] at the last n positions, keys and values [L, Hkv, D]."""
    n, length = len(query), len(keys)
    mask = torch.arange(length) <= torch.arange(length - n, length)[:, None]
    return torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None].double() for x in (query, keys, values)),
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    )[0].transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_equals_plain_attention(dtype, case):
    generator = torch.Generator().manual_seed(case["seed"])
    dim, scale = case["head_dim"], case["head_dim"] ** -0.5
    keys, values = (
        torch.randn(SLOTS, case["kv_heads"], dim, generator=generator).to(dtype) for _ in range(2)
    )
    slots = torch.randperm(SLOTS, generator=generator).int()
    rows_of_request = torch.randperm(len(case["requests"]), generator=generator)
    table = torch.zeros(len(case["requests"]), 64, dtype=torch.int32)
    queries, expected, rows, lengths, used = [], [], [], [], 0
    for row, (prefix, new) in zip(rows_of_request, case["requests"]):
        mine = slots[used : used + prefix + new]
        used += prefix + new
        table[row, : prefix + new] = mine
        query = torch.randn(new, case["heads"], dim, generator=generator)
        queries.append(query)
        expected.append(attend_plainly(query, keys[mine], values[mine], scale))
        rows += [int(row)] * new
        lengths += range(prefix + 1, prefix + new + 1)
    query = torch.cat(queries)
    out = torch.full_like(query, torch.nan)
    cache = [
        x.view(torch.uint16).numpy() if dtype == torch.bfloat16 else x.numpy()
        for x in (keys, values)
    ]
    paged_attention(
        query.numpy(),
        *cache,
        table.numpy(),
        np.array(rows),
        np.array(lengths),
        np.float32(scale),
        out.numpy(),
    )
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=2e-6, rtol=0)


def test_large_scores_do_not_overflow():
    query = torch.full((1, 1, 8), 100.0)
    keys = torch.stack([torch.full((1, 8), 100.0), torch.full((1, 8), -100.0)])
    values = torch.stack([torch.full((1, 8), 3.0), torch.full((1, 8), 5.0)])
    out = torch.empty(1, 1, 8)
    arrays = (x.numpy() for x in (query, keys, values, torch.tensor([[0, 1]], dtype=torch.int32)))
    paged_attention(*arrays, np.array([0]), np.array([2]), np.float32(1), out.numpy())
    assert (out == 3).all()

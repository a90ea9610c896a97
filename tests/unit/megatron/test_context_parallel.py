"""Context parallelism: the split loses nothing, and every token sees the tokens up to itself."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import areal_lite.megatron  # noqa: F401  (prepares megatron.core)
from areal_lite.megatron.attention import PackedSequences, by_segment, causal_varlen
from areal_lite.megatron.kernels import rotate
from areal_lite.megatron.packing import Microbatch, local_length, local_tokens
from areal_lite.routes import is_recorded

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def microbatch_of(lengths: list[int]) -> Microbatch:
    """Make a microbatch whose token i has the id i."""
    total = sum(lengths)
    return Microbatch(
        tokens=torch.arange(total),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        token_index=torch.arange(total),
    )


def split(lengths: list[int], size: int, extra: int):
    whole = microbatch_of(lengths)
    length = local_length(whole, size) + extra
    return whole, [local_tokens(whole, size, rank, length) for rank in range(size)]


@given(LENGTHS, st.sampled_from([1, 2, 3, 4]), st.integers(0, 90))
def test_gathered_tokens_are_the_microbatch(lengths, size, extra):
    whole, ranks = split(lengths, size, extra)
    for name, expected in (
        ("tokens", whole.tokens),
        ("position_ids", whole.position_ids),
        ("following", whole.tokens.roll(-1)),
    ):
        assert torch.equal(
            torch.cat([getattr(rank, name) for rank in ranks])[ranks[0].gathered_index], expected
        )
    assert len({tuple(rank.gathered_index.tolist()) for rank in ranks}) == 1
    length = local_length(whole, size) + extra
    assert {len(rank.tokens) for rank in ranks} == {length}
    assert {int(rank.cu_seqlens[-1]) for rank in ranks} == {length}


@given(LENGTHS, st.sampled_from([1, 2, 3]), st.integers(0, 90))
def test_every_token_keeps_its_route_and_padding_has_none(lengths, size, extra):
    whole = microbatch_of(lengths)
    routes = np.arange(2 * sum(lengths), dtype=np.uint16).reshape(-1, 1, 2)
    whole.routes = torch.from_numpy(routes)
    length = local_length(whole, size) + extra
    ranks = [local_tokens(whole, size, rank, length) for rank in range(size)]
    gathered = np.concatenate([rank.routes.numpy() for rank in ranks])
    np.testing.assert_array_equal(gathered[ranks[0].gathered_index.numpy()], routes)
    assert is_recorded(gathered).sum() == sum(lengths) and len(gathered) == size * length


@given(LENGTHS, st.sampled_from([2, 3, 4]), st.integers(0, 90))
def test_a_token_sees_its_sequence_up_to_itself(lengths, size, extra):
    whole, ranks = split(lengths, size, extra)
    gathered = torch.cat([rank.tokens for rank in ranks])
    real = set(ranks[0].gathered_index.tolist())
    seen_by = {}
    for r, rank in enumerate(ranks):
        bounds = zip(
            rank.cu_seqlens[:-1], rank.cu_seqlens[1:], rank.cu_seqlens_k[:-1], rank.cu_seqlens_k[1:]
        )
        for start, end, first, last in (map(int, b) for b in bounds):
            for i in range(start, end):
                slot = r * len(rank.tokens) + i
                if slot in real:
                    keys = rank.key_index[first : last - (end - 1 - i)]
                    assert set(keys.tolist()) <= real  # no padding
                    seen_by[int(rank.tokens[i])] = gathered[keys].tolist()
    for token, position in zip(whole.tokens.tolist(), whole.position_ids.tolist()):
        assert seen_by[token] == list(range(token - position, token + 1))


@given(LENGTHS, st.sampled_from([2, 4]))
def test_ranks_see_equally_many_keys(lengths, size):
    _, ranks = split(lengths, size, 0)
    assert len({len(rank.key_index) for rank in ranks}) == 1


def test_padding_fills_up_to_a_multiple():
    whole = microbatch_of([5, 3])
    assert [
        local_length(whole, 1),
        local_length(whole, 1, 3),
        local_length(whole, 2),
        local_length(whole, 2, 4),
    ] == [8, 9, 6, 8]


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.sampled_from([2, 3]), st.integers(0, 9))
def test_attention_agrees_with_that_of_one_rank(lengths, size, extra):
    """Keys and values are gathered here. All is float64."""
    torch.manual_seed(0)
    inv_freq = torch.tensor([1.0, 0.1], dtype=torch.float64)
    q, k, v = (torch.randn(sum(lengths), heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    whole, ranks = split(lengths, size, extra)
    alone = PackedSequences.build(split(lengths, 1, 0)[1][0], inv_freq, torch.float64)
    key = rotate(k, alone.cos, alone.sin)
    query = rotate(q, alone.cos, alone.sin)
    expected = by_segment(query, key, v, alone.segments)
    ids = torch.cat([rank.tokens for rank in ranks])  # token i has id i
    outputs = []
    for rank in ranks:
        packed = PackedSequences.build(rank, inv_freq, torch.float64)
        query = rotate(q[rank.tokens], packed.cos, packed.sin)
        keys = ids[packed.key_index]
        outputs.append(by_segment(query, key[keys], v[keys], packed.segments))
    gathered = torch.cat(outputs)[ranks[0].gathered_index]
    assert torch.allclose(gathered, expected, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention needs a GPU")
@pytest.mark.parametrize("size", [1, 2])
def test_flash_attention_sees_the_same_tokens(size):
    torch.manual_seed(0)
    lengths, inv_freq = [300, 7, 65], torch.tensor([1.0] * 32)
    q, k, v = (torch.randn(sum(lengths), heads, 64).bfloat16() for heads in (4, 2, 2))
    _, ranks = split(lengths, size, 5)
    ids = torch.cat([rank.tokens for rank in ranks])
    for rank in ranks:
        slow = PackedSequences.build(rank, inv_freq, torch.float32)
        fast = PackedSequences.build(rank, inv_freq.cuda(), torch.bfloat16)
        assert fast.segments is None
        query = q[rank.tokens]
        keys = slice(None) if slow.key_index is None else slow.key_index
        kv = k[ids][keys].float(), v[ids][keys].float()
        exact = by_segment(query.float(), *kv, slow.segments)
        keys = slice(None) if fast.key_index is None else fast.key_index.cpu()
        tensors = query.cuda(), k[ids][keys].cuda(), v[ids][keys].cuda()
        bounds = fast.cu_seqlens_q, fast.cu_seqlens_kv, fast.max_seqlen_q, fast.max_seqlen_kv
        flash = causal_varlen(*tensors, *bounds)
        assert (flash.float().cpu() - exact).abs().max() < 0.03

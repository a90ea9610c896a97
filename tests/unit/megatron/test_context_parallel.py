"""Splitting a microbatch over context-parallel ranks loses nothing, and every token sees exactly the tokens up to itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import areal_lite.megatron  # noqa: F401  (prepares megatron.core)
from areal_lite.megatron.attention import PackedSequences, _in_blocks, _varlen, rotate
from areal_lite.megatron.context_parallel import local_length, local_tokens
from areal_lite.megatron.packing import Microbatch

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def microbatch_of(lengths: list[int]) -> Microbatch:
    """Token i has id i."""
    total = sum(lengths)
    return Microbatch(
        tokens=torch.arange(total),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        token_index=torch.arange(total),
        max_seqlen=max(lengths),
    )


def split(lengths: list[int], size: int, extra: int):
    whole = microbatch_of(lengths)
    length = local_length(whole, size) + extra
    return whole, [local_tokens(whole, size, rank, length) for rank in range(size)]


@given(LENGTHS, st.sampled_from([1, 2, 3, 4]), st.integers(0, 90))
def test_what_is_gathered_is_the_microbatch(lengths, size, extra):
    whole, ranks = split(lengths, size, extra)
    for name, expected in (
        ("tokens", whole.tokens),
        ("position_ids", whole.position_ids),
        ("following", whole.tokens.roll(-1)),
    ):
        assert torch.equal(
            torch.cat([getattr(rank, name) for rank in ranks])[ranks[0].places], expected
        )
    assert len({tuple(rank.places.tolist()) for rank in ranks}) == 1
    assert (
        {len(rank.tokens) for rank in ranks}
        == {int(rank.cu_seqlens[-1]) for rank in ranks}
        == {local_length(whole, size) + extra}
    )


@given(LENGTHS, st.sampled_from([2, 3, 4]), st.integers(0, 90))
def test_a_token_sees_those_of_its_sequence_up_to_itself(lengths, size, extra):
    whole, ranks = split(lengths, size, extra)
    gathered = torch.cat([rank.tokens for rank in ranks])
    real = set(ranks[0].places.tolist())
    seen_by = {}
    for r, rank in enumerate(ranks):
        bounds = zip(
            rank.cu_seqlens[:-1], rank.cu_seqlens[1:], rank.cu_seqlens_k[:-1], rank.cu_seqlens_k[1:]
        )
        for start, end, first, last in (map(int, b) for b in bounds):
            for i in range(start, end):
                place = r * len(rank.tokens) + i
                if place in real:
                    keys = rank.key_rows[first : last - (end - 1 - i)]
                    assert set(keys.tolist()) <= real  # no padding
                    seen_by[int(rank.tokens[i])] = gathered[keys].tolist()
    for token, position in zip(whole.tokens.tolist(), whole.position_ids.tolist()):
        assert seen_by[token] == list(range(token - position, token + 1))


@given(LENGTHS, st.sampled_from([2, 4]))
def test_ranks_see_equally_many_keys(lengths, size):
    _, ranks = split(lengths, size, 0)
    assert len({len(rank.key_rows) for rank in ranks}) == 1


def test_a_multiple_is_made_up_by_padding():
    whole = microbatch_of([5, 3])
    assert [
        local_length(whole, 1),
        local_length(whole, 1, 3),
        local_length(whole, 2),
        local_length(whole, 2, 4),
    ] == [8, 9, 6, 8]


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.sampled_from([2, 3]), st.integers(0, 9))
def test_attention_is_the_same_as_of_one_rank(lengths, size, extra):
    """In float64; the gathering of keys and values is done here."""
    torch.manual_seed(0)
    inv_freq = torch.tensor([1.0, 0.1], dtype=torch.float64)
    q, k, v = (torch.randn(sum(lengths), heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    whole, ranks = split(lengths, size, extra)
    alone = PackedSequences.build(split(lengths, 1, 0)[1][0], inv_freq, torch.float64)
    rows, key = alone.rows, rotate(k, alone.cos, alone.sin)
    expected = _in_blocks(rotate(q, alone.cos, alone.sin)[rows], key[rows], v[rows], alone)[
        alone.places
    ]
    ids = torch.cat([rank.tokens for rank in ranks])  # token i has id i
    outputs = []
    for rank in ranks:
        packed = PackedSequences.build(rank, inv_freq, torch.float64)
        query = rotate(q[rank.tokens], packed.cos, packed.sin)[packed.rows]
        out = _in_blocks(query, key[ids][packed.key_rows], v[ids][packed.key_rows], packed)
        outputs.append(out[packed.places])
    assert torch.allclose(torch.cat(outputs)[ranks[0].places], expected, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention needs a GPU")
@pytest.mark.parametrize("size", [1, 2])
def test_flash_attention_sees_the_same_tokens(size):
    torch.manual_seed(0)
    lengths, inv_freq = [300, 7, 65], torch.tensor([1.0] * 32)
    q, k, v = (torch.randn(sum(lengths), heads, 64).bfloat16() for heads in (4, 2, 2))
    _, ranks = split(lengths, size, 5)
    ids = torch.cat([rank.tokens for rank in ranks])
    for rank in ranks:
        slow, fast = (
            PackedSequences.build(rank, inv_freq, torch.float32),
            PackedSequences.build(rank, inv_freq.cuda(), torch.bfloat16),
        )
        rows = slow.rows if slow.key_rows is None else slow.key_rows
        blocks = _in_blocks(
            q[rank.tokens][slow.rows].float(), k[ids][rows].float(), v[ids][rows].float(), slow
        )[slow.places]
        keys = slice(None) if fast.key_rows is None else fast.key_rows.cpu()
        flash = _varlen(
            q[rank.tokens].cuda(), k[ids][keys].cuda(), v[ids][keys].cuda(), fast
        ).flatten(1)
        assert (flash.float().cpu() - blocks).abs().max() < 0.03

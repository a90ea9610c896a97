"""Each token sees its prefix, on any number of context-parallel ranks; none is computed twice."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import areal_lite.megatron  # noqa: F401  (prepares megatron.core)
from areal_lite.megatron.attention import PackedSequences, Rotation, by_segment, causal_varlen
from areal_lite.megatron.kernels import rotate
from areal_lite.megatron.packing import (
    LocalTokens,
    Microbatch,
    local_length,
    local_tokens,
    make_microbatches,
)
from areal_lite.routes import is_recorded
from tests.unit.megatron.sequences import batch_of, tries

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
SIZES = st.sampled_from([1, 2, 3, 4])
Prefix = tuple[int, ...]


def microbatch_of(lengths: list[int]) -> Microbatch:
    """Make a microbatch whose token i has the id i."""
    (microbatch,) = make_microbatches(batch_of(lengths), sum(lengths))
    return microbatch


def split(whole: Microbatch, size: int, extra: int, states: bool = False) -> list[LocalTokens]:
    length = local_length(whole, size) + extra
    return [local_tokens(whole, size, rank, length, states=states) for rank in range(size)]


def prefixes(whole: Microbatch) -> Iterator[tuple[int, Prefix]]:
    """Yield each token's index, and the tokens of its sequence up to it."""
    bounds = whole.cu_seqlens.tolist()
    for start, end in zip(bounds, bounds[1:]):
        for i in range(start, end):
            yield i, tuple(whole.tokens[start : i + 1].tolist())


def seen(ranks: list[LocalTokens]) -> list[list[Prefix]]:
    """Return what each token of each rank sees, up to itself."""
    gathered = torch.cat([rank.tokens for rank in ranks])
    found = []
    for rank in ranks:
        index = torch.arange(len(rank.tokens)) if rank.key_index is None else rank.key_index
        queries = rank.cu_seqlens.tolist()
        keys = queries if rank.cu_seqlens_k is None else rank.cu_seqlens_k.tolist()
        found.append(
            [
                tuple(gathered[index[first : last - (end - 1 - i)]].tolist())
                for start, end, first, last in zip(queries, queries[1:], keys, keys[1:])
                for i in range(start, end)
            ]
        )
    return found


@settings(deadline=None)
@given(tries(), SIZES, st.integers(0, 20))
def test_each_prefix_is_computed_once_and_sees_itself(batch, size, extra):
    (whole,) = make_microbatches(batch, 10_000)
    ranks = split(whole, size, extra)
    computed = [
        (prefix, int(token), int(position))
        for rank, found in zip(ranks, seen(ranks))
        for token, position, prefix in zip(rank.tokens, rank.position_ids, found)
    ]
    distinct = {(prefix, prefix[-1], len(prefix) - 1) for _, prefix in prefixes(whole)}
    assert distinct <= set(computed)
    assert len(whole.trie.token) == len(distinct)
    length = local_length(whole, size) + extra
    assert {len(rank.tokens) for rank in ranks} == {length}
    assert {int(rank.cu_seqlens[-1]) for rank in ranks} == {length}
    if size == 1 and not extra:
        assert len(computed) == len(distinct)


@settings(deadline=None)
@given(tries(), SIZES, st.integers(0, 20), st.randoms())
def test_each_scored_token_has_the_row_of_its_prefix(batch, size, extra, random):
    scored = np.array([random.random() < 0.5 for _ in batch.tokens])
    (whole,) = make_microbatches(batch, 10_000, scored=scored)
    ranks = split(whole, size, extra)
    states, index = seen(ranks), ranks[0].result_index.tolist()
    count = len(ranks[0].rows)
    pairs = set()
    for i, prefix in prefixes(whole):
        if len(prefix) == 1 or not scored[whole.token_index[i]]:
            assert index[i] == size * count, "no row"
            continue
        r, row = divmod(index[i], count)
        assert states[r][ranks[r].rows[row]] == prefix[:-1]
        assert ranks[r].targets[row] == prefix[-1]
        pairs.add(prefix)
    if size == 1:
        assert count == max(len(pairs), 1)
    assert all(torch.equal(rank.result_index, ranks[0].result_index) for rank in ranks)


@settings(deadline=None)
@given(tries(), SIZES, st.integers(0, 20))
def test_each_token_has_the_state_before_it_and_the_first_the_last(batch, size, extra):
    (whole,) = make_microbatches(batch, 10_000)
    ranks = split(whole, size, extra, states=True)
    states, index = seen(ranks), ranks[0].result_index.tolist()
    every, bounds = dict(prefixes(whole)), whole.cu_seqlens.tolist()
    for start, end in zip(bounds, bounds[1:]):
        for i in range(start, end):
            r, row = divmod(index[i], len(ranks[0].rows))
            before = every[i - 1] if i > start else every[end - 1]
            assert states[r][ranks[r].rows[row]] == before


@given(LENGTHS, SIZES, st.integers(0, 90))
def test_every_token_keeps_its_route_and_padding_has_none(lengths, size, extra):
    whole = microbatch_of(lengths)
    routes = np.arange(2 * sum(lengths), dtype=np.uint16).reshape(-1, 1, 2)
    whole.routes = torch.from_numpy(routes)
    ranks = split(whole, size, extra)
    for rank in ranks:
        recorded = is_recorded(rank.routes.numpy())
        assert torch.equal(rank.routes[recorded], whole.routes[rank.tokens[recorded]])
    gathered = np.concatenate([rank.routes.numpy() for rank in ranks])
    assert is_recorded(gathered).sum() == sum(lengths)


@given(LENGTHS, st.sampled_from([2, 4]))
def test_ranks_see_equally_many_keys(lengths, size):
    ranks = split(microbatch_of(lengths), size, 0)
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
@given(
    tries(),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 9),
    st.sampled_from([None, None, 1, 2, 5, 100]),
)
def test_attention_agrees_with_that_of_whole_sequences(batch, size, extra, window):
    """Keys and values are gathered here. All is float64."""
    torch.manual_seed(0)
    rotation = Rotation(torch.tensor([1.0, 0.1], dtype=torch.float64), 1.3)
    (whole,) = make_microbatches(batch, 10_000)
    (plain,) = make_microbatches(batch, 10_000, share=False)
    vocab = int(whole.tokens.max()) + 1
    tables = [torch.randn(vocab, heads, 4, dtype=torch.float64) for heads in (4, 2, 2)]

    def attend(ranks: list[LocalTokens]) -> list[torch.Tensor]:
        packed = [PackedSequences.build(rank, [rotation], 4, torch.float64) for rank in ranks]
        rotated = [
            [rotate(x[rank.tokens], *p.angles[0]) for x in tables[:2]] + [tables[2][rank.tokens]]
            for rank, p in zip(ranks, packed)
        ]
        key, value = (torch.cat([three[i] for three in rotated]) for i in (1, 2))
        outputs = []
        for p, (query, *_) in zip(packed, rotated):
            keys = slice(None) if p.key_index is None else p.key_index
            outputs.append(by_segment(query, key[keys], value[keys], p.segments, window))
        return outputs

    (expected,) = attend(split(plain, 1, 0))
    at = {prefix: expected[plain.trie.node[i]] for i, prefix in prefixes(plain)}
    ranks = split(whole, size, extra)
    for found, states in zip(attend(ranks), seen(ranks)):
        for row, prefix in zip(found, states):
            if prefix in at:
                torch.testing.assert_close(row, at[prefix], atol=1e-12, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention needs a GPU")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("shared", [0, 200])
@pytest.mark.parametrize("window", [None, 50])
def test_flash_attention_sees_the_same_tokens(size, shared, window):
    torch.manual_seed(0)
    rotation = Rotation(torch.tensor([1.0] * 32), 1.0)
    on_gpu = Rotation(rotation.frequencies.cuda(), 1.0)
    batch = batch_of([300, 7, 265, 300])
    ends = batch.cu_seqlens
    for start in ends[[2, 3]]:
        batch.tokens[start : start + shared] = batch.tokens[:shared]
    (whole,) = make_microbatches(batch, 10_000)
    q, k, v = (torch.randn(ends[-1], heads, 64).bfloat16() for heads in (4, 2, 2))
    ranks = split(whole, size, 5)
    ids = torch.cat([rank.tokens for rank in ranks])
    for rank in ranks:
        slow = PackedSequences.build(rank, [rotation], 64, torch.float32)
        fast = PackedSequences.build(rank, [on_gpu], 64, torch.bfloat16)
        assert fast.segments is None
        query = q[rank.tokens]
        keys = slice(None) if slow.key_index is None else slow.key_index
        kv = k[ids][keys].float(), v[ids][keys].float()
        exact = by_segment(query.float(), *kv, slow.segments, window)
        tensors = query.cuda(), k[ids][keys].cuda(), v[ids][keys].cuda()
        bounds = fast.cu_seqlens_q, fast.cu_seqlens_kv, fast.max_seqlen_q, fast.max_seqlen_kv
        flash = causal_varlen(*tensors, *bounds, window)
        assert (flash.float().cpu() - exact).abs().max() < 0.03

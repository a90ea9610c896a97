"""Microbatches and attention blocks hold every token once, in whole sequences under the budget."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.megatron.packing import attention_crossover, make_microbatches, pack
from tests.unit.megatron.sequences import batch_of

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
CROSSOVERS = st.sampled_from((5.0, 60.0, float("inf")))


def pack_lengths(lengths, budget, crossover=float("inf"), multiple=1):
    sizes = np.array(lengths)
    return pack(sizes, budget, costs=sizes + sizes**2 / crossover, multiple=multiple)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 100), CROSSOVERS, st.integers(1, 4))
def test_each_sequence_is_in_exactly_one_bin_under_the_budget(lengths, budget, crossover, multiple):
    bins = pack_lengths(lengths, budget, crossover=crossover, multiple=multiple)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    for members in bins:
        assert sum(lengths[i] for i in members) <= budget or len(members) == 1
    assert all(bins)
    assert len(bins) == len(lengths) or len(bins) % multiple == 0


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 100), CROSSOVERS)
def test_bins_are_few(lengths, budget, crossover):
    bins = pack_lengths(lengths, budget, crossover)
    bins = [[lengths[i] for i in members] for members in bins]
    fitting = [members for members in bins if sum(members) <= budget]
    assert len(fitting) < 2 * sum(map(sum, fitting)) / budget + 1


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 100), CROSSOVERS, st.integers(1, 9))
def test_costs_are_balanced_as_far_as_the_budget_allows(lengths, budget, crossover, multiple):
    """No bin gets cheaper by giving its shortest sequence to a bin that had room for one more."""
    bins = [
        [lengths[i] for i in members]
        for members in pack_lengths(lengths, budget, crossover=crossover, multiple=multiple)
    ]
    cost = [sum(n + n * n / crossover for n in members) for members in bins]
    for mine, members in zip(cost, bins):
        if sum(members) > budget:
            continue
        shortest = min(members, default=0)
        for other, theirs in zip(cost, bins):
            full = budget - sum(theirs) < min(theirs, default=1)
            assert full or mine - (shortest + shortest * shortest / crossover) <= other + 1e-9


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 100), st.randoms())
def test_packing_is_a_function_of_the_lengths(lengths, budget, random):
    """The same lengths give the same bins; in another order, bins of the same lengths."""
    assert pack_lengths(lengths, budget) == pack_lengths(np.array(lengths), budget)
    shuffled = random.sample(lengths, len(lengths))
    first, second = (
        [[values[i] for i in members] for members in pack_lengths(values, budget)]
        for values in (lengths, shuffled)
    )
    assert first == second


def test_long_sequences_are_spread_by_their_square():
    """One sequence of eight tokens costs more than eight of one: its bin gets fewer tokens."""
    assert [len(members) for members in pack_lengths([8] + [1] * 16, 16)] == [5, 12]
    assert [len(members) for members in pack_lengths([8] + [1] * 16, 16, crossover=8.0)] == [2, 15]


def test_ten_thousand_sequences_are_packed_tightly():
    lengths = np.minimum(np.random.default_rng(0).lognormal(6.5, 1, 10_000).astype(int) + 1, 16384)
    bins = pack_lengths(lengths, 16384, crossover=7680.0)
    assert len(bins) <= 1.05 * lengths.sum() / 16384


def test_a_sequence_longer_than_the_budget_stands_alone_and_whole():
    assert sorted(pack_lengths([5, 50, 5], 10)) == [[0, 2], [1]]
    microbatches = make_microbatches(batch_of([5, 50, 5]), 10)
    assert sorted(len(m.tokens) for m in microbatches) == [10, 50]


def test_a_budget_of_zero_is_refused():
    with pytest.raises(ValueError, match="tokens_per_microbatch=0"):
        pack_lengths([1], 0)


def test_the_crossover_of_a_published_model():
    """Qwen3-0.6B, by hand: attention takes 2 L x 2048 operations a token, matrices 2 x 15.7M."""
    # After areal_lite.megatron, which prepares it.
    from megatron.core.transformer import TransformerConfig

    shape = dict(
        hidden_size=1024,
        num_attention_heads=16,
        num_query_groups=8,
        kv_channels=128,
        ffn_hidden_size=3072,
    )
    dense = TransformerConfig(num_layers=1, gated_linear_unit=True, **shape)
    assert attention_crossover(dense) == 1024 * (2 * 2048 + 2 * 1024 + 3 * 3072) / 2048
    experts = TransformerConfig(
        num_layers=1,
        gated_linear_unit=True,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=768,
        **shape,
    )
    assert attention_crossover(experts) == 1024 * (2 * 2048 + 2 * 1024 + 2 * 3 * 768) / 2048


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 100))
def test_microbatches_partition_the_batch(lengths, budget):
    batch = batch_of(lengths)
    microbatches = make_microbatches(batch, budget)
    assert sorted(torch.cat([m.token_index for m in microbatches]).tolist()) == list(
        range(sum(lengths))
    )
    for m in microbatches:
        assert {t.dtype for t in (m.tokens, m.position_ids, m.token_index)} == {torch.int64}
        assert m.cu_seqlens.dtype == torch.int32
        assert np.array_equal(batch.tokens[m.token_index.numpy()], m.tokens.numpy())
        for start, end in zip(m.cu_seqlens[:-1].tolist(), m.cu_seqlens[1:].tolist()):
            assert m.position_ids[start:end].tolist() == list(range(end - start))
            first = int(m.token_index[start])
            assert first in batch.cu_seqlens[:-1]  # whole sequences, in order
            assert m.token_index[start:end].tolist() == list(range(first, first + end - start))

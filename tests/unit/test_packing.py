"""Microbatches hold every token once, whole sequences, under the budget; and so do the blocks that attention makes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_lite.trainer.packing import make_microbatches, pack
from areal_lite.trajectory import TrainBatch

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def batch_of(lengths: list[int]) -> TrainBatch:
    total, count = sum(lengths), len(lengths)
    return TrainBatch(
        tokens=np.arange(total, dtype=np.int32),
        loss_mask=np.ones(total, bool),
        behavior_logprobs=np.zeros(total, np.float32),
        versions=np.zeros(total, np.int32),
        rewards=np.zeros(count, np.float32),
        group_ids=np.zeros(count, np.int64),
        members=np.zeros(count, np.int32),
        truncated=np.zeros(count, bool),
        cu_seqlens=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
    )


@given(LENGTHS, st.integers(1, 100))
def test_each_sequence_is_in_exactly_one_bin_under_the_budget(lengths, budget):
    bins = pack(lengths, budget)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    for members in bins:
        assert sum(lengths[i] for i in members) <= budget or len(members) == 1


@given(LENGTHS, st.integers(60, 200))
def test_bins_are_few(lengths, budget):
    """No two bins could be joined, so all but one are more than half full."""
    loads = sorted(sum(lengths[i] for i in members) for members in pack(lengths, budget))
    assert len(loads) == 1 or loads[0] + loads[1] > budget


def test_a_sequence_longer_than_the_budget_stands_alone_and_whole():
    assert sorted(pack([5, 50, 5], 10)) == [[0, 2], [1]]
    microbatches = make_microbatches(batch_of([5, 50, 5]), 10)
    assert sorted(len(m.tokens) for m in microbatches) == [10, 50]


def test_a_budget_that_holds_nothing_is_refused():
    with pytest.raises(ValueError, match="tokens_per_microbatch=0"):
        pack([1], 0)


@given(LENGTHS, st.integers(1, 100))
def test_microbatches_partition_the_batch(lengths, budget):
    batch = batch_of(lengths)
    microbatches = make_microbatches(batch, budget)
    assert sorted(torch.cat([m.where for m in microbatches]).tolist()) == list(range(sum(lengths)))
    for m in microbatches:
        assert {t.dtype for t in (m.tokens, m.position_ids, m.where)} == {torch.int64} and m.cu_seqlens.dtype == torch.int32
        assert np.array_equal(batch.tokens[m.where.numpy()], m.tokens.numpy())
        assert m.max_seqlen == int(m.cu_seqlens.diff().max())
        for start, end in zip(m.cu_seqlens[:-1].tolist(), m.cu_seqlens[1:].tolist()):
            assert m.position_ids[start:end].tolist() == list(range(end - start))
            first = int(m.where[start])
            assert first in batch.cu_seqlens[:-1]  # whole sequences, in order
            assert m.where[start:end].tolist() == list(range(first, first + end - start))


@given(LENGTHS)
def test_attention_blocks_hold_each_sequence_in_a_row_of_its_own(lengths):
    from areal_lite.trainer.attention import MIN_FILL, block_layout

    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    blocks, rows, places = block_layout(cu_seqlens)
    assert rows[places].tolist() == list(range(sum(lengths)))
    assert sum(count for count, _ in blocks) == len(lengths)
    start, seen = 0, []
    for count, longest in blocks:
        for row in rows[start : start + count * longest].view(count, longest).tolist():
            sequence = int(np.searchsorted(np.cumsum(lengths), row[0], side="right"))
            own = list(range(int(cu_seqlens[sequence]), int(cu_seqlens[sequence + 1])))
            assert row == own + [own[-1]] * (longest - len(own))
            assert len(own) >= MIN_FILL * longest
            seen.append(sequence)
        start += count * longest
    assert sorted(seen) == list(range(len(lengths)))

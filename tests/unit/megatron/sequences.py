"""Batches of sequences, and those that share prefixes, for hypothesis."""

import numpy as np
from hypothesis import strategies as st

from areal_lite.train_batch import TrainBatch


def batch_of(lengths: list[int]) -> TrainBatch:
    total, count = sum(lengths), len(lengths)
    return TrainBatch(
        tokens=np.arange(total, dtype=np.int32),
        loss_mask=np.ones(total, bool),
        behavior_logprobs=np.zeros(total, np.float32),
        versions=np.zeros(total, np.int32),
        rewards=np.zeros(count, np.float32),
        group_ids=np.zeros(count, np.int64),
        sample_indices=np.arange(count, dtype=np.int32),
        trace_indices=np.zeros(count, np.int32),
        truncated=np.zeros(count, bool),
        kv_versions=np.zeros(count, np.int32),
        source_keys=np.zeros(count, np.int64),
        cu_seqlens=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
    )


@st.composite
def tries(draw) -> TrainBatch:
    """Draw sequences that often share a prefix, are equal, or are a prefix of another."""
    token = st.integers(2, 4)  # a model may have a padding token below
    sequences = draw(st.lists(st.lists(token, min_size=1, max_size=12), min_size=1, max_size=6))
    more = st.tuples(st.sampled_from(sequences), st.integers(1, 12), st.lists(token, max_size=6))
    for start, length, rest in draw(st.lists(more, max_size=6)):
        sequences.append(start[:length] + rest)
    batch = batch_of(list(map(len, sequences)))
    batch.tokens = np.concatenate(sequences).astype(np.int32)
    return batch

"""A cached reference agrees with the reference, and computes each sequence once."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.megatron.reference import CachedReference
from areal_lite.train_batch import TrainBatch
from areal_lite.trajectory import Trajectory


class Counting:
    """A reference whose log-prob of a token depends on all tokens up to it.

    computed: the sequences that it was asked for, call by call.
    """

    def __init__(self) -> None:
        self.computed: list[list[tuple[int, ...]]] = []

    def logprobs(self, batch: TrainBatch, temperature: float) -> torch.Tensor:
        parts = np.split(batch.tokens, batch.cu_seqlens[1:-1])
        self.computed.append([tuple(part.tolist()) for part in parts])
        return torch.from_numpy(
            np.concatenate([-np.cumsum(np.sqrt(part + 1)) / temperature for part in parts]).astype(
                np.float32
            )
        )


def batch_of(sequences: list[tuple[int, ...]]) -> TrainBatch:
    def trajectory(sample_index: int, tokens: tuple[int, ...]) -> Trajectory:
        versions = np.array([-1, *[0] * (len(tokens) - 1)], np.int32)
        return Trajectory(
            group_id=0,
            prompt_id="p",
            sample_index=sample_index,
            tokens=np.array(tokens, np.int32),
            loss_mask=versions >= 0,
            behavior_logprobs=np.zeros(len(tokens), np.float32),
            versions=versions,
            finish_reason="stop",
            reward=0.0,
        )

    return TrainBatch.from_trajectories(
        [trajectory(i, tokens) for i, tokens in enumerate(sequences)]
    )


SEQUENCE = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)


@settings(deadline=None)
@given(st.lists(st.lists(SEQUENCE, min_size=1, max_size=6), max_size=8), st.integers(0, 30))
def test_it_agrees_with_the_reference(batches, max_tokens) -> None:
    model = Counting()
    cached = CachedReference(model, max_tokens)
    for sequences in batches:
        batch = batch_of(sequences)
        assert torch.equal(cached.logprobs(batch, 0.5), Counting().logprobs(batch, 0.5))
        assert model.computed[-1], "every rank takes part in every computation"
        held = sum(map(len, cached._known.values()))
        assert held == cached._tokens <= max_tokens


def test_a_known_sequence_is_not_computed_again() -> None:
    model = Counting()
    cached = CachedReference(model, max_tokens=100)
    for sequences in ([(1, 2), (3,), (1, 2)], [(3,), (4, 4), (1, 2)], [(4, 4), (3,)]):
        cached.logprobs(batch_of(sequences), 1.0)
    assert model.computed == [[(1, 2), (3,)], [(4, 4)], [(3,)]]


def test_the_sequence_used_longest_ago_is_evicted_first() -> None:
    model = Counting()
    cached = CachedReference(model, max_tokens=4)
    for sequences in ([(1, 1)], [(2, 2)], [(1, 1)], [(3, 3)], [(1, 1), (2, 2)]):
        cached.logprobs(batch_of(sequences), 1.0)
    assert model.computed[-1] == [(2, 2)]

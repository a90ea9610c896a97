"""A cached reference computes each sequence once. Each data source has its own reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.megatron.reference import CachedReference, SourceReferences
from areal_lite.train_batch import TrainBatch
from areal_lite.trajectory import Trajectory


class Counting:
    """A reference whose log-prob of a token depends on all tokens up to it.

    computed: the sequences that it was asked for, call by call.
    scale: a factor of the log-probs.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.computed: list[list[tuple[int, ...]]] = []

    def logprobs(self, batch: TrainBatch, temperature: float) -> torch.Tensor:
        parts = np.split(batch.tokens, batch.cu_seqlens[1:-1])
        self.computed.append([tuple(part.tolist()) for part in parts])
        return torch.from_numpy(
            np.concatenate(
                [-self.scale * np.cumsum(np.sqrt(part + 1)) / temperature for part in parts]
            ).astype(np.float32)
        )


def batch_of(sequences: list[tuple[int, ...]], sources: str = "") -> TrainBatch:
    """Make a batch. `sources` has the letter of each sequence's source, or nothing."""

    def trajectory(sample_index: int, tokens: tuple[int, ...]) -> Trajectory:
        versions = np.array([-1, *[0] * (len(tokens) - 1)], np.int32)
        return Trajectory(
            group_id=0,
            prompt_id=f"{sources[sample_index]}/p/1" if sources else "p/1",
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
        assert sum(map(len, cached._known.values())) <= max_tokens


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


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(SEQUENCE, st.sampled_from("abc")), min_size=1, max_size=6), max_size=6
    ),
    st.booleans(),
)
def test_each_source_has_its_own_reference(batches, cached: bool) -> None:
    """Sources a and c share one. Equal tokens of other sources have other log-probs."""
    shared, own = Counting(), Counting(scale=3.0)
    references = SourceReferences({"a": shared, "b": own, "c": shared})
    model = CachedReference(references, max_tokens=20) if cached else references
    for pairs in batches:
        sequences, sources = [list(column) for column in zip(*pairs)]
        batch = batch_of(sequences, "".join(sources))
        scale = np.repeat([3.0 if source == "b" else 1.0 for source in sources], batch.lengths)
        expected = Counting().logprobs(batch, 0.5) * torch.from_numpy(scale).float()
        torch.testing.assert_close(model.logprobs(batch, 0.5), expected)
        assert shared.computed and len(shared.computed) == len(own.computed), "a rank stayed behind"


def test_a_single_source_without_a_name_has_one_reference() -> None:
    model = Counting()
    batch = batch_of([(1, 2), (3,)])
    assert torch.equal(
        SourceReferences({"": model}).logprobs(batch), Counting().logprobs(batch, 1.0)
    )


def test_sources_that_a_batch_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="plumless, buckeroo have the same checksums"):
        SourceReferences({"plumless": Counting(), "buckeroo": Counting()})


def test_a_batch_of_an_unknown_source_is_refused() -> None:
    references = SourceReferences({"a": Counting(), "b": Counting()})
    with pytest.raises(ValueError, match="prompts of a source that is not there"):
        references.logprobs(batch_of([(1, 2), (3,)], "ac"))

"""The turns of sources stay within one of their weights, at every length."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.data.sampler import interleave


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9))
def test_no_source_is_ever_one_turn_from_its_share(weights: list[int]) -> None:
    """Counts by a loop and shares as fractions, over two rounds."""
    counts = [0] * len(weights)
    for number, source in enumerate(np.tile(interleave(weights), 2).tolist(), start=1):
        counts[source] += 1
        for count, weight in zip(counts, weights):
            assert abs(count - Fraction(number * weight, sum(weights))) < 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(2, 5))
def test_only_the_ratios_of_weights_count(weights: list[int], factor: int) -> None:
    scaled = interleave([factor * weight for weight in weights])
    np.testing.assert_array_equal(scaled, np.tile(interleave(weights), factor))


@pytest.mark.parametrize(
    ("weights", "turns"),
    [
        ([1], [0]),
        ([1, 1, 1], [0, 1, 2]),
        ([3, 1], [0, 0, 0, 1]),
        ([5, 3, 2], [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]),
    ],
)
def test_turns_are_the_same_in_every_version(weights: list[int], turns: list[int]) -> None:
    """A run that is resumed with a later version draws what it has not drawn yet."""
    assert interleave(weights).tolist() == turns

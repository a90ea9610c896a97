"""Lengths: the mean after the cut, what a prompt's answers share, and repetition."""

import numpy as np
import pytest

from areal_lite.tools.simulate.lengths import LogNormalLengths, RecordedLengths


def draw(lengths: LogNormalLengths, groups: int = 4000) -> np.ndarray:
    return np.array([lengths.group(1, prompt, 8) for prompt in range(groups)])


@pytest.mark.parametrize("spread, longest", [(0.3, 4000), (0.9, 4000), (1.5, 2000), (0.9, 100_000)])
def test_the_mean_is_that_of_the_cut_lengths(spread: float, longest: int) -> None:
    drawn = draw(LogNormalLengths(mean=1000, spread=spread, longest=longest))
    assert drawn.mean() == pytest.approx(1000, rel=0.04)
    assert drawn.min() >= 1 and drawn.max() <= longest


def test_without_a_spread_all_are_alike() -> None:
    assert set(draw(LogNormalLengths(mean=70, spread=0, longest=100), 5).ravel()) == {70}


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_answers_to_a_prompt_are_as_similar_as_they_should_be(shared: float) -> None:
    logs = np.log(draw(LogNormalLengths(mean=1000, spread=0.5, longest=10**6, shared=shared)))
    between = logs.mean(axis=1).var() - logs.var(axis=1, ddof=1).mean() / 8
    assert between / logs.var() == pytest.approx(shared, abs=0.04)


def test_a_prompt_gets_the_same_lengths_again() -> None:
    lengths = LogNormalLengths(mean=50, spread=1, longest=500)
    assert lengths.group(1, 7, 4).tolist() == lengths.group(1, 7, 4).tolist()
    assert lengths.group(1, 7, 4).tolist() != lengths.group(2, 7, 4).tolist()


def test_recorded_groups_are_drawn_whole() -> None:
    lengths = RecordedLengths([[1, 2], [30, 40], [5]])
    drawn = {tuple(sorted(lengths.group(1, prompt, 2))) for prompt in range(60)}
    assert drawn == {(1, 2), (30, 40), (5, 5)}


def test_a_mean_above_the_cut_is_refused() -> None:
    with pytest.raises(ValueError, match=r"length_mean=600 must be below .*max_new_tokens=512"):
        LogNormalLengths(mean=600, spread=1, longest=512)

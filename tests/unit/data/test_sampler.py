"""The prompt sampler: every prompt once per epoch, resumable, nothing put back is lost."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.data.sampler import PromptSampler

sizes = st.one_of(st.integers(1, 70), st.none())
seeds = st.integers(0, 2**40)


def draw(sampler: PromptSampler, count: int) -> list[int]:
    return [sampler.next() for _ in range(count)]


@settings(deadline=None)
@given(st.integers(1, 300), seeds, st.booleans())
def test_every_index_once_an_epoch(size: int, seed: int, shuffle: bool) -> None:
    sampler = PromptSampler(size, seed, shuffle)
    for epoch in range(3):
        assert sampler.epoch == epoch
        indices = draw(sampler, size)
        assert sorted(indices) == list(range(size))
        assert shuffle or indices == list(range(size))


def test_epochs_and_seeds_differ_and_runs_agree() -> None:
    one, again, other = PromptSampler(1000, 1), PromptSampler(1000, 1), PromptSampler(1000, 2)
    first, second = draw(one, 1000), draw(one, 1000)
    assert first != second and first != list(range(1000))
    assert draw(again, 2000) == first + second
    assert draw(other, 1000) != first


def test_order_is_the_same_in_every_version() -> None:
    """A run that is resumed with a later version sees the prompts that it has not seen yet."""
    assert draw(PromptSampler(10, 7), 10) == [4, 5, 9, 8, 1, 7, 6, 0, 2, 3]


def test_shuffle_looks_uniform() -> None:
    """Over many seeds, the first two of five prompts are each ordered pair equally often.

    Chi-squared test with 19 degrees of freedom, at its 99.9 % point.
    """
    seeds = 4000
    counts = Counter(tuple(draw(PromptSampler(5, seed), 2)) for seed in range(seeds))
    expected = seeds / 20
    squares = sum((count - expected) ** 2 / expected for count in counts.values())
    assert squares + expected * (20 - len(counts)) < 43.8


def test_every_position_can_be_checked_in_any_order() -> None:
    sampler = PromptSampler(7, 5)
    draws = list(enumerate(draw(sampler, 40), start=1))
    PromptSampler(7, 5).check_draws(draws[::-1])
    drawn, index = draws[17]
    with pytest.raises(ValueError, match=f"prompt {drawn} that was drawn was {index + 7}"):
        sampler.check_draws([(drawn, index + 7)])


def test_a_million_prompts_are_cheap() -> None:
    """Only the epochs at hand are shuffled, however far into a run the sampler is."""
    sampler = PromptSampler(10**6, 3)
    sampler.restore({**sampler.state(), "drawn": 10**9 + 7})
    assert len(set(draw(sampler, 1000))) == 1000


@settings(deadline=None)
@given(
    sizes,
    seeds,
    st.booleans(),
    st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=40),
    st.integers(0, 40),
)
def test_restored_sampler_goes_on_identically(size, seed, shuffle, actions, cut) -> None:
    """Actions: None draws; a number puts an index back.

    The state, through JSON, is taken after `cut` of them.
    """

    def play(sampler: PromptSampler, some: list[int | None]) -> list[int]:
        return [sampler.next() for index in some if index is None or sampler.put_back(index)]

    whole = PromptSampler(size, seed, shuffle)
    play(whole, actions[:cut])
    resumed = PromptSampler(size, seed, shuffle)
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert play(resumed, actions[cut:]) == play(whole, actions[cut:])
    assert draw(resumed, 50) == draw(whole, 50)


@settings(deadline=None)
@given(st.integers(2, 40), seeds, st.booleans(), st.data())
def test_a_retired_prompt_never_comes_again_and_the_others_come_as_before(
    size: int, seed: int, shuffle: bool, data
) -> None:
    retired = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    plain, sampler = PromptSampler(size, seed, shuffle), PromptSampler(size, seed, shuffle)
    sampler.put_back(data.draw(st.sampled_from(sorted(retired) or [0])))
    for index in retired:
        sampler.retire(index)
    resumed = PromptSampler(size, seed, shuffle)
    resumed.restore(json.loads(json.dumps(sampler.state())))
    expected = ([] if retired else [0]) + [
        index for index in draw(plain, 3 * size) if index not in retired
    ]
    assert draw(sampler, len(expected)) == draw(resumed, len(expected)) == expected
    assert not sampler.exhausted


def test_a_set_with_all_prompts_retired_is_exhausted() -> None:
    sampler = PromptSampler(3, 1)
    for index in range(3):
        assert not sampler.exhausted
        sampler.retire(index)
    assert sampler.exhausted and not PromptSampler(None, 1).exhausted


@settings(deadline=None)
@given(sizes, st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_put_back_is_served_first_and_costs_no_other_its_turn(size, returned) -> None:
    plain, sampler = PromptSampler(size, 1), PromptSampler(size, 1)
    draw(plain, 4), draw(sampler, 4)
    for index in returned:
        sampler.put_back(index)
    assert draw(sampler, len(returned)) == returned
    assert draw(sampler, 100) == draw(plain, 100)


def test_an_unbounded_set_is_counted_through() -> None:
    sampler = PromptSampler(None, 5)
    assert draw(sampler, 4) == [0, 1, 2, 3] and sampler.epoch == 0


@pytest.mark.parametrize(
    "other", [PromptSampler(11, 1), PromptSampler(10, 2), PromptSampler(10, 1, shuffle=False)]
)
def test_another_set_or_order_cannot_be_resumed(other: PromptSampler) -> None:
    with pytest.raises(ValueError, match="cannot resume"):
        PromptSampler(10, 1).restore(other.state())


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(ValueError, match="0 prompts"):
        PromptSampler(0)

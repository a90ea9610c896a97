"""The prompt sampler: every prompt once per epoch, resumable, nothing put back is lost."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.data.sampler import PromptSampler, SourceOrder

sizes = st.one_of(st.integers(1, 70), st.none())
seeds = st.integers(0, 2**40)
orders = st.builds(SourceOrder, sizes, seeds, st.integers(1, 9))


def single(*order: Any, **settings: Any) -> PromptSampler:
    return PromptSampler(SourceOrder(*order, **settings))


def draw(sampler: PromptSampler, count: int) -> list[int]:
    return [sampler.next() for _ in range(count)]


@settings(deadline=None)
@given(st.integers(1, 300), seeds)
def test_every_index_once_an_epoch(size: int, seed: int) -> None:
    sampler = single(size, seed)
    for epoch in range(3):
        assert sampler.epochs == {"": epoch}
        indices = draw(sampler, size)
        assert sorted(indices) == list(range(size))


def test_epochs_and_seeds_differ_and_runs_agree() -> None:
    one, again, other = single(1000, 1), single(1000, 1), single(1000, 2)
    first, second = draw(one, 1000), draw(one, 1000)
    assert first != second and first != list(range(1000))
    assert draw(again, 2000) == first + second
    assert draw(other, 1000) != first


def test_order_is_the_same_in_every_version() -> None:
    """A run that is resumed with a later version sees the prompts that it has not seen yet."""
    assert draw(single(10, 7), 10) == [4, 5, 9, 8, 1, 7, 6, 0, 2, 3]


def test_shuffle_looks_uniform() -> None:
    """Over many epochs, the first two of five prompts are each ordered pair equally often.

    Chi-squared test with 19 degrees of freedom, at its 99.9 % point.
    """
    seeds, epochs = 200, 20
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(seeds):
        sampler = single(5, seed)
        counts.update(tuple(draw(sampler, 5)[:2]) for _ in range(epochs))
    expected = seeds * epochs / 20
    squares = sum((count - expected) ** 2 / expected for count in counts.values())
    assert squares + expected * (20 - len(counts)) < 43.8


def test_every_position_can_be_checked_in_any_order() -> None:
    sampler = single(7, 5)
    draws = list(enumerate(draw(sampler, 40), start=1))
    single(7, 5).check_draws(draws[::-1])
    drawn, index = draws[17]
    with pytest.raises(ValueError, match=f"prompt {drawn} that was drawn was {index + 7}"):
        sampler.check_draws([(drawn, index + 7)])


def test_a_million_prompts_are_cheap() -> None:
    """Only the epochs at hand are shuffled, however far into a run the sampler is."""
    sampler = single(10**6, 3)
    sampler.resume(10**9 + 7, [])
    assert len(set(draw(sampler, 1000))) == 1000


@settings(deadline=None)
@given(
    st.lists(orders, min_size=1, max_size=4),
    st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=40),
    st.integers(0, 40),
)
def test_resumed_sampler_goes_on_identically(sources, actions, cut) -> None:
    """Actions: None draws; a number puts an index back. It resumes after `cut` of them."""

    def play(sampler: PromptSampler, some: list[int | None]) -> list[int]:
        return [sampler.next() for index in some if index is None or sampler.put_back(index)]

    whole = PromptSampler(*sources)
    play(whole, actions[:cut])
    resumed = PromptSampler(*sources)
    resumed.resume(whole.drawn, whole.returned)
    assert play(resumed, actions[cut:]) == play(whole, actions[cut:])
    assert draw(resumed, 50) == draw(whole, 50)


@settings(deadline=None)
@given(st.integers(2, 40), seeds, st.data())
def test_a_retired_prompt_never_comes_again_and_the_others_come_as_before(
    size: int, seed: int, data
) -> None:
    retired = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    plain, sampler = single(size, seed), single(size, seed)
    sampler.put_back(data.draw(st.sampled_from(sorted(retired) or [0])))
    for index in retired:
        sampler.retire(index)
    resumed = single(size, seed)
    resumed.resume(sampler.drawn, sampler.returned)
    for index in retired:
        resumed.retire(index)
    expected = ([] if retired else [0]) + [
        index for index in draw(plain, 3 * size) if index not in retired
    ]
    assert draw(sampler, len(expected)) == draw(resumed, len(expected)) == expected
    assert not sampler.exhausted


def test_a_set_with_all_prompts_retired_is_exhausted() -> None:
    sampler = single(3, 1)
    for index in range(3):
        assert not sampler.exhausted
        sampler.retire(index)
    assert sampler.exhausted and not single(None, 1).exhausted


@settings(deadline=None)
@given(sizes, st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_put_back_is_served_first_and_costs_no_other_its_turn(size, returned) -> None:
    plain, sampler = single(size, 1), single(size, 1)
    draw(plain, 4), draw(sampler, 4)
    for index in returned:
        sampler.put_back(index)
    assert draw(sampler, len(returned)) == returned
    assert draw(sampler, 100) == draw(plain, 100)


def test_an_unbounded_set_is_counted_through() -> None:
    sampler = single(None, 5)
    assert draw(sampler, 4) == [0, 1, 2, 3] and sampler.epochs == {}


@pytest.mark.parametrize("other", [single(11, 1), single(10, 2)])
def test_another_set_or_order_cannot_be_resumed(other: PromptSampler) -> None:
    with pytest.raises(ValueError, match="cannot resume"):
        single(10, 1).check_draws((n, other.next()) for n in range(1, 11))


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(ValueError, match="0 prompts"):
        single(0)


@settings(deadline=None)
@given(st.lists(orders, min_size=1, max_size=4), st.integers(0, 300))
def test_a_mixture_walks_through_each_source_by_its_weight(sources, count) -> None:
    """Every source by itself: whole epochs without a repetition, in the order of its own seed."""
    sampler = PromptSampler(*sources)
    drawn = draw(sampler, count)
    total = sum(source.weight for source in sources)
    counts = sampler.draws_by_source(count)
    for number, source in enumerate(sources):
        places = [index // len(sources) for index in drawn if index % len(sources) == number]
        assert len(places) == counts[number]
        assert abs(total * len(places) - count * source.weight) < total
        if (size := source.num_prompts) is None:
            assert places == list(range(len(places)))
            continue
        epochs = [places[start : start + size] for start in range(0, len(places), size)]
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs if len(epoch) == size)
        if number == 0:
            assert places == draw(PromptSampler(source), len(places))


def test_sources_of_one_size_have_orders_of_their_own() -> None:
    drawn = draw(PromptSampler(*[SourceOrder(50, 1)] * 2), 100)
    first, second = ([i // 2 for i in drawn if i % 2 == number] for number in range(2))
    assert sorted(first) == sorted(second) and first != second


def test_the_turns_of_retired_prompts_go_to_what_follows() -> None:
    sampler = PromptSampler(SourceOrder(3, name="a", weight=2), SourceOrder(4, name="b"))
    expected = [index for index in draw(PromptSampler(*sampler.sources), 60) if index % 2]
    for place in range(3):
        sampler.retire(2 * place)
    assert not sampler.exhausted and draw(sampler, len(expected)) == expected
    for place in range(4):
        sampler.retire(2 * place + 1)
    assert sampler.exhausted
    endless = PromptSampler(*sampler.sources, SourceOrder(None, name="c"))
    assert not endless.exhausted and endless.sizes == {"prompts/a": 3, "prompts/b": 4}


def test_epochs_are_counted_for_each_source() -> None:
    sources = [SourceOrder(2, weight=3, name="a"), SourceOrder(8, name="b"), SourceOrder(None)]
    sampler = PromptSampler(*sources)
    draw(sampler, 10)
    assert sampler.draws_by_source(10) == [6, 2, 2] and sampler.epochs == {"a": 3.0, "b": 0.25}


@pytest.mark.parametrize("weights", [(1, 2), (2, 2)])
def test_other_weights_cannot_be_resumed(weights: tuple[int, int]) -> None:
    def sampler(*weights: int) -> PromptSampler:
        return PromptSampler(*(SourceOrder(9, weight=weight) for weight in weights))

    draws = list(enumerate(draw(sampler(2, 1), 30), start=1))
    sampler(2, 1).check_draws(draws)
    with pytest.raises(ValueError, match="cannot resume: .* weight=2"):
        sampler(*weights).check_draws(draws)


def test_resting_prompts_are_counted_in_one_pass(monkeypatch) -> None:
    """They may be most of a data set, and each step counts them."""
    sampler = PromptSampler(SourceOrder(1000))
    for _ in range(1000):
        sampler.rest(sampler.next(), 1, after=sampler.drawn)
    sampler.drawn += 1  # in the next epoch
    calls, draws_by_source = [], sampler.draws_by_source
    monkeypatch.setattr(
        sampler, "draws_by_source", lambda drawn: calls.append(drawn) or draws_by_source(drawn)
    )
    assert sampler.num_resting == 1000 and calls == [1001]

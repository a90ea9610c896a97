"""The curriculum: which prompts are retired, which rest and for how long."""

from hypothesis import given
from hypothesis import strategies as st

from areal_lite.controller.dispatcher import Curriculum
from areal_lite.data.sampler import PromptSampler, SourceOrder


def test_a_prompt_is_retired_by_its_last_two_groups() -> None:
    sampler = PromptSampler(SourceOrder(9))
    curriculum = Curriculum(sampler, retire_above=0.75, rest_unsolved=0)
    for index, rewards in (
        (7, [1, 1]),  # one group may be luck
        (8, [1, 1]),
        (7, [1, 0]),  # 0.75 is not above
        (7, [1, 1]),
        (4, [0, 0]),
    ):
        curriculum.record(index, rewards, 9)
    assert not sampler.retired and not sampler.num_resting
    curriculum.record(7, [0.1, 2.0], 18)  # any positive reward is solved
    assert sampler.retired == {7}


def test_without_settings_nothing_is_left_out_or_remembered() -> None:
    sampler = PromptSampler(SourceOrder(9))
    curriculum = Curriculum(sampler, retire_above=None, rest_unsolved=0)
    for rewards in ([1, 1], [1, 1], [0, 0]):
        curriculum.record(1, rewards, 9)
    assert not curriculum.active and not sampler.retired and not sampler.num_resting
    assert not curriculum._rates and not curriculum._unsolved


@given(
    st.integers(1, 12),
    st.sets(st.integers(0, 11)),
    st.integers(0, 2**40),
    st.integers(0, 200),
)
def test_unsolved_prompts_come_in_ever_fewer_epochs(size, hard, seed, cut) -> None:
    """The reference rests 1, 2, 4, 4, 4 … epochs: it lists the epochs that ask a hard prompt.

    A run is killed after `cut` groups. What it did is read from the list of its groups.
    """
    asked = {0, 2, 5, 10, 15, 20, 25}
    plain, order = PromptSampler(SourceOrder(size, seed)), []
    for epoch in range(26):
        order += [i for i in (plain.next() for _ in range(size)) if i not in hard or epoch in asked]

    def play(records: list[tuple[int, list[float], int]], drawn: int, until: int) -> int:
        sampler = PromptSampler(SourceOrder(size, seed))
        curriculum = Curriculum(sampler, retire_above=None, rest_unsolved=4)
        for record in records:
            curriculum.record(*record)
        sampler.resume(drawn, [])
        while len(records) < until:
            index = sampler.next()
            records.append((index, [0.0, 0.0 if index in hard else 1.0], sampler.drawn))
            curriculum.record(*records[-1])
        return sampler.drawn

    records: list[tuple[int, list[float], int]] = []
    drawn = play(records, 0, min(cut, len(order)))
    play(records, drawn, len(order))
    assert [index for index, _, _ in records] == order


def test_one_success_ends_the_row_of_failures() -> None:
    sampler = PromptSampler(SourceOrder(2))
    curriculum = Curriculum(sampler, retire_above=None, rest_unsolved=8)
    rewards = {0: iter([0, 0, 1, 0, 1]), 1: iter([1] * 20)}
    epochs: list[int] = []  # in which prompt 0 is asked
    while len(epochs) < 5:
        index = sampler.next()
        curriculum.record(index, [next(rewards[index])], sampler.drawn)
        if index == 0:
            epochs.append((sampler.drawn - 1) // 2)
            assert sampler.num_resting == (len(epochs) in (1, 2, 4))
    # It rests one epoch, two epochs, none, and one again.
    assert epochs == [0, 2, 5, 6, 8]


def test_a_source_of_several_rests_by_its_own_epochs() -> None:
    """The second source has three prompts to one of the first: its epochs are shorter."""
    sources = SourceOrder(6, weight=1, name="a"), SourceOrder(2, weight=3, name="b")
    plain, sampler = PromptSampler(*sources), PromptSampler(*sources)
    curriculum = Curriculum(sampler, retire_above=None, rest_unsolved=1)
    expected, seen, draws = [], {0: 0, 1: 0}, [plain.next() for _ in range(60)]
    for index in draws:
        source = index % 2
        epoch = seen[source] // (6, 2)[source]
        seen[source] += 1
        if index != 1 or epoch % 2 == 0:  # index 1: the first prompt of the second source
            expected.append(index)
    found = []
    while len(found) < len(expected):
        found.append(index := sampler.next())
        curriculum.record(index, [float(index != 1)], sampler.drawn)
    assert found == expected

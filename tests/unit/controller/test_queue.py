"""Finished groups: oldest first, the hard bound on staleness, the deal."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.controller.batches import batch_stats, source_stats
from areal_lite.controller.buffer import GroupQueue, balanced_shards
from areal_lite.trajectory import Group, Trajectory


def group(
    group_id: int, *completions: list[int], rewards: list[float] | None = None, finish: str = "stop"
) -> Group:
    """One trajectory per list of versions; two prompt tokens each."""
    trajectories = []
    for sample_index, versions in enumerate(completions):
        n = len(versions)
        trajectories.append(
            Trajectory(
                group_id=group_id,
                prompt_id=f"p{group_id}",
                sample_index=sample_index,
                tokens=np.arange(2 + n, dtype=np.int32),
                loss_mask=np.array([False] * 2 + [True] * n),
                behavior_logprobs=np.array([0, 0] + [-0.1] * n, np.float32),
                versions=np.array([-1, -1, *versions], np.int32),
                finish_reason=finish,
                reward=rewards[sample_index] if rewards else 1.0,
            ).check()
        )
    return Group(
        group_id=group_id,
        prompt_id=f"p{group_id}",
        size=len(completions),
        trajectories=trajectories,
    )


@given(st.permutations(range(8)), st.integers(1, 8))
def test_oldest_first_whatever_the_order_of_arrival(order: list[int], count: int) -> None:
    queue = GroupQueue(4)
    for i in order:
        queue.put(group(i, [0, 0]))
    assert queue.take(count + 8, 0, 1) is None and len(queue) == 8
    taken = queue.take(count, 0, 1)
    assert [g.group_id for g in taken.groups] == list(range(count)) and len(queue) == 8 - count


def test_mask_hides_only_overdue_sampled_tokens_and_only_in_the_batch() -> None:
    queue = GroupQueue(2)
    first = group(0, [0, 0, 1, 2], [3, 3])
    queue.put(first)
    deal = queue.take(1, 4, 1)
    (shard,) = deal.shards
    assert deal.masked_tokens == 3
    assert shard.loss_mask.tolist() == [False, False, False, False, False, True] + [
        False,
        False,
        True,
        True,
    ]
    assert shard.versions.tolist() == [-1, -1, 0, 0, 1, 2, -1, -1, 3, 3]
    assert first.trajectories[0].loss_mask.tolist() == [False, False, True, True, True, True]


def test_nothing_at_the_bound_is_overdue() -> None:
    queue = GroupQueue(2)
    queue.put(group(0, [3, 4]))
    assert queue.take(1, 5, 1).masked_tokens == 0


def test_shards_hold_all_groups() -> None:
    queue = GroupQueue(0)
    for i in range(6):
        queue.put(group(i, [0] * (i + 1), [0]))
    deal = queue.take(6, 0, 3)
    ids = [set(shard.group_ids.tolist()) for shard in deal.shards]
    assert sorted(i for shard in ids for i in shard) == list(range(6)) and all(
        len(shard) == 2 for shard in ids
    )


def test_an_unequal_deal_is_refused_and_loses_nothing() -> None:
    queue = GroupQueue(0)
    for i in range(3):
        queue.put(group(i, [0]))
    with pytest.raises(ValueError, match="cannot be divided equally"):
        queue.take(3, 0, 2)
    assert len(queue) == 3


def test_stats() -> None:
    groups = [
        group(0, [2, 2, 3, 3], [3, 3], rewards=[1.0, 0.0]),
        group(1, [4, 4], [4], rewards=[0.0, 0.0], finish="length"),
    ]
    groups[0].trajectories[0].behavior_logprobs[3] = np.nan
    stats = batch_stats(groups, 5, max_staleness=3)
    assert stats == {
        "reward_mean": 0.25,
        "reward_std": pytest.approx(np.std([1, 0, 0, 0])),
        "uniform_groups_share": 0.5,
        "staleness_mean": pytest.approx((3 + 3 + 2 + 2 + 2 + 2 + 1 + 1 + 1) / 9),
        "staleness_max": 3,
        "interrupted_share": 0.25,
        "segments_mean": 1.25,
        "length_mean": 2.25,
        "length_max": 4,
        "truncated_share": 0.5,
        "trajectories": 4,
        "traces_mean": 1.0,
        "tokens": 9,
        "nonfinite_tokens": 1,
    }
    groups[0].trajectories[1].sample_index, groups[0].trajectories[1].trace_index = 0, 1
    stats = batch_stats(groups, 5, max_staleness=3)
    assert (stats["traces_mean"], stats["trajectories"]) == (pytest.approx(4 / 3), 4)
    assert stats["reward_mean"] == pytest.approx(np.mean([0.5, 0, 0])), "an episode counts once"
    overdue = batch_stats(groups, 5, max_staleness=1)
    assert (overdue["staleness_mean"], overdue["staleness_max"]) == (1, 1), (
        "tokens that are too old are not trained on"
    )


def test_stats_by_source() -> None:
    groups = [
        replace(group(0, [2, 2], [3], rewards=[1.0, 0.0]), prompt_id="math/train:1"),
        replace(group(1, [4], [4], rewards=[1.0, 1.0]), prompt_id="math/train:2"),
        replace(group(2, [4, 4, 4], rewards=[0.5]), prompt_id="talk/a/b"),
    ]
    assert source_stats(groups, ["math", "talk", "idle"]) == {
        "groups/math": 2,
        "reward_mean/math": 0.75,
        "uniform_groups_share/math": 0.5,
        "length_mean/math": 1.25,
        "trajectories/math": 4,
        "groups/talk": 1,
        "reward_mean/talk": 0.5,
        "uniform_groups_share/talk": 1.0,
        "length_mean/talk": 3.0,
        "trajectories/talk": 1,
    }
    assert source_stats(groups, [""]) == {}


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=6),
    st.integers(1, 3),
)
def test_shards_hold_every_group_once_and_equally_many(lengths, ranks) -> None:
    groups = [
        group(i, *([0] * n for n in group_lengths))
        for i, group_lengths in enumerate(lengths * ranks)
    ]
    shards = balanced_shards(groups, ranks)
    assert sorted(g.group_id for shard in shards for g in shard) == list(range(len(groups)))
    assert {len(shard) for shard in shards} == {len(groups) // ranks}


def test_shards_are_equal_in_the_tokens_that_a_trainer_computes() -> None:
    """A long prompt with four short answers is computed once, so it weighs less than it is long."""
    groups = [group(i, *lengths) for i, lengths in enumerate([[[0] * 40] * 4, [[0] * 30] * 3] * 2)]
    for one, end in zip(groups, (40, 5, 40, 5)):
        for trace in one.trajectories:  # tokens are equal up to `end`, and then are not
            trace.tokens[end:] += 1000 * (1 + trace.sample_index)
    assert [one.distinct_tokens for one in groups] == [40 + 4 * 2, 5 + 3 * 27, 48, 86]
    assert [[g.group_id for g in shard] for shard in balanced_shards(groups, 2)] == [[0, 1], [2, 3]]
    assert groups[0].distinct_tokens < sum(len(t.tokens) for t in groups[0].trajectories) / 3


def test_shards_that_cannot_be_equal_are_refused() -> None:
    with pytest.raises(ValueError, match="3 groups cannot be divided equally among 2"):
        balanced_shards([group(i, [0]) for i in range(3)], 2)

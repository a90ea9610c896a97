"""The replay buffer: what it keeps, how it draws."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from areal_lite.config import ReplayConfig
from areal_lite.controller.batches import diversity
from areal_lite.controller.buffer import ReplayBuffer, drawn_batch
from areal_lite.run_dir.store import Store
from areal_lite.tools.stored_run import StoredBatches
from areal_lite.trajectory import Group, Trajectory


def trajectory(
    group_id: int,
    sample_index: int,
    prompt: str,
    completion: list[int],
    reward: float,
    version: int = 0,
) -> Trajectory:
    n = len(completion)
    return Trajectory(
        group_id=group_id,
        prompt_id=prompt,
        sample_index=sample_index,
        tokens=np.array([9, 9, *completion], np.int32),
        loss_mask=np.array([False] * 2 + [True] * n),
        behavior_logprobs=np.array([0, 0] + [-0.1] * n, np.float32),
        versions=np.array([-1, -1] + [version] * n, np.int32),
        finish_reason="stop",
        reward=reward,
    ).check()


def group(group_id: int, prompt: str, *members: tuple[int, float]) -> Group:
    """`members` are (the only token of the completion, reward)."""
    trajectories = [
        trajectory(group_id, i, prompt, [token], reward, group_id)
        for i, (token, reward) in enumerate(members)
    ]
    return Group(group_id=group_id, prompt_id=prompt, size=len(members), trajectories=trajectories)


def with_traces(group: Group) -> Group:
    """Give the last episode of a group a second trace, which begins with another prompt."""
    last = group.trajectories[-1]
    group.trajectories.append(replace(last, trace_index=1, tokens=last.tokens + 50))
    return group


def buffer(size: int = 2, seed: int = 1, **config) -> ReplayBuffer:
    return ReplayBuffer(replace(ReplayConfig(capacity=4), **config), size, seed)


def held(replay: ReplayBuffer) -> dict[str, list[int]]:
    return {es[0][0].prompt_id: [int(e[-1].tokens[-1]) for e in es] for es in replay}


def test_it_keeps_the_newest_distinct_trajectories() -> None:
    replay = buffer()
    replay.put(group(0, "a", (1, 0), (2, 0), (1, 1)))
    assert held(replay) == {"a": [2, 1]}
    replay.put(group(1, "a", (2, 0), (3, 0)))
    assert held(replay) == {"a": [1, 2, 3]}
    assert [traces[0].group_id for traces in next(iter(replay))] == [0, 1, 1]
    replay.put(group(2, "a", (4, 0), (5, 0)))
    assert held(replay) == {"a": [2, 3, 4, 5]} and replay.num_trajectories == 4


def test_an_episode_is_held_and_drawn_with_all_of_its_traces() -> None:
    replay = buffer(recency_probability=1.0)
    replay.put(with_traces(group(0, "a", (1, 0), (2, 1))))
    replay.put(group(1, "a", (2, 1)))  # the first trace alone is another episode
    assert [len(traces) for traces in next(iter(replay))] == [1, 2, 1]
    assert replay.num_trajectories == 4
    drawn = replay.take(1, 0, 1)
    names = [(t.sample_index, t.trace_index) for t in drawn.groups[0].trajectories]
    assert names == [(0, 0), (0, 1), (1, 0)] and drawn.draws == [[(0, 1), (1, 0)]]


def test_prompts_beyond_the_limit_leave_in_the_order_of_their_last_addition(monkeypatch) -> None:
    monkeypatch.setattr("areal_lite.controller.buffer.MAX_PROMPTS", 2)
    replay = buffer()
    for number, prompt in enumerate("abac"):
        replay.put(group(number, prompt, (2 * number, 0), (2 * number + 1, 0)))
    assert list(held(replay)) == ["a", "c"]


def test_it_waits_for_enough_prompts_with_something_to_balance() -> None:
    replay = buffer()
    replay.put(group(0, "a", (1, 0), (2, 0)))
    replay.put(group(1, "b", (1, 0), (1, 0)))
    assert len(replay) == 1 and replay.take(2, 0, 1) is None and replay.take(1, 0, 1) is not None


def test_a_recent_draw_has_the_newest_trajectories_of_the_last_prompts() -> None:
    replay = buffer(recency_probability=1.0)
    for number, prompt in enumerate("abcb"):
        replay.put(group(number, prompt, (2 * number, 0), (2 * number + 1, 0)))
    deal = replay.take(2, 7, 2)
    assert (
        [g.prompt_id for g in deal.groups] == ["b", "c"]
        and len(deal.shards) == 2
        and deal.masked_tokens == 0
    )
    assert [[int(t.tokens[-1]) for t in g.trajectories] for g in deal.groups] == [[6, 7], [4, 5]]
    assert deal.group_ids == [2, 3]
    again = replay.take(2, 8, 1)
    assert again.group_ids == [], "a group is used up once"
    assert [g.group_id for g in deal.groups + again.groups] == [14, 15, 16, 17], (
        "every draw is a group of its own"
    )
    assert all(
        t.group_id == g.group_id and t.sample_index == i
        for g in deal.groups
        for i, t in enumerate(g.trajectories)
    )
    assert next(iter(replay))[0][0].group_id == 0, "what is kept does not change"


def test_a_draw_mixes_groups_and_versions_and_names_no_prompt_twice() -> None:
    replay = buffer(size=4, recency_probability=0.5)
    for number in range(8):
        prompt = "abcd"[number % 4]
        replay.put(group(number, prompt, (2 * number, 0), (2 * number + 1, 1)))
    deal = replay.take(4, 0, 2)
    assert sorted(g.prompt_id for g in deal.groups) == list("abcd")
    assert all(len({t.versions[-1] for t in g.trajectories}) == 2 for g in deal.groups)
    assert deal.group_ids == list(range(8))


def test_forgotten_groups_cost_no_memory() -> None:
    replay = buffer(recency_probability=1.0)
    for number in range(50):
        replay.put(group(number, "a", (2 * number, 0), (2 * number + 1, 0)))
        assert replay.take(1, number, 1).group_ids == [number]
    assert replay._used == {48, 49}


def test_trajectories_are_drawn_by_the_softmax_of_their_rewards() -> None:
    """With K = 1 it is exactly the softmax: chi-squared, 3 degrees of freedom, 99.9 % point."""
    rewards = np.array([0.0, 1.0, 0.5, -1.0])
    replay = buffer(size=1, recency_probability=0.0)
    replay.put(group(0, "a", *enumerate(rewards)))
    draws = 4000
    counts = Counter(
        int(replay.take(1, version, 1).groups[0].trajectories[0].tokens[-1])
        for version in range(draws)
    )
    weights = np.exp(rewards)
    expected = draws * weights / weights.sum()
    assert sum((counts[i] - expected[i]) ** 2 / expected[i] for i in range(4)) < 16.3


def test_how_often_groups_are_recent() -> None:
    replay = buffer(recency_probability=0.3)
    for number in range(100):
        replay.put(group(number, f"p{number}", (1, 0), (2, 0)))
    newest = sum(replay.take(1, version, 1).groups[0].prompt_id == "p99" for version in range(2000))
    expected = 2000 * (0.3 + 0.7 / 100)
    assert abs(newest - expected) < 4 * np.sqrt(expected * (1 - expected / 2000))


def test_drawing_is_a_function_of_seed_version_and_content(tmp_path) -> None:
    """Also when the content comes from the store of a run that has ended."""
    store, replay = Store(tmp_path / "s.sqlite"), buffer(recency_probability=0.5)
    groups = [
        group(number, f"p{number % 3}", (number, number % 2), (100 + number, 0))
        for number in range(9)
    ]
    for g in groups[::2]:
        with_traces(g)
    for g in groups:
        store.admit(g.group_id, g.prompt_id, 0, 1, 2, 0.0)
    for order, number in enumerate([0, 2, 1, 3, 5, 4, 6, 8]):  # number 7 never finishes
        store.finish(
            groups[number],
            [(None, None)] * len(groups[number].trajectories),
            None,
            float(order),
            "filtered" if number == 8 else "finished",
        )
        if number != 8:
            replay.put(groups[number])
    first = replay.take(2, 0, 1)
    store.use(first.group_ids, 0, first.draws)
    stored = StoredBatches(store._path)
    assert [traces[0].group_id for episodes in stored.drawn(0) for traces in episodes] == [
        group_id for members in first.draws for group_id, _ in members
    ]
    rebuilt = buffer(recency_probability=0.5)
    for g, used in store.finished_groups():
        rebuilt.put(g, used)
    assert held(rebuilt) == held(replay) and list(held(rebuilt)) == list(held(replay))
    assert stored.drawn(1) == [], "of a step that drew nothing"
    for version in range(1, 5):
        one, other = replay.take(2, version, 1), rebuilt.take(2, version, 1)
        assert [bytes(f) for f in one.shards[0].to_frames()] == [
            bytes(f) for f in other.shards[0].to_frames()
        ]
        assert one.group_ids == other.group_ids and not set(first.group_ids) & set(one.group_ids)
        store.use(one.group_ids, version, one.draws)
        again = drawn_batch(stored.drawn(version), version, 1)
        assert [bytes(f) for f in one.shards[0].to_frames()] == [
            bytes(f) for f in again.shards[0].to_frames()
        ], "a stored batch is the same bytes"
    assert [g.group_id for g in stored.used_groups(step=0)] == first.group_ids
    store.recover(3, 20.0)
    assert stored.drawn(2) and stored.drawn(3) == [], "a resume forgets the draws of lost steps"
    store.close()


def test_diversity() -> None:
    groups = [group(0, "a", (1, 1), (1, 1), (2, 1), (3, 0)), group(1, "b", (1, 0), (1, 0))]
    assert diversity(g.episodes for g in groups) == {
        "distinct_share": pytest.approx((3 / 4 + 1 / 2) / 2),
        "distinct_correct": 1.0,
    }
    assert diversity([]) == {"distinct_share": 0.0, "distinct_correct": 0.0}

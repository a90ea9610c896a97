"""Trajectories, their invariants, and batches of them."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lite.config import RolloutConfig
from areal_lite.config.fields import settings_of
from areal_lite.routes import is_recorded
from areal_lite.train_batch import TrainBatch
from areal_lite.trajectory import Group, InterruptMode, Segment, Trajectory


def trajectory(
    prompt: int = 3,
    versions: list[int] = (0, 0, 1),
    group_id: int = 1,
    sample_index: int = 0,
    **changes,
) -> Trajectory:
    n = len(versions)
    made = Trajectory(
        group_id=group_id,
        prompt_id=f"p{group_id}",
        sample_index=sample_index,
        tokens=np.arange(prompt + n, dtype=np.int32) + 10 * group_id,
        loss_mask=np.repeat([False, True], [prompt, n]),
        behavior_logprobs=np.concatenate([np.zeros(prompt), -np.arange(1, n + 1) / 8]).astype(
            np.float32
        ),
        versions=np.array([-1] * prompt + list(versions), np.int32),
        finish_reason="stop",
        reward=1.0,
    )
    return replace(made, **changes)


def routes_of(length: int, recorded: int, dtype: type = np.uint8) -> np.ndarray:
    """Routes in 2 layers of top-3, of which the first `recorded` are known."""
    routes = np.arange(6 * length, dtype=dtype).reshape(length, 2, 3)
    routes[recorded:] = np.iinfo(dtype).max
    return routes


trajectories = st.builds(
    lambda prompt, steps, group, sample_index, reason, earned, routed: trajectory(
        prompt,
        list(np.cumsum(steps)),
        group,
        sample_index,
        finish_reason=reason,
        turn_rewards=[earned] * bool(steps) if earned else None,
        routes=routes_of(prompt + len(steps), prompt + len(steps) - 1) if routed else None,
    ),
    st.integers(1, 6),
    st.lists(st.integers(0, 2), max_size=9),
    st.integers(0, 4),
    st.integers(0, 3),
    st.sampled_from(["stop", "length"]),
    st.sampled_from([None, 0.5, -1.0]),
    st.booleans(),
)


def test_the_traces_of_an_episode_stay_together():
    names = [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2), (3, 0)]
    made = [trajectory(sample_index=s, trace_index=t, reward=float(t)) for s, t in names]
    group = Group(group_id=1, prompt_id="p", size=4, trajectories=made)
    assert [len(traces) for traces in group.episodes] == [2, 3, 1]
    assert group.rewards == [0.5, 1.0, 0.0]
    assert [t.name for t in made] == ["1/0", "1/0.1", "1/2", "1/2.1", "1/2.2", "1/3"]
    others = [trajectory(group_id=0, sample_index=2), trajectory(group_id=2, sample_index=0)]
    batch = TrainBatch.from_trajectories([others[1], *made[::-1], others[0]])
    assert batch.episode_ids.tolist() == [4, 3, 2, 2, 2, 1, 1, 0]
    assert batch.trace_indices.tolist() == [0, 0, 2, 1, 0, 1, 0, 0]


def test_segments_are_the_runs_of_one_version():
    assert trajectory(3, [0, 0, 1]).segments == [Segment(0, 3, 5), Segment(1, 5, 6)]
    two_turns = trajectory(1, [2, 2, 2])
    two_turns.loss_mask[2], two_turns.versions[2], two_turns.behavior_logprobs[2] = False, -1, 0.0
    assert two_turns.check().segments == [Segment(2, 1, 2), Segment(2, 3, 4)]


@given(trajectories)
def test_segments_cover_exactly_the_sampled_tokens(t):
    covered = np.full(len(t.tokens), -1)
    for segment in t.check().segments:
        assert (covered[segment.start : segment.end] == -1).all()
        covered[segment.start : segment.end] = segment.version
    np.testing.assert_array_equal(covered, t.versions)
    assert sum(s.end - s.start for s in t.segments) == t.num_sampled


@pytest.mark.parametrize(
    "broken, message",
    [
        ({"versions": np.array([-1, -1, -1, 1, 0, 0])}, "backwards"),
        ({"versions": np.array([-1, -1, -1, 0, 0, -1])}, "no version"),
        ({"versions": np.array([0, -1, -1, 0, 0, 0])}, "not sampled"),
        ({"versions": np.zeros(5)}, "6 tokens but 5 versions"),
        ({"loss_mask": np.ones(6, bool)}, "first token"),
        ({"behavior_logprobs": np.array([0, 0, 0, -1, 0.5, -1], np.float32)}, "above zero"),
        ({"behavior_logprobs": np.array([0, -1, 0, -1, -1, -1], np.float32)}, "not sampled"),
        ({"finish_reason": "done"}, "finish reason 'done'"),
        ({"turn_rewards": [0.5, 0.5]}, r"1 turns but the turn rewards \[0.5, 0.5\]"),
        ({"turn_rewards": [np.nan]}, "the turn rewards"),
        ({"routes": np.zeros((5, 2, 2), np.uint8)}, "6 tokens but routes of uint8"),
        ({"routes": np.zeros((6, 2, 2), np.int32)}, "routes of int32"),
        ({"routes": routes_of(6, recorded=4)}, "before a sampled one has no recorded route"),
    ],
)
def test_a_broken_invariant_is_named(broken, message):
    with pytest.raises(ValueError, match=message):
        replace(trajectory(3, [0, 0, 1]), **broken).check()


def test_a_token_without_a_finite_log_prob_leaves_the_loss_but_not_the_sequence():
    t = trajectory(2, [0, 0, 0])
    t.behavior_logprobs[3] = np.nan
    batch = TrainBatch.from_trajectories([t.check()])
    np.testing.assert_array_equal(batch.loss_mask, [False, False, True, False, True])
    assert np.isfinite(batch.behavior_logprobs).all() and len(batch.tokens) == 5


def test_what_a_turn_earned_stands_at_its_last_token():
    two = trajectory(2, [0, 0, -1, 0, 0], turn_rewards=[0.5, -1.0])
    two.loss_mask[4], two.behavior_logprobs[4] = False, 0.0
    batch = TrainBatch.from_trajectories([trajectory(1, [0]), two.check()])
    assert batch.turn_rewards is not None
    assert batch.turn_rewards.tolist() == [0, 0, 0, 0, 0, 0.5, 0, 0, -1]
    assert TrainBatch.from_trajectories([trajectory()]).turn_rewards is None


@given(st.lists(trajectories, min_size=1, max_size=6))
def test_frames_bring_back_the_same_batch(items):
    batch = TrainBatch.from_trajectories(items)
    back = TrainBatch.from_frames([bytes(frame) for frame in batch.to_frames()])
    for name in TrainBatch.__dataclass_fields__:
        a, b = getattr(batch, name), getattr(back, name)
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None)
        np.testing.assert_array_equal(a, b)


def test_frames_that_are_not_a_batch_are_refused():
    frames = [bytes(f) for f in TrainBatch.from_trajectories([trajectory()]).to_frames()]
    with pytest.raises(ValueError, match="not a batch"):
        TrainBatch.from_frames(frames[:-1])
    with pytest.raises(ValueError, match="not a batch: tokens"):
        TrainBatch.from_frames([frames[0], frames[1][:-4], *frames[2:]])


def test_frames_of_other_dtypes_are_refused():
    t = trajectory(routes=routes_of(6, 5, np.uint16))
    header, *frames = TrainBatch.from_trajectories([t.check()]).to_frames()
    decoded = msgspec.msgpack.decode(header)
    assert decoded[-1] == ["routes", "uint16", [6, 2, 3]]
    for name, dtype in ((-1, "int16"), (-1, "object"), (0, "uint16")):
        changed = [list(row) for row in decoded]
        changed[name][1] = dtype
        with pytest.raises(ValueError, match="not a batch"):
            TrainBatch.from_frames([msgspec.msgpack.encode(changed), *frames])


def test_sequences_without_routes_have_none_in_a_batch_with_some():
    with_routes = trajectory(routes=routes_of(6, 5)).check()
    batch = TrainBatch.from_trajectories([trajectory(2, [0]), with_routes])
    assert is_recorded(batch.routes).tolist() == [False] * 3 + [True] * 5 + [False]
    np.testing.assert_array_equal(batch.routes[3:], with_routes.routes)
    other = trajectory(routes=routes_of(6, 5)[:, :1])
    with pytest.raises(ValueError, match=r"different models: uint8\[1, 3\], uint8\[2, 3\]"):
        TrainBatch.from_trajectories([with_routes, other])


@given(st.lists(trajectories, min_size=1, max_size=6), st.data())
def test_select_takes_whole_sequences(items, data):
    batch = TrainBatch.from_trajectories(items)
    chosen = data.draw(st.lists(st.integers(0, len(items) - 1), min_size=1, max_size=6))
    expected = TrainBatch.from_trajectories([items[i] for i in chosen])
    for name in TrainBatch.__dataclass_fields__:
        got, wanted = getattr(batch.select(chosen), name), getattr(expected, name)
        if name == "routes" and wanted is None and got is not None:
            assert not is_recorded(got).any()
            continue
        if name == "turn_rewards" and wanted is None and got is not None:
            assert not got.any()
            continue
        np.testing.assert_array_equal(got, wanted)


def test_minibatches_are_whole_groups():
    made = [
        trajectory(1 + (3 * g + m) % 4, [0] * (1 + m), g, m) for g in range(6) for m in range(3)
    ]
    batch = TrainBatch.from_trajectories(
        [made[i] for i in np.random.default_rng(1).permutation(18)]
    )
    parts = batch.minibatches(3)
    assert sorted(np.concatenate(parts)) == list(range(18))
    assert [len(set(batch.group_ids[part])) for part in parts] == [2, 2, 2]
    for part in parts:
        spans = [np.arange(batch.cu_seqlens[i], batch.cu_seqlens[i + 1]) for i in part]
        np.testing.assert_array_equal(batch.token_indices(part), np.concatenate(spans))
        np.testing.assert_array_equal(
            batch.tokens[batch.token_indices(part)], batch.select(part).tokens
        )
    with pytest.raises(ValueError, match="6 groups cannot be split into 4"):
        batch.minibatches(4)


def test_the_configuration_offers_every_interrupt_mode():
    # Spelled twice: the configuration imports neither numpy nor msgspec.
    assert settings_of(RolloutConfig)["interrupt"].choices == tuple(InterruptMode)

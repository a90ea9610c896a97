"""Active sampling: what is filtered."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from areal_lite.config import RolloutConfig, TrainConfig
from areal_lite.controller.dispatcher import first_reason, zero_variance
from areal_lite.trajectory import Group, Trajectory


def group(*rewards: float, turns: tuple[list[float], ...] = ()) -> Group:
    return Group(
        group_id=0,
        prompt_id="p",
        size=len(rewards),
        trajectories=[
            Trajectory(
                group_id=0,
                prompt_id="p",
                sample_index=sample_index,
                tokens=np.zeros(2, np.int32),
                loss_mask=np.array([False, True]),
                behavior_logprobs=np.zeros(2, np.float32),
                versions=np.array([-1, 0], np.int32),
                finish_reason="stop",
                reward=reward,
                turn_rewards=turns[sample_index] if turns else None,
            )
            for sample_index, reward in enumerate(rewards)
        ],
    )


@pytest.mark.parametrize(
    "rewards, reason", [((0, 0), "zero_variance"), ((0, 1), None), ((0.5,), "zero_variance")]
)
def test_zero_variance(rewards, reason) -> None:
    assert zero_variance(group(*rewards), of_turns=False) == reason


def test_rewards_of_turns_count_where_they_are_trained_on() -> None:
    """With `algo.advantage.credit=outcome`, a group of one outcome has no signal."""
    some = group(1, 1, turns=([0, 1], [1, 0]))
    assert zero_variance(some, of_turns=True) is None
    assert zero_variance(some, of_turns=False) == "zero_variance"
    equal = group(1, 1, turns=([0, 1], [0, 1]))
    assert zero_variance(equal, of_turns=True) == "zero_variance"


def test_filters_are_asked_in_order() -> None:
    asked = []

    class Workers:
        async def judge(self, name: str, group: Group) -> str | None:
            asked.append(name)
            return "all_right" if all(t.reward == 1 for t in group.trajectories) else None

    def first(filters: list[str], *rewards: float) -> str | None:
        config = TrainConfig(rollout=RolloutConfig(filters=filters))
        source = SimpleNamespace(episodes=Workers())
        return asyncio.run(first_reason(config, group(*rewards), source))

    assert first(["own:right"], 1, 1) == "all_right" and first(["own:right"], 0, 0) is None
    assert first(["own:right", "zero_variance"], 0, 0) == "zero_variance"
    assert len(asked) == 3
    assert first(["zero_variance", "own:right"], 1, 1) == "zero_variance" and len(asked) == 3
    assert first(["zero_variance", "own:right"], 0, 1) is None and len(asked) == 4

"""Active sampling: what is filtered."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from areal_lite.controller.dispatcher import first_reason, zero_variance
from areal_lite.trajectory import Group, Trajectory


def group(*rewards: float) -> Group:
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
            )
            for sample_index, reward in enumerate(rewards)
        ],
    )


@pytest.mark.parametrize(
    "rewards, reason", [((0, 0), "zero_variance"), ((0, 1), None), ((0.5,), "zero_variance")]
)
def test_zero_variance(rewards, reason) -> None:
    assert zero_variance(group(*rewards)) == reason


def test_filters_are_asked_in_order() -> None:
    asked = []

    class Workers:
        async def judge(self, name: str, group: Group) -> str | None:
            asked.append(name)
            return "all_right" if all(t.reward == 1 for t in group.trajectories) else None

    def first(filters: list[str], *rewards: float) -> str | None:
        return asyncio.run(
            first_reason(filters, group(*rewards), SimpleNamespace(episodes=Workers()))
        )

    assert first(["own:right"], 1, 1) == "all_right" and first(["own:right"], 0, 0) is None
    assert first(["own:right", "zero_variance"], 0, 0) == "zero_variance"
    assert len(asked) == 3
    assert first(["zero_variance", "own:right"], 1, 1) == "zero_variance" and len(asked) == 3
    assert first(["zero_variance", "own:right"], 0, 1) is None and len(asked) == 4

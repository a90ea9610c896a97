"""Active sampling: what is filtered."""

import numpy as np
import pytest

from areal_lite.controller.dispatcher import first_reason, load_filters, zero_variance
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


def all_right(group: Group) -> str | None:
    return "all_right" if all(t.reward == 1 for t in group.trajectories) else None


@pytest.mark.parametrize(
    "rewards, reason", [((0, 0), "zero_variance"), ((0, 1), None), ((0.5,), "zero_variance")]
)
def test_zero_variance(rewards, reason) -> None:
    assert zero_variance(group(*rewards)) == reason


def test_filters_are_asked_in_order() -> None:
    filters = load_filters(["tests.unit.controller.test_filters:all_right"])
    assert (
        first_reason(filters, group(1, 1)) == "all_right"
        and first_reason(filters, group(0, 0)) is None
    )
    filters = load_filters(["zero_variance", "tests.unit.controller.test_filters:all_right"])
    assert (
        first_reason(filters, group(1, 1)) == "zero_variance"
        and first_reason(filters, group(0, 1)) is None
    )


@pytest.mark.parametrize(
    "name",
    [
        "tests.unit.controller.test_filters",
        "no.such.module:f",
        "tests.unit.controller.test_filters:nothing",
        ":f",
        "",
        "string:digits",
    ],
)
def test_an_unusable_filter_is_named(name: str) -> None:
    with pytest.raises(ValueError, match="rollout.filters"):
        load_filters(["zero_variance", name])

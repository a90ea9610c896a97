"""Active sampling: what is filtered, which prompts are retired."""

import numpy as np
import pytest

from areal_lite.controller.filters import SolveRates, first_reason, load_filters, zero_variance
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
    filters = load_filters(["tests.unit.controller.test_filters:all_right"], active_sampling=False)
    assert (
        first_reason(filters, group(1, 1)) == "all_right"
        and first_reason(filters, group(0, 0)) is None
    )
    filters = load_filters(["tests.unit.controller.test_filters:all_right"], active_sampling=True)
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
        load_filters([name], active_sampling=True)


def test_a_prompt_is_retired_by_its_last_two_groups() -> None:
    rates = SolveRates(0.75)
    assert not rates.record(7, [1, 1])  # one group may be luck
    assert not rates.record(8, [1, 1])
    assert not rates.record(7, [1, 0])  # 0.75 is not above
    assert not rates.record(7, [1, 1])
    assert rates.record(7, [0.1, 2.0])  # any positive reward is solved


def test_without_a_rate_nothing_is_retired_or_remembered() -> None:
    rates = SolveRates(None)
    assert not any(rates.record(1, [1, 1]) for _ in range(3)) and not rates._rates

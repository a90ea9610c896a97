"""Settings of the buffer under which no batch could be made are refused."""

import pytest

from areal_lite.config import (
    AlgoConfig,
    BufferConfig,
    ReplayConfig,
    SyncConfig,
    TrainConfig,
    TrainerConfig,
)
from areal_lite.config.algo import CorrectionConfig
from areal_lite.config.rules import cautions, check_buffer


def config(every: int, max_staleness: int, steps: int = 100) -> TrainConfig:
    return TrainConfig(
        model="m",
        sync=SyncConfig(every=every),
        buffer=BufferConfig(max_staleness=max_staleness),
        trainer=TrainerConfig(steps=steps),
    )


def test_synchronous_training_with_rare_pushes_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"sync.every=4 .* set it to 3 or more, or sync.every=1"):
        check_buffer(config(4, 2))
    with pytest.raises(ValueError, match=r"buffer.max_staleness=0 .* set it to 1 or more"):
        check_buffer(config(2, 0))


def test_as_many_steps_as_the_bound_allows_are_accepted() -> None:
    check_buffer(config(1, 0))
    check_buffer(config(4, 3))
    # A run that is shorter than the cadence has one push, at its end.
    check_buffer(config(50, 4, steps=5))
    with pytest.raises(ValueError, match="trains 6 steps"):
        check_buffer(config(50, 4, steps=6))


def windowed(window: int, **buffer) -> TrainConfig:
    return TrainConfig(
        model="m",
        buffer=BufferConfig(window=window, **buffer),
        trainer=TrainerConfig(batch_groups=32),
    )


def test_a_window_that_the_bound_has_no_room_for_is_refused() -> None:
    check_buffer(windowed(64, max_staleness=2))
    with pytest.raises(ValueError, match="buffer.window=65 can make a group 3 steps older .* to 3"):
        check_buffer(windowed(65, max_staleness=2))
    config = windowed(64, max_staleness=4)
    config.sync.every = 4
    with pytest.raises(ValueError, match="sync.every=4: set buffer.max_staleness to 5"):
        check_buffer(config)


def test_a_window_does_not_go_with_replay() -> None:
    with pytest.raises(ValueError, match="buffer.window=1 is for batches in order, and replay"):
        check_buffer(windowed(1, replay=ReplayConfig(capacity=20)))


@pytest.mark.parametrize(
    ("algo", "limit"),
    [
        (AlgoConfig(decoupled=False), 2),
        (AlgoConfig(correction=CorrectionConfig(mode="off")), 1),
        (AlgoConfig(loss="reinforce"), 8),
        (AlgoConfig(loss="tb"), None),
        (AlgoConfig(loss="examples.recipes.stale:loss"), None),
    ],
)
def test_what_is_too_stale_depends_on_the_objective(algo: AlgoConfig, limit: int | None) -> None:
    def said(max_staleness: int) -> str:
        buffer = BufferConfig(max_staleness=max_staleness)
        return str(cautions(TrainConfig(model="m", algo=algo, buffer=buffer)))

    if limit is None:
        assert "tolerate" not in said(500)
    else:
        assert "tolerate" not in said(limit)
        assert f"more than the {limit} that " in said(limit + 1)

"""What the plan says about pushes: when they come, and whether generation waits for them."""

import pytest

from areal_lite.config import BufferConfig, ReplayConfig, SyncConfig, TrainConfig
from areal_lite.launch.dry_run import cadence_line


@pytest.mark.parametrize(
    ("every", "buffer", "text"),
    [
        (1, {"max_staleness": 0}, "after every step; generation waits for it"),
        (1, {"max_staleness": 4}, "after every step; generation runs up to 4 steps ahead of it"),
        (4, {"max_staleness": 3}, "after every 4 steps; generation waits for it"),
        (4, {"max_staleness": 8}, "after every 4 steps; generation runs up to 5 steps ahead of it"),
        # The window takes two steps of the bound.
        (
            2,
            {"max_staleness": 4, "window": 64},
            "generation runs up to 1 step ahead of it",
        ),
        (2, {"replay": ReplayConfig(capacity=8)}, "every 2 steps; generation never waits"),
    ],
)
def test_the_cadence(every: int, buffer: dict, text: str) -> None:
    config = TrainConfig(model="m", buffer=BufferConfig(**buffer), sync=SyncConfig(every=every))
    assert text in cadence_line(config)

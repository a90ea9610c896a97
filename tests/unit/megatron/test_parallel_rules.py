"""Layouts that cannot work are refused before anything starts; the error names the rule."""

import pytest

from areal_lite.config import TrainerConfig
from areal_lite.config.rules import check_trainer


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            dict(virtual_pipeline=2),
            "trainer.virtual_pipeline=2 .* set trainer.pipeline_parallel to 2",
        ),
        (
            dict(expert_parallel=2),
            "trainer.expert_parallel=2 does not divide trainer.tensor_parallel=1",
        ),
        (
            dict(expert_parallel=8, data_parallel=2, tensor_parallel=2),
            "trainer.expert_parallel=8 does not divide",
        ),
    ],
)
def test_refused(layout, message):
    with pytest.raises(ValueError, match=message):
        check_trainer(TrainerConfig(**layout))


def test_accepted():
    layout = dict(
        tensor_parallel=2,
        pipeline_parallel=2,
        virtual_pipeline=3,
        context_parallel=2,
        data_parallel=2,
    )
    config = TrainerConfig(**layout, expert_parallel=8)
    check_trainer(config)
    assert config.world_size == 16

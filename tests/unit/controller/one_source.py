"""The data source of a run that has a single one."""

from typing import Any

from areal_lite.config import TrainConfig
from areal_lite.controller.sources import Source


def one_source(config: TrainConfig, prompts: Any, rewards: Any = None) -> dict[str, Source]:
    """Return the source of `prompts`, with the settings of the run."""
    return {"": Source(config=config, prompts=prompts, eval_prompts=None, rewards=rewards)}

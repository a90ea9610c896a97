"""The sources of `data.sources`: each has the settings of the run, with its own on top.

A run without `data.sources` has one source without a name.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from areal_lite.config.commands import TrainConfig
from areal_lite.config.data import DataConfig, RewardConfig
from areal_lite.config.errors import did_you_mean
from areal_lite.config.fields import check_fields, keys_of, setting
from areal_lite.config.rollout import RolloutConfig
from areal_lite.config.servers import ServerConfig

# A name is a part of the names of metrics and of the ids of prompts.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_WEIGHT = 1000


class Sampled(Protocol):
    """The settings of a command that samples completions and scores them: `train`, `eval`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    model: str
    seed: int
    data: DataConfig
    reward: RewardConfig
    server: ServerConfig
    rollout: RolloutConfig


C = TypeVar("C", bound=Sampled)


@dataclass
class SourceConfig(DataConfig):
    """The settings of one source: those of `data`, and what it has of its own."""

    weight: int = setting(1, "Relative frequency of its prompts.", minimum=1, maximum=_MAX_WEIGHT)
    reward: RewardConfig = field(default_factory=RewardConfig)
    workflow: str = setting("", "As rollout.workflow.")
    workflow_args: dict[str, Any] = setting({}, "As rollout.workflow_args.")
    reference: str | None = setting(
        None, "train: as algo.reference, such as a teacher for these prompts."
    )


def source_configs(config: C) -> dict[str, C]:
    """Return by the name of each source the settings of the run, as they are for its prompts.

    Raises ValueError that names the source and the key for settings that cannot be used.
    """
    configs = {}
    for name, own in config.data.sources.items():
        if not _NAME.fullmatch(str(name)):
            raise ValueError(
                f"data.sources.{name}: a name has 1 to 64 letters, digits, dashes and underscores"
            )
        with naming(name):
            source = _source(config, own)
        rollout = replace(
            config.rollout, workflow=source.workflow, workflow_args=source.workflow_args
        )
        configs[name] = replace(config, data=source, reward=source.reward, rollout=rollout)
        if isinstance(config, TrainConfig):
            configs[name].algo = replace(config.algo, reference=source.reference)
    return configs or {"": config}


def reference_folders(config: TrainConfig) -> dict[str, str | None]:
    """Return by the name of each source the checkpoint folder of its reference policy."""
    return {name: own.algo.reference for name, own in source_configs(config).items()}


def weight_of(data: DataConfig) -> int:
    """Return the weight of a source, given its `data` in `source_configs`."""
    return data.weight if isinstance(data, SourceConfig) else 1


def shares(configs: Mapping[str, C]) -> dict[str, float]:
    """Return by name the share of the draws that each source has, of 1."""
    total = sum(weight_of(own.data) for own in configs.values())
    return {name: weight_of(own.data) / total for name, own in configs.items()}


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Put the name of a source in front of a ValueError that its settings cause."""
    try:
        yield
    except ValueError as error:
        if not source:
            raise
        raise ValueError(f"data.sources.{source}: {error}") from error


def _source(config: Sampled, own: Any) -> SourceConfig:
    """Put the settings of a source on those of the run. Raises ValueError."""
    if not isinstance(own, Mapping):
        raise ValueError(f"{own} is not a set of keys and values")
    if "sources" in own:
        raise ValueError("a source has no sources of its own")
    if not isinstance(reward := own.get("reward", {}), Mapping):
        raise ValueError(f"reward={reward}: set its keys, such as reward.function={reward}")
    # The arguments of another source or workflow would not fit.
    data: dict[str, Any] = vars(config.data) | {"sources": {}}
    data |= {"args": {}} if "source" in own else {}
    shared = SourceConfig(
        **data,
        reward=config.reward,
        workflow=config.rollout.workflow,
        workflow_args={} if "workflow" in own else config.rollout.workflow_args,
        reference=config.algo.reference if isinstance(config, TrainConfig) else None,
    )
    try:
        source = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(shared), own))
    except ConfigKeyError as error:
        keys = [key for key in keys_of(SourceConfig) if key != "sources"]
        hint = did_you_mean(str(error.full_key), keys)
        remedy = hint or f"choose one of {', '.join(keys)}"
        raise ValueError(f"unknown key {error.full_key}; {remedy}") from None
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    assert isinstance(source, SourceConfig)
    check_fields(source)
    return source

"""TODO docstring."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_lite.config.commands import TrainConfig
from areal_lite.system.files import write_atomically


def save_config(config: Any, run_dir: Path) -> Path:
    """Write the resolved configuration as <run_dir>/config.yaml, whole or not at all. One that it replaces stays as config-1.yaml, -2, ..."""
    path = Path(run_dir) / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        os.link(
            path, path.with_name(f"config-{1 + len(list(path.parent.glob('config-*.yaml')))}.yaml")
        )
    # Private: it may hold a key.
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.structured(config)), private=True)
    return path


def load_config(run_dir: Path, schema: type = TrainConfig) -> Any:
    """The configuration that `save_config` wrote, as the dataclass it came from. Raises ValueError if it does not fit."""
    path = Path(run_dir) / "config.yaml"
    try:
        return to_dataclass(OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.load(path)))
    except (OSError, OmegaConfBaseException) as error:
        raise ValueError(f"{path}: {error}") from error


def to_dataclass(config: DictConfig) -> Any:
    """A composed configuration as an instance of its dataclass, every interpolation resolved."""
    return OmegaConf.to_object(config)

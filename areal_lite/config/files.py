"""The configuration file of a run, <run_dir>/config.yaml.

The file is complete at any time, and private: it may hold a key.
"""

import os
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from areal_lite.config.commands import TrainConfig
from areal_lite.system.files import write_atomically

CONFIG_FILE = "config.yaml"


def save_config(config: Any, run_dir: Path) -> Path:
    """Write the resolved configuration atomically as <run_dir>/config.yaml and return the path.

    A file that it replaces is kept as config-1.yaml, config-2.yaml, and so on.
    """
    path = Path(run_dir) / CONFIG_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        number = 1 + len(list(path.parent.glob("config-*.yaml")))
        os.link(path, path.with_name(f"config-{number}.yaml"))
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.structured(config)), private=True)
    return path


def load_config(run_dir: Path, schema: type = TrainConfig) -> Any:
    """Read what `save_config` wrote, as an instance of `schema`, without unknown settings.

    Raises ValueError when the file is missing or does not fit the schema.
    """
    stored: Any = OmegaConf.to_container(stored_settings(run_dir))
    try:
        return OmegaConf.to_object(
            OmegaConf.merge(OmegaConf.structured(schema), _known(stored, schema))
        )
    except OmegaConfBaseException as error:
        raise ValueError(f"{Path(run_dir) / CONFIG_FILE}: {error}") from error


def _known(stored: dict[str, Any], section: type) -> dict[str, Any]:
    """Return the settings in `stored` that a section has."""
    kinds = get_type_hints(section)
    return {
        key: _known(value, kinds[key])
        if is_dataclass(kinds[key]) and isinstance(value, dict)
        else value
        for key, value in stored.items()
        if key in kinds
    }


def changed_settings(config: Any, run_dir: Path) -> dict[str, tuple[Any, Any]]:
    """Return by key the values, in `config` and in <run_dir>/config.yaml, that differ.

    Left out is what each start has of its own. Raises ValueError as `stored_settings` does.
    """
    both = OmegaConf.structured(config), stored_settings(run_dir)
    now, before = (flat(OmegaConf.to_container(one, resolve=True)) for one in both)
    keys = sorted((now.keys() | before.keys()) - {"resume", "run_dir", "server.api_key"})
    return {k: (now.get(k), before.get(k)) for k in keys if now.get(k) != before.get(k)}


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Return settings by their full names."""
    if not isinstance(settings, dict) or not settings:
        return {prefix.removesuffix("."): settings}
    return {k: v for key, one in settings.items() for k, v in flat(one, f"{prefix}{key}.").items()}


def stored_settings(run_dir: Path) -> DictConfig:
    """Read <run_dir>/config.yaml, of any command and unchecked. Raises ValueError."""
    path = Path(run_dir) / CONFIG_FILE
    try:
        stored = OmegaConf.load(path)
    except (OSError, YAMLError, UnicodeError, OmegaConfBaseException, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path} cannot be read: {reason}; mend it, or choose another run_dir"
        ) from error
    if not isinstance(stored, DictConfig) or not stored:
        raise ValueError(f"{path} has no settings: mend it, or choose another run_dir")
    return stored

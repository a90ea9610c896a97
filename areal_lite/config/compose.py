"""Composition of a command's settings from its schema, conf/ and the command line, by Hydra."""

from pathlib import Path
from typing import get_origin

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from areal_lite.config.commands import COMMANDS, register
from areal_lite.config.fields import keys_of

# Groups of conf/ from which nothing is chosen by default: `+experiment=NAME`.
ADDED_GROUPS = ("experiment", "task")


def config_dir() -> Path:
    """Return the folder conf/ of a checkout, or its copy inside an installed package."""
    package = Path(__file__).resolve().parents[1]
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


def compose_config(command: str, overrides: list[str]) -> DictConfig:
    """Compose the settings of `command`.

    Raises HydraException or OmegaConfBaseException; `errors.explain` says what they mean.
    """
    schema = register(command)
    # In settings such as server.args users choose the keys. Hydra requires ++ for a new key.
    free = tuple(
        f"{key}." for key, kind in keys_of(COMMANDS[command]).items() if get_origin(kind) is dict
    )
    marked = [
        f"++{override}" if f"{override.partition('=')[0]}.".startswith(free) else override
        for override in overrides
    ]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        composed = compose(command, marked)
    # Hydra accepts any +key=value. This refuses a key that the schema does not have.
    OmegaConf.merge(schema, OmegaConf.to_container(composed))
    return composed

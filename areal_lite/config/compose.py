"""Composition of a command's settings from its schema, conf/ and the command line, by Hydra."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_origin

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from areal_lite.config.commands import find_command
from areal_lite.config.fields import keys_of

# Groups of conf/ from which nothing is chosen by default: `+experiment=NAME`.
ADDED_GROUPS = ("experiment", "task")


def config_dir() -> Path:
    """Return the folder conf/ of a checkout, or its copy inside an installed package."""
    package = Path(__file__).resolve().parents[1]
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


@cache
def register(command: str) -> DictConfig:
    """Register the schema of `command` with Hydra, once per process, and return it.

    conf/COMMAND.yaml, if there is one, extends it under the name COMMAND_schema. Hydra copies every
    registered schema at each composition, so only what is used is registered. The resolver
    `${token:}` makes a random key.
    """
    OmegaConf.register_new_resolver(
        "token", lambda: secrets.token_hex(16), use_cache=True, replace=True
    )
    schema = OmegaConf.structured(find_command(command).schema)
    extended = (config_dir() / f"{command}.yaml").exists()
    ConfigStore.instance().store(name=f"{command}_schema" if extended else command, node=schema)
    return schema


def compose_config(command: str, overrides: list[str]) -> DictConfig:
    """Compose the settings of `command`.

    Raises HydraException or OmegaConfBaseException; `errors.explain` says what they mean.
    """
    schema = register(command)
    # In settings such as server.args users choose the keys. Hydra requires ++ for a new key.
    keys = keys_of(find_command(command).schema)
    free = tuple(f"{key}." for key, kind in keys.items() if get_origin(kind) is dict)
    marked = [
        f"++{override}" if f"{override.partition('=')[0]}.".startswith(free) else override
        for override in overrides
    ]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        composed = compose(command, marked)
    # Hydra accepts any +key=value. This refuses a key that the schema does not have.
    OmegaConf.merge(schema, OmegaConf.to_container(composed))
    return composed


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Write settings as overrides: `{"trainer": {"steps": 5}}` as `trainer.steps=5`.

    A key may have sections in it (`"trainer.steps"`), and a value may name a file of conf/
    (`"schedule": "sync"`), as on the command line.
    """

    def walk(node: Mapping[str, Any], prefix: str) -> Iterator[str]:
        for key, value in node.items():
            if isinstance(value, Mapping):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}={_text_of(value)}"

    return list(walk(settings, ""))


def _text_of(value: Any) -> str:
    """Write a value in Hydra's grammar of overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_text_of(item)}' for key, item in value.items())}}}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_text_of, value))}]"
    return QuotedString(str(value), Quote.single).with_quotes()

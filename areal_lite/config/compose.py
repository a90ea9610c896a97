"""Composition of a command's settings from its schema, conf/ and the command line, by Hydra.

Hydra's errors take several lines and use its own terms. `explain` turns them into one line that
names the key or the option that was probably meant.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, cast, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from areal_lite.config.commands import COMMANDS, register

# Groups of conf/ from which nothing is chosen by default: `+experiment=NAME`.
ADDED_GROUPS = ("experiment", "task")
_UNKNOWN_KEY = re.compile(
    r"Key '([^']+)' (?:is not in struct|not in '[^']+').*?full_key: (\S+)", re.S
)
_UNKNOWN_OPTION = re.compile(
    r"Could not find '([^/']+)/([^']+)'.*Available options in '\1': (.+?)"
    r"(?: Config search path|$)"
)
_NO_VALUE = re.compile(r"Error parsing override '(?:\+\+)?(.+)' missing EQUAL")
_BAD_VALUE = re.compile(r"Error merging override (?:\+\+)?(.+?) (?=Value |Cannot |Invalid )")
# What Hydra adds to its messages, and the mark that `_marked` puts before an override.
_NOISE = re.compile(
    r" full_key: \S+| object_type=\S+| reference_type=\S+| See https://hydra\S+(?: for details)?"
    r"|(?<=override ')\+\+"
)


def config_dir() -> Path:
    """Return the folder conf/ of a checkout, or its copy inside an installed package."""
    package = Path(__file__).resolve().parents[1]
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


def compose_config(command: str, overrides: list[str]) -> DictConfig:
    """Compose the settings of `command`. Raises an error of Hydra or OmegaConf; see `explain`."""
    register()
    schema = COMMANDS[command]
    free = [key for key, kind in _keys(schema).items() if get_origin(kind) is dict]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        composed = compose(command, [_marked(override, free) for override in overrides])
    # Hydra accepts any +key=value. This refuses a key that the schema does not have.
    OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.to_container(composed))
    return composed


def _marked(override: str, free: list[str]) -> str:
    """Mark an override with ++, as Hydra requires for a new key, inside the `free` settings.

    In these settings, such as server.args, users choose the keys.
    """
    key = override.partition("=")[0]
    is_free = any(f"{key}.".startswith(f"{setting}.") for setting in free)
    return f"++{override}" if is_free else override


def _keys(schema: type, prefix: str = "") -> dict[str, Any]:
    """Return the type of every key of a schema, those of sections included."""
    found = {}
    for name, kind in get_type_hints(schema).items():
        found[f"{prefix}{name}"] = kind
        if is_dataclass(kind):
            found |= _keys(cast(type, kind), f"{prefix}{name}.")
    return found


def explain(error: Exception, command: str) -> str:
    """Say in one line what is wrong with an override, given the error of Hydra or OmegaConf."""
    text = " ".join(str(error).split())
    cause = " ".join(str(error.__cause__).split()) if error.__cause__ else ""
    if unknown := _UNKNOWN_KEY.search(f"{text} {cause}"):
        key = unknown.group(2)
        keys = [*_keys(COMMANDS[command]), *(f"+{group}" for group in ADDED_GROUPS)]
        hint = did_you_mean(key, keys) or f"`areal-lite {command} --help` lists all settings"
        return f"unknown key {key}; {hint}"
    if unknown := _UNKNOWN_OPTION.search(text):
        group, name, options = unknown.group(1), unknown.group(2), unknown.group(3).split()
        hint = did_you_mean(name, options)
        return f"unknown {group}={name}; {f'{hint} ' if hint else ''}there are {', '.join(options)}"
    if lacking := _NO_VALUE.search(text):
        return f"{lacking.group(1)} has no value: write {lacking.group(1)}=…"
    return _NOISE.sub("", _BAD_VALUE.sub(r"\1: ", f"{text} {cause}").strip())


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question that names the most similar of the `known` words, or an empty string."""
    near = difflib.get_close_matches(word, list(known), 1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else ""

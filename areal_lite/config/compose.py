"""Composition of a command's configuration from conf/ and the command line."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from areal_lite.config.commands import COMMANDS, register

# Groups of conf/ from which nothing is chosen by default.
ADDED_GROUPS = ("experiment", "task")


def config_dir() -> Path:
    """conf/ of a checkout, or the copy inside an installed package."""
    package = Path(__file__).resolve().parents[1]
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


def compose_config(command: str, overrides: list[str]) -> Any:
    register()
    free = [key for key, kind in _keys(command).items() if kind is dict]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        composed = compose(command, [_as_new(override, free) for override in overrides])
    # Hydra takes any +key=value, and what no field is for would be ignored.
    OmegaConf.merge(OmegaConf.structured(COMMANDS[command]), OmegaConf.to_container(composed))
    return composed


def _as_new(override: str, free: list[str]) -> str:
    """Hydra wants a mark at a key that is not there yet; in the settings `free` any key may be new."""
    key = override.partition("=")[0]
    return (
        f"++{override}"
        if any(f"{key}.".startswith(f"{setting}.") for setting in free)
        else override
    )


def explain(error: Exception, command: str) -> str:
    """Hydra's errors are several lines and their cause: keep what a user needs, and name the key that was probably meant."""
    text = " ".join(str(error).split())
    cause = error.__cause__
    unknown = re.search(
        r"Key '([^']+)' (?:is not in struct|not in '[^']+').*?full_key: (\S+)",
        f"{text} {cause or ''}",
        re.S,
    )
    if unknown:
        key = unknown.group(2)
        near = difflib.get_close_matches(
            key, [*_keys(command), *(f"+{group}" for group in ADDED_GROUPS)], 1, cutoff=0.5
        )
        return f"unknown key {key}" + (
            f"; did you mean {near[0]}?"
            if near
            else f"; `areal-lite {command} --help` lists all settings"
        )
    if lost := re.search(
        r"Could not find '([^/']+)/([^']+)'.*Available options in '\1': (.+?)(?: Config search path|$)",
        text,
    ):
        group, name, options = lost.group(1), lost.group(2), lost.group(3).split()
        near = difflib.get_close_matches(name, options, 1, cutoff=0.5)
        return (
            f"unknown {group}={name}; "
            + (f"did you mean {near[0]}? " if near else "")
            + f"there are {', '.join(options)}"
        )
    detail = " ".join(str(cause).split()) if cause else ""
    return re.sub(
        r" full_key: \S+| object_type=\S+| reference_type=\S+|(?<=override )\+\+|(?<=override ')\+\+",
        "",
        f"{text} {detail}".strip(),
    )


def _keys(command: str) -> dict[str, type | None]:
    """Every key of its settings, with the type of those that are no single values: a dataclass, or dict where all keys are the user's own."""

    def walk(node: Any, prefix: str) -> dict[str, type | None]:
        found: dict[str, type | None] = {}
        for key in node:
            child = (
                None
                if OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key)
                else node[key]
            )
            found[f"{prefix}{key}"] = (
                OmegaConf.get_type(child) if OmegaConf.is_dict(child) else None
            )
            found |= walk(child, f"{prefix}{key}.") if OmegaConf.is_dict(child) else {}
        return found

    return walk(OmegaConf.structured(COMMANDS[command]), "")

"""Arguments as people type them, turned into overrides.

    areal-lite audit runs/a --tokens         is  areal-lite audit run_dir=runs/a tokens=true
    areal-lite report runs/a runs/b          is  areal-lite report runs=[runs/a,runs/b]

A word without `=` is a folder, for commands with `words`: a run, or for `chat` also a model.
`--NAME` is `NAME=true`, for every setting of a command that is true or false.
"""

import re
from pathlib import Path

from areal_lite.config.commands import find_command
from areal_lite.config.fields import keys_of


def switches(command: str) -> dict[str, str]:
    """Return by option, such as `--follow`, the override that it stands for."""
    keys = keys_of(find_command(command).schema)
    names = [key for key, kind in keys.items() if kind is bool and "." not in key]
    return {f"--{name.replace('_', '-')}": f"{name}=true" for name in names}


def overrides_of(command: str, args: list[str]) -> list[str]:
    """Return the overrides for arguments without options.

    Raises ValueError for more plain words than the command takes.
    """
    found = find_command(command)
    if found.words is None:
        return args  # Hydra says what is wrong with a word
    # `~key` is Hydra's way to remove a key.
    words = [arg for arg in args if "=" not in arg and not arg.startswith("~")]
    overrides = [arg for arg in args if arg not in words]
    key, _ = found.words
    if not words:
        return overrides
    if keys_of(found.schema)[key] == list[str]:
        return [f"{key}=[{','.join(map(quoted, words))}]", *overrides]
    if len(words) > 1:
        raise ValueError(f"areal-lite {command} takes one folder, not {len(words)}: {words[1]}")
    if key == "model" and not (Path(words[0]) / "config.json").is_file():
        key = "run_dir"
    return [f"{key}={quoted(words[0])}", *overrides]


def quoted(text: str) -> str:
    """Quote text for Hydra's grammar, whatever its characters are.

    Only backslashes in front of a quote, or at the end, mean something else there.
    """
    doubled = re.sub(r"(\\+)(?='|$)", r"\1\1", text)
    return "'" + doubled.replace("'", r"\'") + "'"

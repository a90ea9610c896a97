"""The settings as text, for `--help` and for docs/configuration.md (docs/configuration_page.py).

Both come from the metadata of the fields (fields.py) and the values that conf/ composes.
"""

import json
import shutil
import textwrap
import types
from typing import Any, NamedTuple, TextIO, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING, DictConfig, OmegaConf

from areal_lite.config.command_line import ADDED_GROUPS, config_dir
from areal_lite.config.commands import find_command
from areal_lite.config.fields import Setting, number, sections, settings_of

_COLUMNS = 100
_HELP_COLUMN = 40
_TYPES = {int: "integer", float: "number", str: "text", bool: "true or false"}
# Allowed values that the help leaves out, unless the value is null: the value shows its type.
_OBVIOUS = (*_TYPES.values(), "list", "keys and values")


class Row(NamedTuple):
    """One setting. `value` is what it has unless it is overridden, as one would write it."""

    key: str
    value: str
    allowed: str
    help: str


def rows_of(prefix: str, section: type, composed: DictConfig) -> list[Row]:
    """Return the settings of a section, without its sub-sections."""
    node = OmegaConf.select(composed, prefix[:-1]) if prefix else composed
    values: Any = OmegaConf.to_container(node, resolve=False)
    hints = get_type_hints(section)
    return [
        Row(f"{prefix}{name}", _written(values[name]), _allowed(about, hints[name]), about.help)
        for name, about in settings_of(section).items()
    ]


def about_section(section: type) -> str:
    """Return the first line of the docstring of a section."""
    return (section.__doc__ or "").partition("\n")[0]


def _written(value: Any) -> str:
    """Write a value as in an override."""
    if isinstance(value, str):
        return "(required)" if value == MISSING else value
    return json.dumps(value, ensure_ascii=False).replace('"', "")


def _allowed(setting: Setting, hint: Any) -> str:
    """Name the allowed values: the choices, or the type with its bounds."""
    if setting.choices:
        own = ("module:name",) if setting.importable else ()
        return ", ".join((*setting.choices, *own))
    if nullable := get_origin(hint) in (Union, types.UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    text = _TYPES.get(hint) or ("list" if get_origin(hint) is list else "keys and values")
    if setting.within:
        least, most = map(number, setting.within)
        text += f" >= {least} and <= {most}"
    return text + (" or null" if nullable else "")


def groups() -> dict[str, list[str]]:
    """Return the sets of settings in conf/: how a group is written, and the names of its sets."""
    folders = sorted(path for path in config_dir().iterdir() if path.is_dir())
    return {
        f"{'+' if folder.name in ADDED_GROUPS else ''}{folder.name}": sorted(
            file.stem for file in folder.glob("*.yaml")
        )
        for folder in folders
    }


def groups_text() -> str:
    """Return the sets of settings for a terminal of 100 columns."""
    rows = ((f"  {group + '=':<14}", ", ".join(names)) for group, names in groups().items())
    indent = " " * 16
    return "\n".join(
        textwrap.fill(text, _COLUMNS, initial_indent=first, subsequent_indent=indent)
        for first, text in rows
    )


def help_text(command: str, composed: DictConfig) -> str:
    """Return the settings of a command, by section, for a terminal of 100 columns."""
    parts = []
    for prefix, section in sections(find_command(command).schema):
        if rows := rows_of(prefix, section, composed):
            heading = f"{prefix[:-1]}: {about_section(section)}" if prefix else "general:"
            parts.append("\n".join([heading, *map(_help_row, rows)]))
    return "\n\n".join(parts)


def show(text: str, indent: int, stream: TextIO) -> None:
    """Print text; for a terminal, break its lines between words and indent what follows."""
    if stream.isatty():
        wrapper = textwrap.TextWrapper(shutil.get_terminal_size().columns)
        wrapper.subsequent_indent = " " * indent
        wrapper.break_long_words = wrapper.break_on_hyphens = False
        text = "\n".join(map(wrapper.fill, text.splitlines()))
    print(text, file=stream)


def _help_row(row: Row) -> str:
    """Lay out `key=value` on the left and the help on the right, or below a long key."""
    left = f"  {row.key}" + ("" if row.value == "(required)" else f"={row.value}")
    gap = "\n" + " " * _HELP_COLUMN
    first = f"{left:<{_HELP_COLUMN}}" if len(left) < _HELP_COLUMN else left + gap
    tag = "" if row.allowed in _OBVIOUS and row.value != "null" else f" [{row.allowed}]"
    return first + gap.join(textwrap.wrap(row.help + tag, _COLUMNS - _HELP_COLUMN))

"""The settings as text: for `--help`, and for docs/configuration.md.

    python -m areal_lite.config.reference > docs/configuration.md

Both come from the metadata of the fields (fields.py) and the values that conf/ composes.
"""

from __future__ import annotations

import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from omegaconf import MISSING, DictConfig, OmegaConf

from areal_lite.config.commands import COMMANDS
from areal_lite.config.compose import ADDED_GROUPS, compose_config, config_dir
from areal_lite.config.fields import Setting, settings_of

_COLUMNS = 100
_HELP_COLUMN = 40
_TYPES = {int: "integer", float: "number", str: "text", bool: "true or false"}
# Allowed values that the help leaves out, unless the value is null: the value shows its type.
_OBVIOUS = (*_TYPES.values(), "list", "keys and values")
# Stands for a space while text is wrapped.
_GLUE = "\0"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting. `value` is what it has unless it is overridden, as one would write it."""

    key: str
    value: str
    allowed: str
    help: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """The settings under `key` (empty for those of the command itself), without sub-sections."""

    schema: type
    key: str
    about: str
    rows: list[Row]


def sections(schema: type, values: Mapping[str, Any], key: str = "") -> Iterator[Section]:
    """Yield the section of `schema` and, depth first, its sub-sections, with composed `values`."""
    hints = get_type_hints(schema)
    prefix = f"{key}." if key else ""
    rows = [
        Row(
            key=f"{prefix}{name}",
            value=_written(values[name]),
            allowed=_allowed(setting, hints[name]),
            help=setting.help,
        )
        for name, setting in settings_of(schema).items()
    ]
    about = (schema.__doc__ or "").partition("\n")[0]
    yield Section(schema=schema, key=key, about=about, rows=rows)
    for item in fields(schema):
        if is_dataclass(hint := hints[item.name]):
            assert isinstance(hint, type)
            yield from sections(hint, values[item.name], f"{prefix}{item.name}")


def _written(value: Any) -> str:
    """Write a value as in an override."""
    if value == MISSING:
        return "(required)"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_written(item)}" for key, item in value.items()) + "}"
    return str(value)


def _allowed(setting: Setting, hint: Any) -> str:
    """Name the allowed values: the choices, or the type with its bounds."""
    if setting.choices:
        own = ("module:name",) if setting.importable else ()
        return ", ".join((*setting.choices, *own))
    nullable = get_origin(hint) in (Union, types.UnionType)
    if nullable:
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    text = _TYPES.get(hint) or ("list" if get_origin(hint) is list else "keys and values")
    bounds = {">=": setting.minimum, ">": setting.above, "<=": setting.maximum, "<": setting.below}
    limits = [f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None]
    return " ".join([text, " and ".join(limits)]).strip() + (" or null" if nullable else "")


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
    return "\n".join(
        textwrap.fill(
            ", ".join(names),
            _COLUMNS,
            initial_indent=f"  {group + '=':<14}",
            subsequent_indent=" " * 16,
        )
        for group, names in groups().items()
    )


def help_text(command: str, composed: DictConfig) -> str:
    """Return the settings of a command, by section, for a terminal of 100 columns."""
    return "\n\n".join(
        "\n".join([_heading(section), *map(_help_row, section.rows)])
        for section in sections(COMMANDS[command], _values(composed))
        if section.rows
    )


def _values(composed: DictConfig) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(composed, resolve=False))


def _heading(section: Section) -> str:
    return f"{section.key}: {section.about}" if section.key else "general:"


def _help_row(row: Row) -> str:
    """Lay out `key=value` on the left and the help on the right, or below a long key."""
    left = f"  {row.key}" + ("" if row.value == "(required)" else f"={row.value}")
    gap = "\n" + " " * _HELP_COLUMN
    first = f"{left:<{_HELP_COLUMN}}" if len(left) < _HELP_COLUMN else left + gap
    tag = "" if row.allowed in _OBVIOUS and row.value != "null" else f" [{row.allowed}]"
    # A tag stays on one line: its spaces are replaced while the text is wrapped.
    text = row.help + " " * bool(tag) + tag.strip().replace(" ", _GLUE)
    return first + gap.join(textwrap.wrap(text, _COLUMNS - _HELP_COLUMN)).replace(_GLUE, " ")


_PAGE = """\
# Configuration

Every setting. This page is made from the code: `python -m areal_lite.config.reference`. The
defaults are those of the command that a table is under; `areal-lite COMMAND --help` shows those of
every command. `quickstart` has the settings of `train`, and those of `make-model` and `sft` as
`make_model.KEY` and `sft.KEY`. `prepare` has the settings of `train`.

```
areal-lite train model=models/Qwen3-0.6B rollout.group_size=16 schedule=sync +task=gsm8k
```

| sets of settings | |
|---|---|
{groups}
"""
_PAGE_COMMANDS = ("train", "slurm", "make-model", "sft", "eval", "generate")


def page() -> str:
    """Return the page docs/configuration.md. Each section has one table, where it comes first."""
    rows = [f"| `{group}=` | {_codes(names)} |" for group, names in groups().items()]
    text = _PAGE.format(groups="\n".join(rows))
    shown: list[type] = []
    for command in _PAGE_COMMANDS:
        schema, shared = COMMANDS[command], []
        extends = issubclass(schema, tuple(shown))
        text += f"\n## areal-lite {command}\n"
        for section in sections(schema, _values(compose_config(command, []))):
            if section.schema is schema and extends:
                text += f"\n{section.about}\n"
            elif section.schema not in shown:
                text += _table(section)
                shown.append(section.schema)
            elif "." not in section.key:
                shared.append(section.key)
        if shared and not extends:
            text += f"\nAlso {_codes(shared)}, as above.\n"
    return text


def _table(section: Section) -> str:
    heading = f"\n### {section.key}\n" if section.key else ""
    rows = [
        f"| `{row.key}` | `{row.value}` | {_cell(row.allowed)} | {_cell(row.help)} |"
        for row in section.rows
    ]
    top = ["| key | default | values | meaning |", "|---|---|---|---|"]
    return f"{heading}\n{section.about}\n\n" + "\n".join(top + rows) + "\n"


def _codes(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(text: str) -> str:
    """Escape what Markdown would not show as it is."""
    return re.sub(r"([|<*])", r"\\\1", text)


if __name__ == "__main__":
    print(page(), end="")

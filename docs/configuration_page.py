"""The page of all settings: `python docs/configuration_page.py > docs/configuration.md`."""

import re

from omegaconf import DictConfig

from areal_lite.config.command_line import compose_config
from areal_lite.config.commands import command_names, find_command
from areal_lite.config.fields import sections
from areal_lite.config.help import about_section, groups, rows_of

_PAGE = """\
# Configuration

Every setting. This page is made from the code: `python docs/configuration_page.py`. The
defaults are those of the command that a table is under; `areal-lite COMMAND --help` shows the
defaults of every command.

```
areal-lite train model=models/Qwen3-0.6B rollout.group_size=16 schedule=sync +task=gsm8k
```

| sets of settings | |
|---|---|
{groups}
"""


def page() -> str:
    """Return the page docs/configuration.md. Each section has one table, where it comes first."""
    rows = [f"| `{group}=` | {_codes(names)} |" for group, names in groups().items()]
    text = _PAGE.format(groups="\n".join(rows))
    shown: list[type] = []
    for command in command_names():
        schema, shared = find_command(command).schema, []
        composed = compose_config(command, [])
        extends = issubclass(schema, tuple(shown))
        text += f"\n## areal-lite {command}\n"
        for prefix, section in sections(schema):
            if section is schema and extends:
                text += f"\n{about_section(section)}\n"
            elif section not in shown:
                text += _table(prefix, section, composed)
                shown.append(section)
            elif prefix.count(".") == 1:
                shared.append(prefix[:-1])
        if shared and not extends:
            text += f"\nAlso {_codes(shared)}, as above.\n"
    return text


def _table(prefix: str, section: type, composed: DictConfig) -> str:
    heading = f"\n### {prefix[:-1]}\n" if prefix else ""
    rows = [
        f"| `{row.key}` | `{row.value}` | {table_cell(row.allowed)} | {table_cell(row.help)} |"
        for row in rows_of(prefix, section, composed)
    ]
    top = ["| key | default | values | meaning |", "|---|---|---|---|"]
    return f"{heading}\n{about_section(section)}\n\n" + "\n".join(top + rows) + "\n"


def _codes(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def table_cell(text: str) -> str:
    """Escape the characters that a cell of a Markdown table would not show as they are."""
    return re.sub(r"([|<*])", r"\\\1", text)


if __name__ == "__main__":
    print(page(), end="")

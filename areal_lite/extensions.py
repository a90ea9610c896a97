"""What plugs into the core: entry points of installed packages, loaded when they are first needed.

The core names a group and an entry, never a module, so it runs without `areal_lite.cpu` and
`areal_lite.tools`. Another package can add entries of its own.
"""

from functools import cache
from importlib.metadata import entry_points
from typing import Any

COMMANDS = "areal_lite.commands"
"""Commands of `areal-lite`, besides those of the core."""


@cache
def names(group: str) -> list[str]:
    """List the entries of a group, sorted by name."""
    return sorted(entry.name for entry in entry_points(group=group))


@cache
def load(group: str, name: str) -> Any:
    """Import an entry and return its object; None if no installed package has it."""
    found = [entry for entry in entry_points(group=group) if entry.name == name]
    return found[0].load() if found else None

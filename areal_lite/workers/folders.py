"""Removal of folders that untrusted programs filled."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

log = logging.getLogger(__name__)


def remove_folder(folder: Path) -> None:
    """Remove a folder of any depth with all its content, without following links.

    Folders inside are moved to the top before they are emptied: no path gets long, and nothing
    recurs. What cannot be removed is logged and stays.
    """
    unused = secrets.token_hex(8)
    names = (f".{unused}-{number}" for number in count())
    emptied = True
    while emptied:
        emptied = False
        for entry in _entries(folder):
            with suppress(OSError):
                if _is_folder(entry):
                    _hoist(entry, folder, names)
                    os.rmdir(entry)
                else:
                    os.unlink(entry)
                emptied = True
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("cannot remove %s: %s", folder, error)


def _hoist(folder: Path, top: Path, names: Iterator[str]) -> None:
    """Empty `folder`: remove its files, and move its folders to `top`."""
    for entry in _entries(folder):
        with suppress(OSError):
            if _is_folder(entry):
                os.chmod(entry, stat.S_IRWXU)  # a folder that moves is written
                os.rename(entry, top / next(names))
            else:
                os.unlink(entry)


def _entries(folder: Path) -> list[Path]:
    try:
        os.chmod(folder, stat.S_IRWXU)
        return [folder / name for name in os.listdir(folder)]
    except OSError:
        return []


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)

"""Removal of folders that untrusted programs filled."""

import logging
import os
import secrets
import stat
from contextlib import suppress
from itertools import count
from pathlib import Path

log = logging.getLogger(__name__)


def remove_folder(folder: Path) -> None:
    """Remove a folder of any depth with all its content, without following links.

    What folders inside have is moved to the top first: no path gets long, and nothing recurs.
    What cannot be removed is logged and stays.
    """
    unused = secrets.token_hex(8)
    names = (f".{unused}-{number}" for number in count())
    again = True
    while again:
        again = False
        for entry in _entries(folder):
            with suppress(OSError):
                if _is_folder(entry):
                    for inner in _entries(entry):
                        with suppress(OSError):
                            if _is_folder(inner):
                                os.chmod(inner, stat.S_IRWXU)  # a folder that moves is written
                            os.rename(inner, folder / next(names))
                            again = True
                    os.rmdir(entry)
                else:
                    os.unlink(entry)
                again = True
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("cannot remove %s: %s", folder, error)


def _entries(folder: Path) -> list[Path]:
    try:
        os.chmod(folder, stat.S_IRWXU)
        return [folder / name for name in os.listdir(folder)]
    except OSError:
        return []


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)

"""The files of a run that travel between machines without a common file system, and the messages.

A `Call` names a method of the hub (hub.py), and its `Reply` has the result, or an error. A client
that hears nothing asks again, and the hub does a repeated call once. Connections are encrypted
(CurveZMQ) by a key that all machines of the run share in the environment: the hub hears nothing of
clients without it.

*State* is small and passes: addresses of processes, the request to stop, the end. *Records* are
what a trainer writes and a later one continues from: metrics, checkpoints.
"""

import hashlib
import os
import stat
import zlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from areal_lite.run_dir import paths

ENV_KEY = "AREAL_LITE_KEY"
CHUNK = 4 << 20  # bytes of a file in one message
MODEL = "model:"
"""Begins the names of the model's files."""
IDENTITY = "shared_as"
"""The file with a random name of the run: a folder that has another is of another run."""

_SHORTEST_KEY = 16
_STATE = {
    paths.CONFIG_FILE,
    paths.CONTROLLER_FILE,
    paths.CONTROLLER_STATUS_FILE,
    paths.TOTALS_FILE,
    paths.STOP_FILE,
}
# Each of these folders and files belongs to a single machine.
_STAY = {
    paths.EXPORTS_DIR,
    paths.HEARTBEATS_DIR,
    paths.LOGS_DIR,
    paths.WEIGHTS_DIR,
    paths.TRAINER_FILE,
    paths.LOCK_FILE,
    paths.CONTROLLER_LOCK_FILE,
    IDENTITY,
}
_DATABASE = ".sqlite"
_UNFINISHED = (".tmp", ".partial", ".old")  # of names that begin with a dot (system/files.py)


class Stamp(msgspec.Struct, frozen=True):
    """The identity of a file's content. A file that only grows keeps its `inode`."""

    size: int  # bytes
    changed_ns: int
    inode: int


Files = dict[str, Stamp]
"""Files by their names in the run directory, with / between folders."""


class Part(StrEnum):
    """A part of a run whose files a machine may list."""

    STATE = "state"
    RECORDS = "records"
    MODEL = "model"


class Call(msgspec.Struct):
    """A call of a method of the hub. `client` is a random name."""

    client: bytes
    number: int
    method: str
    arguments: list[Any]


class Reply(msgspec.Struct):
    """The result of a call; if it could not be done, `error` says why."""

    value: Any = None
    error: str = ""


def key_pair() -> tuple[bytes, bytes]:
    """Return the hub's public and secret key, made from the key in the environment.

    Raises ValueError without one.
    """
    shared = os.environ.get(ENV_KEY, "")
    if len(shared) < _SHORTEST_KEY:
        raise ValueError(
            f"{ENV_KEY}: set it to the same random text of at least {_SHORTEST_KEY} characters on "
            "every machine of the run, such as the output of `openssl rand -hex 32`"
        )
    secret = z85.encode(hashlib.sha256(shared.encode()).digest())
    return zmq.curve_public(secret), secret


def port(text: str) -> int:
    """Read the number of a port, of which ZeroMQ uses only 16 bits. Raises ValueError."""
    if 0 < (number := int(text)) < 1 << 16:
        return number
    raise ValueError(text)


def files_of(folder: Path, part: Part) -> Files:
    """Return the files of a run directory that are its state, or its records."""
    return {
        path.relative_to(folder).as_posix(): found
        for path in (_records(folder) if part == Part.RECORDS else _state(folder))
        if (found := stamp(path))
    }


def _state(folder: Path) -> list[Path]:
    return [folder / name for name in _STATE] + list((folder / paths.SERVERS_DIR).glob("[!.]*"))


def _records(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        here = Path(place)
        folders[:] = [name for name in folders if is_record((here / name).relative_to(folder))]
        yield from (here / name for name in names if is_record((here / name).relative_to(folder)))


def is_state(name: Path) -> bool:
    """Return whether the file `name` of a run directory is state."""
    return str(name) in _STATE or (len(name.parts) == 2 and name.parts[0] == paths.SERVERS_DIR)


def is_record(name: Path) -> bool:
    """Return whether the file `name` of a run directory is, or the folder may hold, a record."""
    elsewhere = str(name) in _STATE | {paths.SERVERS_DIR} or name.parts[0] in _STAY
    return not elsewhere and _DATABASE not in name.name and not is_unfinished(name.name)


def is_unfinished(name: str) -> bool:
    """Return whether something is being written under this name, or removed."""
    return name.startswith(".") and name.endswith(_UNFINISHED)


def stamp(path: Path) -> Stamp | None:
    """Return the stamp of a regular file; None if `path` is nothing of the kind."""
    try:
        found = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ino)


def read(path: Path, offset: int, most: int = CHUNK) -> bytes:
    """Return at most `most` bytes of a file from `offset` on."""
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(most)


def checksum(path: Path, start: int, end: int) -> int:
    """Return the CRC-32 of the bytes of a file from `start` to `end`, or of all that it has."""
    value, end = 0, min(end, path.stat().st_size)
    for offset in range(start, end, CHUNK):
        value = zlib.crc32(read(path, offset, min(CHUNK, end - offset)), value)
    return value


def write(path: Path, offset: int, data: bytes, last: bool) -> Stamp | None:
    """Write a chunk of a file that only its owner can read.

    The file appears with its last chunk, in one step. Returns its stamp then, and None before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (0 if offset else os.O_TRUNC)
    with open(os.open(scratch, flags, 0o600), "wb") as file:
        file.seek(offset)
        file.write(data)
        if not last:
            return None
        file.flush()
        os.fsync(file.fileno())
    written = stamp(scratch)
    scratch.replace(path)
    return written

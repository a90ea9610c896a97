"""Files and folders that appear complete or not at all: written beside, flushed, then renamed.

Files that somebody else wrote are read with bounds, and removed without following links.
"""

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

from areal_lite.system.processes import log_entry

log = logging.getLogger(__name__)


def write_atomically(
    path: Path, content: str | bytes, private: bool = False, durable: bool = True
) -> None:
    """Replace the file `path` in one step, and make its folder if that is missing.

    Only the owner can ever read a `private` file. A crash of the machine may lose a file that is
    not `durable`. Raises OSError that names `path`.
    """
    data = content.encode() if isinstance(content, str) else content
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(exist_ok=True)  # not its parents: a run may have been moved
        # It must be a new file: not one, or a link, that another user put there.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(scratch, flags, 0o600 if private else 0o666)
        with open(descriptor, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        scratch.replace(path)
        if durable:
            sync_path(path.parent)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def append_log(path: Path, text: str) -> None:
    """Append a line with the present time to a log. A full disk loses it, and ends nothing."""
    with contextlib.suppress(OSError), open(path, "a") as log:
        log.write(f"{time.strftime('%F %T')} {log_entry(text)}\n")


def write_json(path: Path, value: Any) -> None:
    """Replace the file `path` by `value` as indented JSON. Non-finite floats become null."""
    write_atomically(path, json.dumps(to_plain(value), indent=2, allow_nan=False) + "\n")


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read. Raises OSError for a pipe or a device, which could block for ever."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_regular(path: Path, most: int = 1 << 28) -> bytes:
    """Read a file of at most `most` bytes. Raises OSError, also for a pipe or a device."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
    return content


def read_json(file: Path) -> dict[str, Any]:
    """Read a file with one JSON object; {} if there is none. Raises ValueError of one line."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(read_regular(file).decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON: {error}; restore the file") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: a {type(value).__name__}, not an object; restore the file")
    return value


def to_plain(value: Any) -> Any:
    """Return `value` in types that JSON has; NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch both have it: no need to import either
        return to_plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def scratch_folder(folder: Path, empty: bool = True) -> Path:
    """Make a folder beside `folder` to write into; if `empty`, without leftovers of an attempt."""
    scratch = folder.with_name(f".{folder.name}.partial")
    if empty:
        shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True, exist_ok=not empty)
    return scratch


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, which becomes `folder` unless the block raises."""
    scratch = scratch_folder(folder)
    try:
        yield scratch
        publish_folder(scratch, folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def publish_folder(scratch: Path, folder: Path) -> None:
    """Flush everything in `scratch` to disk, then rename it to `folder`, replacing that."""
    for root, _, files in os.walk(scratch):
        for name in files:
            sync_path(Path(root) / name)
        sync_path(Path(root))
    old = _retired_name(folder)
    if folder.exists():
        folder.rename(old)
    scratch.rename(folder)
    sync_path(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def try_lock(file: IO[Any], kind: int) -> bool:
    """Lock a file if that is possible now: alone (LOCK_EX) or with others (LOCK_SH).

    The kernel releases the lock when the process ends, however it ends.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def reading(marker: Path) -> Iterator[None]:
    """Protect the folder of the file `marker` from `remove_unread` in any process."""
    with open(marker) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def remove_unread(marker: Path) -> bool:
    """Remove the folder of the file `marker`. If a process reads it, leave it and return False."""
    with open(marker) as file:
        if not try_lock(file, fcntl.LOCK_EX):
            return False
        old = _retired_name(marker.parent)
        marker.parent.rename(old)
    shutil.rmtree(old)
    return True


def _retired_name(folder: Path) -> Path:
    """Return the free name under which `folder` waits for its removal."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    return old


def sync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Remove a folder of any depth, without following links. What cannot be removed is logged."""
    with contextlib.suppress(OSError, RecursionError):
        return shutil.rmtree(folder)
    # It is deeper than Python's stack, or has locked folders, or has gone.
    subprocess.run(["chmod", "-R", "u+rwX", "--", folder], capture_output=True)
    removed = subprocess.run(["rm", "-rf", "--", folder], capture_output=True)
    if removed.returncode:
        reason = removed.stderr.decode(errors="replace").partition("\n")[0]
        log.warning("cannot remove %s: %s", folder, reason)

"""Resuming and stopping a run (docs/checkpoints.md, Resuming and Stopping).

A run continues at step S, the step of the newest whole checkpoint (0 without one). S is also a
version of the weights. A request to stop stays until the next start: there are steps left.

The manifest of a checkpoint is written last, so a folder that has one is complete. A start compares
the files with it before any process reads them: a flipped bit in a tensor would otherwise train on
without a sign. No torch here: supervisor and controller use this module.
"""

import fcntl
import os
import re
import shutil
import signal
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from areal_lite.run_dir import paths
from areal_lite.system.files import sync_path, try_lock
from areal_lite.system.processes import handling

STOPPED = os.EX_TEMPFAIL  # exit status of a run that was stopped and can be started again

CONTROLLER_FILES = (
    paths.CONTROLLER_FILE,
    paths.CONTROLLER_STATUS_FILE,
    f"{paths.HEARTBEATS_DIR}/controller",
)
"""Addresses and states of a controller that is gone."""
ROLE_FILES = (*CONTROLLER_FILES, paths.TRAINER_FILE, f"{paths.HEARTBEATS_DIR}/*", paths.TOTALS_FILE)
"""The same of a trainer that is gone, too."""
STALE_FILES = (*ROLE_FILES, f"{paths.SERVERS_DIR}/*", paths.SUMMARY_FILE, paths.STOP_FILE, ".*.tmp")
"""Also of servers, and files that only a finished run has."""


_BLOCK_BYTES = 1 << 22
_THREADS = 8


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file. Other threads run meanwhile."""
    value, block = 0, memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            value = zlib.crc32(block[:size], value)
    return value


def write_manifest(folder: Path, known: Mapping[str, int]) -> None:
    """Write the manifest of the files in `folder`. `known` has checksums that exist already."""
    files = sorted(path for path in folder.iterdir() if path.name != paths.CHECKPOINT_MARKER)
    listed = {
        path.name: (path.stat().st_size, known.get(path.name) or checksum(path)) for path in files
    }
    (folder / paths.CHECKPOINT_MARKER).write_bytes(msgspec.json.format(msgspec.json.encode(listed)))


def damage(folder: Path) -> str:
    """Describe the damage of a checkpoint, by its manifest; "" when it is whole."""
    try:
        content = (folder / paths.CHECKPOINT_MARKER).read_bytes()
        listed = msgspec.json.decode(content, type=dict[str, tuple[int, int]])
    except (OSError, ValueError, RecursionError) as error:
        return f"{paths.CHECKPOINT_MARKER} cannot be read ({error})"
    if not listed:
        return f"{paths.CHECKPOINT_MARKER} names no file"
    for name in listed:
        if "\0" in name or Path(name).name != name:
            return f"{paths.CHECKPOINT_MARKER} lists {name!r:.100}, which is not the name of a file"
    with ThreadPoolExecutor(_THREADS) as pool:
        reasons = pool.map(lambda item: _file_damage(folder / item[0], *item[1]), listed.items())
        return next(filter(None, reasons), "")


def _file_damage(path: Path, size: int, expected: int) -> str:
    try:
        if (found := path.stat().st_size) != size:
            return f"{path.name} has {found} bytes, not {size}"
        return "" if checksum(path) == expected else f"{path.name} has a wrong checksum"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"


def checkpoint_steps(folder: Path) -> list[int]:
    """List the steps of the complete checkpoints in `folder`, in ascending order."""
    markers = filter(Path.is_file, folder.glob(f"step-*/{paths.CHECKPOINT_MARKER}"))
    names = (re.fullmatch(r"step-(\d+)", marker.parent.name) for marker in markers)
    return sorted(int(name[1]) for name in names if name)


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in `folder`, or None."""
    steps = checkpoint_steps(folder)
    return folder / f"step-{steps[-1]}" if steps else None


def newest_whole_step(run_dir: Path) -> tuple[int, dict[Path, str]]:
    """Return the step of the newest whole checkpoint, 0 without any, and what newer ones lack.

    Raises ValueError when there are checkpoints and none is whole.
    """
    folder = run_dir / paths.CHECKPOINTS_DIR
    steps = checkpoint_steps(folder)
    reasons: dict[Path, str] = {}
    while steps and (reason := damage(folder / f"step-{steps[-1]}")):
        reasons[folder / f"step-{steps.pop()}"] = reason
    if reasons and not steps:
        found = "; ".join(f"{path.name}: {reason}" for path, reason in reasons.items())
        raise ValueError(
            f"{folder} has no checkpoint that is whole ({found}): restore one from a copy, or "
            "start anew in another run_dir"
        )
    return (steps[-1] if steps else 0), reasons


def set_aside_damaged(run_dir: Path) -> None:
    """Rename damaged checkpoints that are newer than the newest whole one.

    Call it before any role starts, so that all of them see the same checkpoints. Raises ValueError,
    and renames nothing, when there are checkpoints and none is whole.
    """
    _, reasons = newest_whole_step(run_dir)
    for path, reason in reasons.items():
        aside = path.with_name(f"{path.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        print(f"{path} is damaged: {reason}; it is now {aside.name}", file=sys.stderr)


def start_version(run_dir: Path) -> int:
    """Return the step, and version of the weights, at which the run continues."""
    return max(checkpoint_steps(run_dir / paths.CHECKPOINTS_DIR), default=0)


def needed_since(run_dir: Path) -> int:
    """Return the step from which on the store must keep the tokens that steps have used.

    It is that of the checkpoint before the newest one, to which a resume returns if the newest is
    damaged, or that of the only checkpoint; 0 without one. These checkpoints survive a power cut.
    """
    folder = run_dir / paths.CHECKPOINTS_DIR
    if not (steps := checkpoint_steps(folder)):
        return 0
    sync_path(folder)
    return steps[-2:][0]


def stop_requested(run_dir: Path) -> bool:
    return (run_dir / paths.STOP_FILE).exists()


def clear_stop_request(run_dir: Path) -> None:
    """Remove the stop request: the run has no steps left."""
    (run_dir / paths.STOP_FILE).unlink(missing_ok=True)


def remove_files(run_dir: Path, patterns: Sequence[str] = STALE_FILES) -> None:
    """Remove files of an earlier start that a process could mistake for this one's."""
    for pattern in patterns:
        for path in run_dir.glob(pattern):
            path.unlink(missing_ok=True)


@contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """Make `run_dir`, hold its lock, and turn SIGUSR1 into a stop request.

    Every command takes the lock before it writes there. Raises ValueError while another command or
    a controller holds one, and where a folder cannot be made.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = _lock(run_dir, paths.LOCK_FILE)
    except OSError as error:
        raise ValueError(
            f"run_dir={run_dir} cannot be used ({error.strerror}): choose another folder"
        ) from None
    with lock:
        # Roles that were started one by one have no supervisor that holds the lock.
        with lock_controller(run_dir):
            pass
        with handling(lambda *_: (run_dir / paths.STOP_FILE).touch(), signal.SIGUSR1):
            yield


def lock_controller(run_dir: Path) -> IO[bytes]:
    """Return the locked file of a run's controller. Raises ValueError while another one runs."""
    return _lock(run_dir, paths.CONTROLLER_LOCK_FILE)


def is_locked(run_dir: Path) -> bool:
    """Return whether a command or a controller runs in `run_dir`."""
    for path in (run_dir / paths.LOCK_FILE, run_dir / paths.CONTROLLER_LOCK_FILE):
        if path.exists():
            with open(path, "rb") as file:
                if not try_lock(file, fcntl.LOCK_SH):
                    return True
    return False


def open_gpus_lock(run_dir: Path) -> IO[bytes]:
    """Open the file to lock before GPUs are used that others use in turn (weights/turns.py)."""
    return _open(run_dir / paths.GPUS_LOCK_FILE)


def _open(path: Path) -> IO[bytes]:
    return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC), "wb")


def _lock(run_dir: Path, name: str) -> IO[bytes]:
    if not try_lock(file := _open(run_dir / name), fcntl.LOCK_EX):
        file.close()
        raise ValueError(
            f"run_dir={run_dir}: a run is going on there, end it first or choose another folder"
        ) from None
    return file

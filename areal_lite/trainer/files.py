"""Folders and files that appear whole or not at all: written beside their place, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from areal_lite.trajectory import TrainBatch


def scratch_folder(folder: Path) -> Path:
    """An empty folder beside `folder` to write into; what an earlier, interrupted attempt left there is removed."""
    scratch = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    return scratch


def publish_folder(scratch: Path, folder: Path) -> None:
    """Flush everything in `scratch`, then give it the name `folder`, in place of what had it."""
    for root, _, files in os.walk(scratch):
        for name in files:
            _sync(Path(root) / name)
        _sync(Path(root))
    old = _aside(folder)
    if folder.exists():
        folder.rename(old)
    scratch.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def reading(marker: Path) -> Iterator[None]:
    """Keep the folder of the file `marker` from being removed by `remove_unread`, also by another process, while the block runs."""
    with open(marker) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def remove_unread(marker: Path) -> bool:
    """Remove the folder of the file `marker`, all at once for who looks for it; False, and nothing happens, when someone reads it."""
    with open(marker) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        old = _aside(marker.parent)
        marker.parent.rename(old)
    shutil.rmtree(old)
    return True


def save_batch(batch: TrainBatch, path: Path) -> None:
    """Write `batch` for inspection; `load_batch(path)` gives it back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.msgpack.encode([bytes(frame) for frame in batch.to_frames()]))
    _sync(temporary)
    temporary.rename(path)
    _sync(path.parent)


def load_batch(path: str | Path) -> TrainBatch:
    """What `save_batch` wrote. Raises ValueError for anything else."""
    return TrainBatch.from_frames(msgspec.msgpack.decode(Path(path).read_bytes(), type=list[bytes]))


def _aside(folder: Path) -> Path:
    """The name, not taken, under which a folder waits for its removal."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    return old


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

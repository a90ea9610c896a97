"""Folders that appear whole or not at all: written beside their place, flushed to disk, then renamed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


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
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    scratch.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

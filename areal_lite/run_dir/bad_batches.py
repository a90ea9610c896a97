"""Batches whose update was skipped, kept as files for inspection."""

from pathlib import Path

import msgspec

from areal_lite.system.files import write_atomically
from areal_lite.train_batch import TrainBatch


def save_batch(batch: TrainBatch, path: Path) -> None:
    """Write `batch` to the file `path`; `load_batch` reads it."""
    frames = [bytes(frame) for frame in batch.to_frames()]
    write_atomically(path, msgspec.msgpack.encode(frames))


def load_batch(path: str | Path) -> TrainBatch:
    """Read a batch that `save_batch` wrote. Raises ValueError for anything else."""
    return TrainBatch.from_frames(msgspec.msgpack.decode(Path(path).read_bytes(), type=list[bytes]))

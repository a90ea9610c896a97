"""A checkpoint is data: reading one never runs code that somebody put into it.

torch unpickles two parts of a distributed checkpoint: its `.metadata`, and small objects beside the
tensors. Only the classes that `torch.distributed.checkpoint` itself writes are allowed here.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, EnumMeta
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata, planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

from areal_lite.system.processes import environment

_METADATA_FILE = ".metadata"

_CLASSES: dict[tuple[str, str], Any] = {
    (allowed.__module__, allowed.__qualname__): allowed
    for allowed in (
        PosixPath,  # where the checkpoint was written
        torch.Size,
        torch.serialization._get_layout,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        planner.SavePlan,
        planner.TensorWriteData,
        planner.WriteItem,
        planner.WriteItemType,
        _StorageInfo,
    )
}


def _member(kind: type[Enum], name: str) -> Enum:
    """Return the member `name` of an enumeration. No other object has attributes here."""
    if not isinstance(kind, EnumMeta) or name not in kind.__members__:
        raise ValueError("it names builtins.getattr, which no checkpoint does")
    return kind[name]


# Python 3.11.0 to 3.11.3 pickle the member of an enumeration as a call of getattr.
_NAMES = _CLASSES | {("builtins", "getattr"): _member}


def _refuse(_: pickle.Unpickler) -> None:
    raise ValueError("it numbers what it remembers itself, which no checkpoint does")


class _MetadataUnpickler(pickle._Unpickler):
    """Reads the metadata, and nothing else. Only the unpickler in Python lets refuse opcodes."""

    # The one in C would make a table of up to 2^32 entries for one of these.
    dispatch = pickle._Unpickler.dispatch | dict.fromkeys(
        (pickle.PUT[0], pickle.BINPUT[0], pickle.LONG_BINPUT[0]), _refuse
    )

    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        try:
            return _NAMES[module, name]
        except KeyError:
            raise ValueError(f"it names {module}.{name}, which no checkpoint does") from None


@contextmanager
def only_data(folder: Path) -> Iterator[None]:
    """Let torch read the checkpoint in `folder` inside the block, as data only.

    Raises ValueError if the checkpoint holds anything else, or if its `.metadata` cannot be read.
    """
    try:
        with open(folder / _METADATA_FILE, "rb") as file:
            found = _MetadataUnpickler(file).load()
        if not isinstance(found, metadata.Metadata):
            raise TypeError(f"it is a {type(found).__name__}")
        # Torch's own reading finds damage that the first one lets pass, which has refused all code.
        FileSystemReader(folder).read_metadata()
    except Exception as error:  # a damaged pickle raises errors of many kinds
        raise ValueError(
            f"{folder}: {_METADATA_FILE} is damaged or forged: {_printable(str(error))}"
        ) from error
    try:
        with environment("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1"):
            yield
    except CheckpointException as error:  # it is not an Exception
        cause, _ = next(iter(error.failures.values()))
        raise ValueError(f"{folder} cannot be loaded: {_first_line(cause)}") from error
    except (EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{folder} cannot be loaded: {_first_line(error)}") from error


def _printable(text: str) -> str:
    """Return text that a damaged file may have written as one line of bounded length."""
    return "".join(c if c.isprintable() else " " for c in text)[:300]


def _first_line(error: BaseException) -> str:
    """Return the name of an error, and the first line of what it says: torch says much."""
    return f"{type(error).__name__}: {_printable(str(error).partition(chr(10))[0])}"

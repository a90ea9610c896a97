"""Weights of one version in a memory file that the processes of one machine share.

    0       magic; XXH3 (128 bits) of all that follows it; version; offset and length of the table
    4096    the tensors, each at a multiple of 64 bytes, with zeros between them
    table   JSON up to the end: [[name, dtype, shape, offset], ...]

The writer clears the header first and writes it last. A file that is not whole therefore has no
header, and a reader that finds the same header before and after a copy has copied that version.

The checksum finds damage and files that are not whole. It need not stop a forger, because a request
names a file and its checksum together. XXH3 takes a tenth of the time of SHA-256.
"""

import json
import mmap
import os
import struct
import warnings
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import xxhash

from areal_lite.system.files import open_regular

# What a request to a server says about a file, before a colon and the checksum.
CHECK = "areal_lite_check"
ACTIVATE = "areal_lite_activate"

DATA_OFFSET = 4096
ALIGNMENT = 64
_MAGIC = b"arealwts"
_HEADER = struct.Struct("<8s16sQQQ")
FIELDS = struct.Struct("<QQQ")  # of the header, that the checksum covers after all that follows it
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
}


class StagedError(ValueError):
    """A file that holds no whole version of the weights, or another one than was asked for."""


@dataclass(frozen=True)
class Header:
    """The header of a file that is whole. `table` is where the table begins and its length."""

    digest: str
    version: int
    table: tuple[int, int]

    def pack(self) -> bytes:
        return _HEADER.pack(_MAGIC, bytes.fromhex(self.digest), self.version, *self.table)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_size


class StagedFile:
    """A read-only mapping of a file. Raises StagedError.

    A mapping stays valid when the writer has gone, and when it writes the next version. `populate`:
    whether all pages are mapped at once, so that no later read waits for one.
    """

    def __init__(self, path: str, *, populate: bool = False):
        try:
            file = open_regular(Path(path))
        except OSError as error:
            raise StagedError(
                f"{path} cannot be read here ({error.strerror}): a server's scheduler must run as "
                "the user of its HTTP process; or use sync.transport=distributed"
            ) from error
        with file:
            status = os.fstat(file.fileno())
            if status.st_size <= DATA_OFFSET:
                raise StagedError(f"{path} holds no weights")
            self.path = path
            self._identity = _identity(status)
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
            self._map = mmap.mmap(file.fileno(), status.st_size, flags, mmap.PROT_READ)

    def is_current(self) -> bool:
        """Return whether the path still leads to this file, in the same size."""
        try:
            return _identity(os.stat(self.path)) == self._identity
        except OSError:
            return False

    def header(self, digest: str) -> Header:
        """Return the header, if it is that of the version with this checksum."""
        magic, found, version, offset, length = _HEADER.unpack_from(self._map)
        if magic != _MAGIC:
            raise StagedError(f"{self.path}: not whole, or not written by a trainer")
        if found.hex() != digest:
            raise StagedError(f"{self.path}: it holds other weights than were asked for")
        if offset < DATA_OFFSET or offset + length != len(self._map):
            raise StagedError(f"{self.path}: {len(self._map)} bytes, and its table is elsewhere")
        return Header(digest, version, (offset, length))

    def check(self, digest: str) -> Header:
        """Return the header after a comparison of the whole content with the checksum."""
        header = self.header(digest)
        content = xxhash.xxh3_128()
        with memoryview(self._map) as view:
            content.update(view[DATA_OFFSET:])
        content.update(FIELDS.pack(header.version, *header.table))
        if content.hexdigest() != digest:
            raise StagedError(f"{self.path}: its content does not have its checksum")
        return header

    def table(self, header: Header) -> bytes:
        offset, length = header.table
        return self._map[offset : offset + length]

    def tensors(self, header: Header) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors by name. They share the memory of the file and are read-only."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            data = torch.frombuffer(self._map, dtype=torch.uint8)
        tensors = []
        for name, kind, shape, offset in json.loads(self.table(header)):
            dtype = _DTYPES.get(kind)
            if dtype is None:
                raise StagedError(f"{self.path}: {name} has dtype {kind}")
            end = offset + prod(shape) * dtype.itemsize
            if offset < DATA_OFFSET or end > header.table[0]:
                raise StagedError(f"{self.path}: {name} is outside the file")
            tensors.append((name, data[offset:end].view(dtype).reshape(shape)))
        return tensors

    def close(self) -> None:
        self._map.close()

"""The `memory` transport: a memory file of the trainer that servers on the same machine map.

Servers elsewhere receive a copy of it before they take the weights (`sender.py`).

The file has no name in a folder. It ends with the trainer and the servers that map it, and it does
not count against the size of /dev/shm. One file is enough: the trainer writes the next version
when every server has answered, and a server that is late finds another checksum.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import xxhash

from areal_lite.servers.staged_copy import Source
from areal_lite.servers.staged_file import (
    ACTIVATE,
    ALIGNMENT,
    CHECK,
    DATA_OFFSET,
    Header,
    fields_of,
)
from areal_lite.weights.sender import WeightSender


@dataclass(frozen=True)
class StagedWeights:
    """A version in the file at `path`, which servers check and then activate."""

    path: str
    header: Header

    def check_request(self, source: Source) -> dict[str, Any]:
        return self._request(CHECK) | {"manifest": asdict(source)}

    def activate_request(self) -> dict[str, Any]:
        return self._request(ACTIVATE)

    def _request(self, door: str) -> dict[str, Any]:
        return {
            "model_path": self.path,
            "load_format": f"{door}:{self.header.digest}",
            "weight_version": str(self.header.version),
        }


class WeightMemory:
    """The memory file of one trainer."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._sender: WeightSender | None = None

    def write(
        self, buckets: Iterable[list[tuple[str, torch.Tensor]]], version: int
    ) -> StagedWeights:
        """Write all weights. The servers still generate meanwhile."""
        if self._descriptor is None:
            self._descriptor = os.memfd_create("areal_lite-weights")
        file = _Writer(self._descriptor)
        table = []
        for bucket in buckets:
            for name, tensor in bucket:
                dtype = str(tensor.dtype).removeprefix("torch.")
                table.append((name, dtype, list(tensor.shape), file.position))
                file.append(_bytes_of(tensor))
        header = file.finish(json.dumps(table).encode(), version)
        return StagedWeights(f"/proc/{os.getpid()}/fd/{self._descriptor}", header)

    def source(self, address: str) -> Source:
        """Return where servers get the file that was written. `address` is this machine's."""
        assert self._descriptor is not None
        if self._sender is None or self._sender.address != address:
            self._stop_sending()
            self._sender = WeightSender(address, self._descriptor)
        return self._sender.source

    def _stop_sending(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def close(self) -> None:
        """Give the memory back, as soon as no server maps it."""
        self._stop_sending()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class _Writer:
    """Writes one version into a file: the header is cleared first and written last."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._content = xxhash.xxh3_128()
        self.position = DATA_OFFSET
        self._write(bytes(DATA_OFFSET), 0)

    def append(self, data: bytes | memoryview) -> None:
        """Write `data`, and zeros up to the next tensor."""
        self._append(data)
        self._append(bytes(-self.position % ALIGNMENT))

    def finish(self, table: bytes, version: int) -> Header:
        where = (self.position, len(table))
        self._append(table)
        os.ftruncate(self._descriptor, self.position)
        self._content.update(fields_of(version, where))
        header = Header(self._content.hexdigest(), version, where)
        self._write(header.pack(), 0)
        return header

    def _append(self, data: bytes | memoryview) -> None:
        self._content.update(data)
        self.position += self._write(data, self.position)

    def _write(self, data: bytes | memoryview, offset: int) -> int:
        view = memoryview(data)
        written = 0
        while written < len(view):
            written += os.pwrite(self._descriptor, view[written:], offset + written)
        return written


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data

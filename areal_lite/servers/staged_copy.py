"""A server's copy of a staged file that it cannot map: that of a trainer on another machine.

The server connects by TCP, sends the token of the trainer's file, and receives the length of the
file, as 8 bytes, and the file. Nothing is trusted until the copy has been compared with the
checksum that the request names.
"""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass

import msgspec

from areal_lite.servers.staged_file import DATA_OFFSET, StagedError
from areal_lite.system.processes import process_namespace

TOKEN_BYTES = 16
LENGTH_BYTES = 8
# The longest silence of the trainer within a transfer, in seconds.
_SILENCE_S = 30.0
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Source:
    """The two ways to a staged file: the trainer's processes can map it, others ask for a copy.

    Args:
        namespace: of the processes that can map the file (`process_namespace`).
        address, port: the trainer listens there, and sends copies.
        token: TOKEN_BYTES bytes in hexadecimal, without which it sends nothing.
    """

    namespace: str
    address: str
    port: int
    token: str

    @classmethod
    def parse(cls, manifest: object) -> Source:
        """Return the source that a request names. Raises StagedError if it names none."""
        try:
            return msgspec.convert(manifest, cls)
        except msgspec.ValidationError as error:
            raise StagedError(f"the request names no source of the weights: {error}") from error

    def can_map(self, path: str) -> bool:
        """Return whether this process can map the trainer's own file."""
        return self.namespace == process_namespace() and os.access(path, os.R_OK)


class StagedCopy:
    """A memory file of this process, kept from push to push. `path` leads other processes to it."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("areal_lite-copy")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._one_at_a_time = threading.Lock()

    def fetch(self, source: Source) -> None:
        """Receive the file of a trainer. Raises StagedError if it does not come whole."""
        try:
            address = (source.address, source.port)
            with self._one_at_a_time, socket.create_connection(address, _SILENCE_S) as trainer:
                trainer.sendall(bytes.fromhex(source.token))
                self._receive_file(trainer)
        except (OSError, OverflowError, ValueError) as error:
            raise StagedError(
                f"no weights from {source.address}:{source.port}, the trainer: {error}"
            ) from error

    def _receive_file(self, trainer: socket.socket) -> None:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        length = int.from_bytes(receive(trainer, buffer[:LENGTH_BYTES]), "little")
        if length <= DATA_OFFSET:
            raise OSError(f"its file has {length} bytes")
        os.pwrite(self._descriptor, bytes(DATA_OFFSET), 0)  # not whole from here on
        os.ftruncate(self._descriptor, length)
        header = bytes(receive(trainer, buffer[:DATA_OFFSET]))
        position = DATA_OFFSET
        while position < length:
            part = receive(trainer, buffer[: length - position])
            position += os.pwrite(self._descriptor, part, position)
        os.pwrite(self._descriptor, header, 0)


def receive(connection: socket.socket, into: memoryview) -> memoryview:
    """Fill `into`, uint8 [n], and return it. Raises OSError if the connection ends before."""
    received = 0
    while received < len(into):
        count = connection.recv_into(into[received:])
        if not count:
            raise OSError("the connection ended too early")
        received += count
    return into

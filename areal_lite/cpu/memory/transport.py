"""The `memory` transport: a memory file of the trainer that servers on the same machine map.

Servers on another machine or in another container receive a copy (staged.py) while they generate,
so the network does not lengthen a pause.

The file has no name in a folder. It ends with the trainer and the servers that map it, and it does
not count against the size of /dev/shm. One file is enough: the trainer writes the next version
when every server has answered, and a server that is late finds another checksum.
"""

import hmac
import json
import logging
import os
import secrets
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import xxhash

from areal_lite.config import TrainConfig
from areal_lite.cpu.memory.staged import (
    ACTIVATE,
    ALIGNMENT,
    CHECK,
    DATA_OFFSET,
    FIELDS,
    LENGTH_BYTES,
    TOKEN_BYTES,
    Header,
    Source,
    receive,
)
from areal_lite.servers.registry import ServerInfo
from areal_lite.system import heartbeat
from areal_lite.system.gpus import resolve_device
from areal_lite.system.network import address_towards
from areal_lite.system.processes import process_namespace, steady_time
from areal_lite.weights.recipients import FROM_DISK, Bucket, Pause, PushRecipients

log = logging.getLogger(__name__)
# Within this time a client must show the token, in seconds.
_TOKEN_WITHIN_S = 5.0
# The longest silence of a server within a transfer, in seconds.
_SILENCE_S = 30.0


class WeightSender(socketserver.ThreadingTCPServer):
    """Listens on a free port of `address`, and sends a file to clients that show its token.

    Each connection has a thread. Only the kernel touches the bytes of the file.
    """

    daemon_threads = True
    block_on_close = False  # a server that hangs must not keep the trainer
    request_queue_size = 1024

    def __init__(self, address: str, descriptor: int):
        self.descriptor = descriptor
        self.token = secrets.token_bytes(TOKEN_BYTES)
        super().__init__((address, 0), _Handler)
        port = self.server_address[1]
        self.source = Source(process_namespace(), address, port, self.token.hex())
        serve = partial(self.serve_forever, poll_interval=0.1)
        threading.Thread(target=serve, daemon=True, name="sender").start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: tuple[str, int]) -> None:
        log.warning("%s:%s got no weights: %s", *client_address, sys.exception())


class _Handler(socketserver.BaseRequestHandler):
    request: socket.socket

    def handle(self) -> None:
        assert isinstance(self.server, WeightSender)
        self.request.settimeout(_TOKEN_WITHIN_S)
        shown = receive(self.request, memoryview(bytearray(TOKEN_BYTES)))
        if not hmac.compare_digest(shown, self.server.token):
            log.warning("refused the weights to %s: a wrong token", self.client_address[0])
            return
        self.request.settimeout(_SILENCE_S)
        # Opened anew, because a descriptor has one position for all threads.
        with open(f"/proc/self/fd/{self.server.descriptor}", "rb") as file:
            length = os.fstat(file.fileno()).st_size
            self.request.sendall(length.to_bytes(LENGTH_BYTES, "little"))
            self.request.sendfile(file, count=length)


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


class MemoryTransport:
    """Gives the weights to servers without a GPU, through memory."""

    def __init__(self) -> None:
        self._memory = WeightMemory()

    @staticmethod
    def fits(config: TrainConfig) -> bool:
        """Return whether `sync.transport=auto` is memory: the fastest transport without GPUs.

        Memory needs servers of one process: it and its scheduler share a memory file, whether that
        is the trainer's or a copy.
        """
        devices = {resolve_device(config.trainer.device), resolve_device(config.server.device)}
        return devices == {"cpu"} and config.server.tensor_parallel == 1 and can_share_memory()

    def transfer(
        self, recipients: PushRecipients, buckets: Iterable[Bucket], pause: Pause, *, apart: bool
    ) -> None:
        staged = self._memory.write(buckets, recipients.report.version)
        address = address_towards(server.url for server in recipients.servers)
        recipients.post(FROM_DISK, staged.check_request(self._memory.source(address)))
        window = pause(recipients)
        body = staged.activate_request() | {"flush_cache": window.flush_cache}
        if window.flush_cache:
            with window:
                recipients.post(FROM_DISK, body)
        else:
            take_turns(recipients, body)

    def close(self, servers: list[ServerInfo]) -> None:
        self._memory.close()


def take_turns(recipients: PushRecipients, body: dict[str, Any]) -> None:
    """Let one server after the other take the weights between two decode steps, without a pause.

    Two copies at once would take the memory of the machine from each other, and the others generate
    meanwhile. The pause window is that of the server for which it takes longest.
    """
    report = recipients.report
    report.paused_at = steady_time()
    for server in list(recipients.servers):
        heartbeat.beat()
        started = steady_time()
        recipients.post(FROM_DISK, body, to=[server])
        report.pause_s = max(report.pause_s, steady_time() - started)


def can_share_memory() -> bool:
    """Return whether other processes can open this one's memory files; a sandbox may forbid it."""
    descriptor = os.memfd_create("areal_lite-probe")
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    try:
        probe = [sys.executable, "-I", "-S", "-c", "import sys; open(sys.argv[1])", path]
        return subprocess.run(probe, stderr=subprocess.DEVNULL).returncode == 0
    finally:
        os.close(descriptor)


class WeightMemory:
    """The memory file of one trainer."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._sender: WeightSender | None = None

    def write(self, buckets: Iterable[Bucket], version: int) -> StagedWeights:
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
        if self._sender is None or self._sender.source.address != address:
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
        self._content.update(FIELDS.pack(version, *where))
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

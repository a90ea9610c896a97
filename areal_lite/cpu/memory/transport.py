"""The `memory` transport: a memory file of the trainer that servers on the same machine map.

The file has no name in a folder. It ends with the trainer and the servers that map it, and it does
not count against the size of /dev/shm. One file is enough: the trainer writes the next version
when every server has answered, and a server that is late finds another checksum.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import xxhash

from areal_lite.config import TrainConfig
from areal_lite.cpu.memory.staged import ACTIVATE, ALIGNMENT, CHECK, DATA_OFFSET, FIELDS, Header
from areal_lite.servers.registry import ServerInfo
from areal_lite.system import heartbeat
from areal_lite.system.files import read_json
from areal_lite.system.gpus import resolve_device
from areal_lite.system.network import LOOPBACK
from areal_lite.system.processes import steady_time
from areal_lite.weights.recipients import FROM_DISK, Bucket, PushRecipients


@dataclass(frozen=True)
class StagedWeights:
    """A version in the file at `path`, which servers check and then activate."""

    path: str
    header: Header

    def request(self, door: str) -> dict[str, Any]:
        """Return the body of a request to CHECK or to ACTIVATE this version."""
        return {
            "model_path": self.path,
            "load_format": f"{door}:{self.header.digest}",
            "weight_version": str(self.header.version),
        }


class MemoryTransport:
    """Gives the weights to servers without a GPU, through the memory file of this trainer."""

    def __init__(self, *_: object) -> None:
        self._descriptor: int | None = None

    @staticmethod
    def fits(config: TrainConfig) -> bool:
        """Return whether `sync.transport=auto` is memory: the fastest transport without GPUs.

        Memory needs servers of one process, on the trainer's machine, and a model that computes
        nothing from its weights when they change, as DeepSeek-V3 does.
        """
        server = config.server
        is_here = server.host in LOOPBACK and server.tensor_parallel == 1
        devices = {resolve_device(config.trainer.device), resolve_device(server.device)}
        kind = read_json(Path(config.model) / "config.json").get("model_type")
        plain = kind != "deepseek_v3"
        return devices == {"cpu"} and is_here and plain and can_share_memory()

    def transfer(
        self, recipients: PushRecipients, buckets: Iterable[Bucket], *, apart: bool
    ) -> None:
        staged = self.write(buckets, recipients.report.version)
        recipients.post(FROM_DISK, staged.request(CHECK), recipients.sync.health_timeout_s)
        body = staged.request(ACTIVATE) | {"flush_cache": recipients.flush_cache}
        if recipients.flush_cache:
            with recipients.paused():
                recipients.post(FROM_DISK, body)
        else:
            take_turns(recipients, body)

    def write(self, buckets: Iterable[Bucket], version: int) -> StagedWeights:
        """Write all weights. The servers still generate meanwhile."""
        if self._descriptor is None:
            self._descriptor = os.memfd_create("areal_lite-weights")
        content, table = xxhash.xxh3_128(), []
        with open(self._descriptor, "wb", closefd=False) as file:

            def append(data: bytes | memoryview) -> None:
                content.update(data)
                file.write(data)

            file.seek(0)
            file.write(bytes(DATA_OFFSET))  # clears the header
            file.flush()
            for name, tensor in chain.from_iterable(buckets):
                dtype = str(tensor.dtype).removeprefix("torch.")
                table.append((name, dtype, list(tensor.shape), file.tell()))
                data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                append(data.numpy().data)
                append(bytes(-file.tell() % ALIGNMENT))
            encoded = json.dumps(table).encode()
            where = file.tell(), len(encoded)
            append(encoded)
            file.truncate()
            content.update(FIELDS.pack(version, *where))
            header = Header(content.hexdigest(), version, where)
            file.seek(0)
            file.write(header.pack())
        return StagedWeights(f"/proc/{os.getpid()}/fd/{self._descriptor}", header)

    def close(self, servers: list[ServerInfo]) -> None:
        """Give the memory back, as soon as no server maps it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


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

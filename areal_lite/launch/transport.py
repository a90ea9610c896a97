"""The transport of weights that `sync.transport=auto` stands for."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

from areal_lite.config import TrainConfig
from areal_lite.system.gpus import resolve_device
from areal_lite.system.network import LOOPBACK


def choose_transport(config: TrainConfig) -> str:
    """Return the transport of a run whose servers this machine starts beside the trainer.

    Shared memory is the fastest without GPUs. It needs servers of this machine and of one process,
    which have areal_lite's plugin.
    """
    server, transport = config.server, config.sync.transport
    if transport != "auto":
        return transport
    if config.sync.adapters_only:
        return "distributed"
    without_gpu = {resolve_device(config.trainer.device), resolve_device(server.device)} == {"cpu"}
    local = server.host in LOOPBACK and server.tensor_parallel == 1
    plugin = entry_points(group="sglang.srt.plugins", name="areal_lite_push")
    shared = without_gpu and local and plugin and can_share_memory()
    return "memory" if shared else "distributed"


def can_share_memory() -> bool:
    """Return whether other processes can open this one's memory files; a sandbox may forbid it."""
    descriptor = os.memfd_create("areal_lite-probe")
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    try:
        probe = [sys.executable, "-I", "-S", "-c", "import sys; open(sys.argv[1])", path]
        return subprocess.run(probe, stderr=subprocess.DEVNULL).returncode == 0
    finally:
        os.close(descriptor)

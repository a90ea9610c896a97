"""The transport of weights under `sync.transport=auto`."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

from areal_lite.config import TrainConfig
from areal_lite.system.gpus import resolve_device


def choose_transport(config: TrainConfig) -> str:
    """Return the transport of a run whose trainer is, or will be, on this machine.

    Memory is the fastest without GPUs. It needs servers of one process with areal_lite's plugin.
    That process and its scheduler share a memory file, whether it is the trainer's or a copy.
    """
    server, transport = config.server, config.sync.transport
    if transport != "auto":
        return transport
    without_gpu = {resolve_device(config.trainer.device), resolve_device(server.device)} == {"cpu"}
    plugin = entry_points(group="sglang.srt.plugins", name="areal_lite_push")
    whole = not config.sync.adapters_only and server.tensor_parallel == 1
    return "memory" if without_gpu and whole and plugin and can_share_memory() else "distributed"


def can_share_memory() -> bool:
    """Return whether other processes can open this one's memory files; a sandbox may forbid it."""
    descriptor = os.memfd_create("areal_lite-probe")
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    try:
        probe = [sys.executable, "-I", "-S", "-c", "import sys; open(sys.argv[1])", path]
        return subprocess.run(probe, stderr=subprocess.DEVNULL).returncode == 0
    finally:
        os.close(descriptor)

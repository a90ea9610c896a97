"""The transport of weights that `sync.transport=auto` stands for."""

from importlib.metadata import entry_points

from areal_lite.config import TrainConfig
from areal_lite.system.gpus import resolve_device


def choose_transport(config: TrainConfig) -> str:
    """Return the transport of a run whose trainer is, or will be, on this machine.

    Memory is the fastest without GPUs. It needs servers of one process with areal_lite's plugin.
    """
    server, transport = config.server, config.sync.transport
    if transport != "auto":
        return transport
    without_gpu = {resolve_device(config.trainer.device), resolve_device(server.device)} == {"cpu"}
    plugin = entry_points(group="sglang.srt.plugins", name="areal_lite_push")
    whole = not config.sync.adapters_only and server.tensor_parallel == 1
    return "memory" if without_gpu and whole and plugin else "distributed"

"""The GPUs of each process of a run on one machine.

The trainer ranks get the first GPUs, one each. The servers get the next ones, `tensor_parallel`
each. A single GPU is shared by all, by shares of its memory. Weights then travel through a folder
(`sync.transport=disk`), because NCCL refuses two ranks on one device.
"""

from dataclasses import dataclass

from areal_lite.config import ServerConfig, TrainConfig, TrainerConfig
from areal_lite.config.rules import check_devices
from areal_lite.system.gpus import divide_gpus, resolve_device, visible_gpus

# The largest share of a shared GPU. CUDA, CUDA graphs and SGLang's computing need the rest.
_MOST_SHARED = 0.9


@dataclass(frozen=True)
class Placement:
    """GPUs by their names in CUDA_VISIBLE_DEVICES. An empty list: the process uses no GPU."""

    trainer: list[str]  # of all ranks
    servers: list[list[str]]  # of each server

    @property
    def shared(self) -> bool:
        """Return whether a server and the trainer share a GPU."""
        return any(gpu in self.trainer for gpus in self.servers for gpu in gpus)


def place_run(config: TrainConfig) -> Placement:
    """Assign the GPUs of this machine to the processes of a run.

    Raises ValueError for devices that this machine lacks or that do not go together, and as `place`
    does.
    """
    trainer, server, transport = config.trainer, config.server, config.sync.transport
    check_trainer_device(trainer, "trainer")
    _check_gpu_is_there(server.device, "server")
    devices = resolve_device(trainer.device), resolve_device(server.device)
    check_devices(*devices, transport)
    return place(visible_gpus() if "cuda" in devices else [], trainer, server, transport)


def check_trainer_device(trainer: TrainerConfig, key: str) -> None:
    """Check that the trainer at `key` can use its device on this machine. Raises ValueError."""
    _check_gpu_is_there(trainer.device, key)
    if trainer.device == "cpu" and resolve_device("auto") == "cuda":
        raise ValueError(
            f"{key}.device=cpu on a machine with a GPU, which Megatron-core would use: "
            "hide it with CUDA_VISIBLE_DEVICES="
        )


def _check_gpu_is_there(device: str, key: str) -> None:
    if device == "cuda" and not visible_gpus():
        raise ValueError(
            f"{key}.device=cuda, but no GPU is visible: set {key}.device=cpu, or look at "
            "CUDA_VISIBLE_DEVICES and the driver"
        )


def place(
    gpus: list[str], trainer: TrainerConfig, server: ServerConfig, transport: str
) -> Placement:
    """Assign GPUs to the trainer ranks and the servers.

    `gpus` are the visible ones. Raises ValueError when there are too few, or when one is shared
    that cannot be.
    """
    ranks = trainer.world_size
    size = 0 if server.device == "cpu" else server.tensor_parallel
    needed = ranks + server.count * size
    if not gpus:
        return Placement([], [[] for _ in range(server.count)])
    if len(gpus) == 1 and needed == 2:
        if transport != "disk":
            raise ValueError(
                f"sync.transport={transport} with server and trainer on one GPU: "
                "NCCL refuses that; use +experiment=one_gpu"
            )
        own, other = trainer.gpu_memory_fraction, server.mem_fraction
        if own is None or other is None or own + other > _MOST_SHARED:
            raise ValueError(
                f"trainer.gpu_memory_fraction={own}, server.args.mem_fraction_static={other} on "
                f"one GPU: set both, with a sum of at most {_MOST_SHARED}; +experiment=one_gpu does"
            )
        return Placement(gpus, [gpus])
    if len(gpus) < needed:
        raise ValueError(
            f"{len(gpus)} GPUs for {ranks} trainer ranks and {server.count} servers of "
            f"{size}: {needed} are needed; lower trainer.data_parallel "
            "(or another of its parallel sizes), server.count or server.tensor_parallel"
        )
    return Placement(gpus[:ranks], divide_gpus(gpus[ranks:], server.count, size))

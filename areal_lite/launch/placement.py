"""The GPUs of each process of a run on one machine.

The trainer ranks get the first GPUs, one each. The servers get the next ones, `tensor_parallel`
each. A single GPU is shared by all. Weights then travel through a folder (`sync.transport=disk`),
because NCCL refuses two ranks on one device.
"""

from dataclasses import dataclass

from areal_lite.config import ServerConfig, TrainerConfig
from areal_lite.system.gpus import divide_gpus


@dataclass(frozen=True)
class Placement:
    """GPUs by their names in CUDA_VISIBLE_DEVICES. An empty list: the process uses no GPU."""

    trainer: list[str]  # of all ranks
    servers: list[list[str]]  # of each server

    @property
    def shared(self) -> bool:
        """Whether a server and the trainer share a GPU."""
        return any(gpu in self.trainer for gpus in self.servers for gpu in gpus)


def place(
    gpus: list[str], trainer: TrainerConfig, server: ServerConfig, transport: str
) -> Placement:
    """Assign GPUs to the trainer ranks and the servers.

    Raises ValueError when there are too few GPUs, or when one is shared and weights are broadcast.

    Args:
        gpus: the visible GPUs; empty on a machine without any.
        trainer: says how many ranks there are.
        server: says how many servers there are, and of which size.
        transport: `sync.transport`.
    """
    ranks = trainer.world_size
    needed = ranks + server.count * server.tensor_parallel
    if not gpus:
        return Placement([], [[] for _ in range(server.count)])
    if len(gpus) == 1 and needed == 2:
        if transport != "disk":
            raise ValueError(
                f"sync.transport={transport} with server and trainer on one GPU: "
                "NCCL refuses that; use +experiment=one_gpu"
            )
        return Placement(gpus, [gpus])
    if len(gpus) < needed:
        raise ValueError(
            f"{len(gpus)} GPUs for {ranks} trainer ranks and {server.count} servers of "
            f"{server.tensor_parallel}: {needed} are needed; lower trainer.data_parallel "
            "(or another of its parallel sizes), server.count or server.tensor_parallel"
        )
    return Placement(gpus[:ranks], divide_gpus(gpus[ranks:], server.count, server.tensor_parallel))

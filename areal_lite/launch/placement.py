"""Which GPUs each process of a run on one machine gets. Pure.

Trainer ranks come first, one GPU each, then the servers, `tensor_parallel` GPUs each. With a single GPU everything shares it: then weights
travel through a folder (`sync.transport=disk`), because NCCL refuses two ranks on one device.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_lite.config import ServerConfig, TrainerConfig
from areal_lite.system.gpus import divide_gpus


@dataclass(frozen=True)
class Placement:
    """`trainer`: the GPUs of the ranks. `servers`: those of each server. Empty lists: no GPU, nothing to set."""

    trainer: list[str]
    servers: list[list[str]]

    @property
    def shared(self) -> bool:
        return any(gpu in self.trainer for gpus in self.servers for gpu in gpus)


def place(
    gpus: list[str], trainer: TrainerConfig, server: ServerConfig, transport: str
) -> Placement:
    """Raises ValueError when there are too few GPUs, or one is shared and weights are to be broadcast."""
    ranks = trainer.world_size
    wanted = ranks + server.count * server.tensor_parallel
    if not gpus:
        return Placement([], [[] for _ in range(server.count)])
    if len(gpus) == 1 and wanted == 2:
        if transport != "disk":
            raise ValueError(
                f"sync.transport={transport} with server and trainer on one GPU: NCCL refuses that; use +experiment=one_gpu"
            )
        return Placement(gpus, [gpus])
    if len(gpus) < wanted:
        raise ValueError(
            f"{len(gpus)} GPUs for {ranks} trainer ranks and {server.count} servers of {server.tensor_parallel}: {wanted} are needed;"
            " lower trainer.data_parallel (or another of its parallel sizes), server.count or server.tensor_parallel"
        )
    return Placement(gpus[:ranks], divide_gpus(gpus[ranks:], server.count, server.tensor_parallel))

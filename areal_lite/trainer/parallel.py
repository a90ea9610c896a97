"""Process groups of the trainer: torch.distributed and Megatron's parallel state, from `TrainerConfig` and torchrun's environment.

The world is tensor_parallel x data_parallel ranks, tensor-parallel ranks next to each other. Without RANK in the environment the
process is a world of one.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from areal_lite.config import TrainerConfig


def select_device(config: TrainerConfig) -> torch.device:
    """The device of this rank. Raises ValueError for a device that this machine does not have, or that Megatron-core would not use."""
    cuda = torch.cuda.is_available()
    wanted = ("cuda" if cuda else "cpu") if config.device == "auto" else config.device
    if wanted == "cuda" and not cuda:
        raise ValueError("trainer.device=cuda, but torch sees no GPU: use trainer.device=cpu")
    if wanted == "cpu" and cuda:
        raise ValueError("trainer.device=cpu on a machine with a GPU: hide it with CUDA_VISIBLE_DEVICES= as Megatron-core would use it")
    if wanted not in ("cpu", "cuda"):
        raise ValueError(f"trainer.device={config.device}: use auto, cpu or cuda")
    return torch.device(wanted, int(os.environ.get("LOCAL_RANK", 0))) if wanted == "cuda" else torch.device("cpu")


def init_distributed(config: TrainerConfig, seed: int) -> torch.device:
    """Join the process group (nccl on GPUs, gloo without), build Megatron's groups, seed torch; return this rank's device.

    A second call only returns the device. Raises ValueError when tensor_parallel x data_parallel is not the world size.
    """
    device = select_device(config)
    if parallel_state.model_parallel_is_initialized():
        return device
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if config.tensor_parallel * config.data_parallel != world_size:
        raise ValueError(
            f"trainer.tensor_parallel={config.tensor_parallel} x trainer.data_parallel={config.data_parallel}"
            f" ranks, but WORLD_SIZE is {world_size}: start that many"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if config.gpu_memory_fraction is not None:
            torch.cuda.set_per_process_memory_fraction(config.gpu_memory_fraction, device)
    else:
        torch.set_num_threads(config.threads)
    # A rank may wait for its batch while another already waits in a collective.
    timeout = timedelta(seconds=max(1800.0, 2 * config.batch_timeout_s))
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=config.tensor_parallel)
    torch.manual_seed(seed)
    return device


def shutdown() -> None:
    """Leave the process groups. Every rank calls it."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()

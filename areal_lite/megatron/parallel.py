"""Process groups of the trainer: torch.distributed and Megatron's parallel state.

The world is tensor x context x data x pipeline ranks, from the fastest-changing to the slowest.
Expert parallelism spreads experts over some of the tensor x context x data ranks. Without RANK in
the environment the process is a world of one.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from areal_lite.config import TrainerConfig
from areal_lite.system.gpus import nccl_environment

# How long a rank may wait in a collective. The others wait while rank 0 waits for a batch, or for
# an evaluation, which may take hours. A rank that dies or hangs ends the run without this limit.
_TIMEOUT = timedelta(days=1)
# Numbers of a rank that are on the GPU at a time: 64 MiB in float32.
_PIECE = 1 << 24


def select_device(config: TrainerConfig) -> torch.device:
    """Return the device of this rank.

    Raises ValueError for a device that this machine lacks or that Megatron-core would not use.
    """
    cuda = torch.cuda.is_available()
    if config.device == ("cpu" if cuda else "cuda"):
        one = "a GPU, which Megatron-core would use: hide it with CUDA_VISIBLE_DEVICES="
        found = one if cuda else "no GPU: use trainer.device=cpu"
        raise ValueError(f"trainer.device={config.device}, but torch sees {found}")
    rank = int(os.environ.get("LOCAL_RANK", 0))
    return torch.device("cuda", rank) if cuda else torch.device("cpu")


def select_dtype(config: TrainerConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of parameters and activations."""
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": auto}[config.dtype]


def current_device() -> torch.device:
    """Return the device that Megatron-core uses on this rank."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def init_distributed(config: TrainerConfig, seed: int) -> torch.device:
    """Join the process group, build Megatron's groups and seed torch; return this rank's device.

    Raises ValueError when the parallel sizes do not make up the world.
    """
    device = select_device(config)
    if parallel_state.model_parallel_is_initialized():
        return device
    world = int(os.environ.get("WORLD_SIZE", 1))
    if config.world_size != world:
        raise ValueError(
            f"trainer.tensor_parallel={config.tensor_parallel}"
            f" x pipeline_parallel={config.pipeline_parallel}"
            f" x context_parallel={config.context_parallel} x data_parallel={config.data_parallel}"
            f" ranks, but WORLD_SIZE is {world}: start that many"
        )
    if device.type == "cuda":
        os.environ.update(nccl_environment())  # before NCCL reads it: at the first collective
        torch.cuda.set_device(device)
        if config.gpu_memory_fraction is not None:
            torch.cuda.set_per_process_memory_fraction(config.gpu_memory_fraction, device)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    _init_process_group("nccl" if device.type == "cuda" else "gloo", _TIMEOUT)
    virtual = config.virtual_pipeline
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=_expert_tensor_parallel(config),
        distributed_timeout_minutes=_TIMEOUT // timedelta(minutes=1),
        create_gloo_process_groups=False,
    )
    # Megatron demands its generators even where nothing draws from them.
    model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    return device


def _init_process_group(backend: str, timeout: timedelta) -> None:
    # Without `device_id`: a default group that is bound to a device would make torch split the
    # weight group of areal_lite/weights from it.
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)


def _expert_tensor_parallel(config: TrainerConfig) -> int:
    # Experts that are spread over ranks are whole there; otherwise they are split like all weights.
    return 1 if config.expert_parallel > 1 else config.tensor_parallel


def transformer_settings(config: TrainerConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return TransformerConfig's fields for layout, communication and recomputation."""
    interleaved = config.virtual_pipeline > 1
    recompute = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    }
    return {
        "tensor_model_parallel_size": config.tensor_parallel,
        "sequence_parallel": config.tensor_parallel > 1,
        "pipeline_model_parallel_size": config.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": config.virtual_pipeline if interleaved else None,
        "context_parallel_size": config.context_parallel,
        "expert_model_parallel_size": config.expert_parallel,
        "expert_tensor_parallel_size": _expert_tensor_parallel(config),
        "pipeline_dtype": dtype,
        "batch_p2p_sync": False,
        # Two interleaved stages exchange messages in both directions between the same two ranks,
        # where batched messages would be mistaken for each other.
        "batch_p2p_comm": not interleaved,
        "overlap_p2p_comm": interleaved,
        **recompute[config.recompute],
    }


def process_group(group: Any) -> dist.ProcessGroup:
    """Narrow the type of one of Megatron's groups, which is None before `init_distributed`."""
    assert isinstance(group, dist.ProcessGroup)
    return group


def whole_weight(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Make a parameter of ones that every tensor-parallel rank has whole."""
    ones = torch.ones(shape, dtype=config.params_dtype, device=current_device())
    weight = torch.nn.Parameter(ones)
    # Tells Megatron that a rank has the gradient of its own tokens only.
    weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
    return weight


def on_every_rank(condition: bool) -> bool:
    """Return whether `condition` holds on all ranks. Every rank calls it."""
    flag = torch.tensor(float(condition), device=current_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def data_parallel_rank() -> int:
    """Return this rank's index among the data-parallel ranks."""
    return parallel_state.get_data_parallel_rank()


def data_parallel_sum(partial: Tensor) -> Tensor:
    """Sum a tensor over the data-parallel ranks. Every rank calls it; `partial` stays as it is."""
    total = partial.clone()
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total


def shutdown() -> None:
    """Leave the process groups. Every rank calls it."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def all_gather_on_host(received: list[Tensor], own: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `received` with the flat tensor `own` of each rank of `group`, all in host memory.

    Every rank calls it.
    """
    if len(received) == 1:
        received[0].copy_(own)
        return
    device = current_device()
    for start in range(0, len(own), _PIECE):
        piece = own[start : start + _PIECE].to(device)
        pieces = [torch.empty_like(piece) for _ in received]
        dist.all_gather(pieces, piece, group)
        for whole, part in zip(received, pieces, strict=True):
            whole[start : start + _PIECE].copy_(part)

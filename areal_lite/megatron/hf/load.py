"""Read a Hugging Face checkpoint into the parameters that this rank holds."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state
from safetensors import safe_open
from transformers import PretrainedConfig

from areal_lite.data.model_folder import weight_files
from areal_lite.megatron.architectures import layout
from areal_lite.megatron.lora import is_adapter
from areal_lite.megatron.model import Backbone


def global_parameters(chunks: Sequence[Backbone]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Iterate over this rank's parameters, without those of adapters.

    Layers and experts are counted over the whole model.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if not is_adapter(name):
                yield chunk.global_name(name), parameter


def is_expert(name: str) -> bool:
    """Return whether the parameter belongs to an expert, which other groups split and replicate."""
    return ".local_experts." in name


def split_rank(name: str) -> tuple[int, int]:
    """Return (this rank, ranks) of the group over which the parameter is split."""
    if is_expert(name):
        rank = parallel_state.get_expert_tensor_parallel_rank()
        ranks = parallel_state.get_expert_tensor_parallel_world_size()
    else:
        rank = parallel_state.get_tensor_model_parallel_rank()
        ranks = parallel_state.get_tensor_model_parallel_world_size()
    assert rank is not None and ranks is not None
    return rank, ranks


@torch.no_grad()
def load_hf(chunks: Sequence[Backbone], folder: Path, hf: PretrainedConfig) -> None:
    """Set this rank's parameters from the safetensors files in `folder`.

    Raises ValueError for a missing or damaged file, a missing tensor, or a wrong shape.
    """
    index = weight_files(folder)
    readers = {path: safe_open(path, "pt") for path in set(index.values())}
    for name, parameter in global_parameters(chunks):
        plan = layout(name, hf)
        for tensor in plan.names:
            if tensor not in index:
                raise ValueError(
                    f"{folder}: no tensor {tensor} in its safetensors files: is it complete?"
                )
        sources = [readers[index[tensor]].get_slice(tensor) for tensor in plan.names]
        shard = plan.shard(hf, sources, *split_rank(name))
        if shard.shape != parameter.shape:
            raise ValueError(
                f"{folder}: {plan.names[0]} does not have the shape that config.json implies"
            )
        parameter.copy_(shard)

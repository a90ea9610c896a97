"""Write adapters in the format of Hugging Face's PEFT.

A folder has `adapter_config.json` and `adapter_model.safetensors`. PEFT has an adapter for each
projection. Projections that Megatron fuses share one A, so each of them gets a copy of it.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from areal_lite.config import LoraConfig
from areal_lite.megatron.hf.adapter_stream import AdapterStream
from areal_lite.megatron.hf.export import SHARD_BYTES
from areal_lite.megatron.model import Backbone
from areal_lite.run_dir.manifest import write_manifest
from areal_lite.system.files import new_folder


def export_adapter(
    chunks: Sequence[Backbone],
    hf: PretrainedConfig,
    lora: LoraConfig,
    source: Path,
    folder: Path,
    dtype: torch.dtype,
) -> None:
    """Write the adapters of a model that is whole on this rank.

    `folder` appears under its name when it is complete and on disk.

    Args:
        source: the model that they adapt.
        dtype: of A and B in the file.
    """
    tensors = {
        f"base_model.model.{name}": tensor.to("cpu", dtype).clone()
        for bucket in AdapterStream(chunks, hf).buckets(SHARD_BYTES)
        for name, tensor in bucket
    }
    projections = sorted({name.split(".")[-3] for name in tensors})
    with new_folder(folder) as scratch:
        config = scratch / "adapter_config.json"
        config.write_text(json.dumps(peft_config(lora, source, projections), indent=2) + "\n")
        save_file(tensors, scratch / "adapter_model.safetensors", metadata={"format": "pt"})
        write_manifest(scratch, {})


def peft_config(lora: LoraConfig, source: Path, projections: list[str]) -> dict[str, object]:
    """Describe the adapters in PEFT's terms."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": projections,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }

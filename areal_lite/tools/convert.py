"""Convert a checkpoint of the trainer to a Hugging Face folder, or its adapters to PEFT's format.

It takes seconds to import (torch), so only the commands that convert do.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PretrainedConfig

from areal_lite.config import LoraConfig, TrainerConfig
from areal_lite.megatron.checkpoint import load_weights, stored_part
from areal_lite.megatron.hf import SHARD_BYTES, AdapterStream, WeightStream, export_hf, load_hf
from areal_lite.megatron.model import Backbone, Chunks, build_chunks
from areal_lite.megatron.parallel import init_distributed, shutdown
from areal_lite.run_dir.resume import write_manifest
from areal_lite.system.files import new_folder

_PART = "policy"


def export_adapter(
    chunks: Sequence[Backbone],
    hf: PretrainedConfig,
    lora: LoraConfig,
    source: Path,
    folder: Path,
    dtype: torch.dtype,
) -> None:
    """Write the adapters of a model that is whole on this rank, as Hugging Face's PEFT does.

    PEFT has an adapter for each projection. Projections that Megatron fuses share one A, so each of
    them gets a copy of it. `source` is the model that they adapt; `dtype` is that of the file.
    """
    tensors = {
        f"base_model.model.{name}": tensor.to("cpu", dtype).clone()
        for bucket in AdapterStream(chunks, hf).buckets(SHARD_BYTES)
        for name, tensor in bucket
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with new_folder(folder) as scratch:
        (scratch / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, scratch / "adapter_model.safetensors", metadata={"format": "pt"})
        write_manifest(scratch, {})


def convert(
    checkpoint: Path, source: Path, folder: Path, dtype: str, adapter: bool = False
) -> torch.dtype:
    """Write the policy in `checkpoint`, a folder step-N, to `folder`; return its dtype.

    Everything but the weights is copied from `source`, from which the run started. dtype: `auto` is
    that of the checkpoint. adapter: write the adapters alone instead of adding them to the weights.

    The checkpoint may be of any parallel layout. The call joins process groups of its own and
    leaves them, so it needs a process without any. Raises ValueError when the checkpoint is not of
    the model in `source`, or has no adapters to write.
    """
    trained, lora = stored_part(checkpoint, _PART)
    if adapter and not lora.rank:
        raise ValueError(
            f"{checkpoint}: this checkpoint has no adapters, so leave out adapter=true"
        )
    wanted = trained if dtype == "auto" else getattr(torch, dtype)
    trainer = TrainerConfig(device="cpu", lora=lora)
    init_distributed(trainer, seed=0)
    try:
        hf = AutoConfig.from_pretrained(source, local_files_only=True)
        chunks = build_chunks(hf, trained, trainer, tie=hf.tie_word_embeddings)
        if lora.rank and not adapter:
            load_hf(chunks, source, hf)
        load_weights(checkpoint, _PART, Chunks(chunks))
        if adapter:
            export_adapter(chunks, hf, lora, source, folder, wanted)
        else:
            export_hf(WeightStream(chunks, hf).buckets(SHARD_BYTES), source, folder, wanted)
    finally:
        shutdown()
    return wanted

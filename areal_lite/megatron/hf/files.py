"""Hugging Face folders: read one into this rank's parameters, and write models and adapters."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, PretrainedConfig

from areal_lite.config import LoraConfig, TrainerConfig
from areal_lite.data.model_folder import weight_files
from areal_lite.megatron.architectures import layout
from areal_lite.megatron.checkpoint import load_weights, stored_lora, weights_dtype
from areal_lite.megatron.hf.stream import (
    AdapterStream,
    Bucket,
    WeightStream,
    global_parameters,
    split_rank,
)
from areal_lite.megatron.model import Backbone, Chunks, build_chunks
from areal_lite.megatron.parallel import init_distributed, shutdown
from areal_lite.run_dir.manifest import write_manifest
from areal_lite.system.files import new_folder

SHARD_BYTES = 4 << 30  # of one file
_INDEX = "model.safetensors.index.json"
# Files with other suffixes in a checkpoint folder are weights.
_COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja")
_PART = "policy"


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


def export_hf(buckets: Iterator[Bucket], source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the weights in `buckets`, a file for each; copy everything else from `source`.

    `folder` appears under its name when it is complete and on disk. Its manifest has the checksum
    of every file.
    """
    with new_folder(folder) as scratch:
        for path in source.iterdir():
            if path.suffix in _COPIED_SUFFIXES and path.name not in ("config.json", _INDEX):
                shutil.copy2(path, scratch / path.name)
        config = json.loads((source / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _write_weights(buckets, scratch, dtype)
        write_manifest(scratch, {})


def _write_weights(buckets: Iterator[Bucket], folder: Path, dtype: torch.dtype) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(buckets, 1):
        tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in bucket}
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        # safetensors lets only the owner read, and a server may run as another user.
        shutil.copymode(folder / "config.json", folder / file)
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(t.nbytes for t in tensors.values())
    if len(set(weight_map.values())) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


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
    them gets a copy of it. `folder` appears under its name when it is complete and on disk.

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


def convert(
    checkpoint: Path, source: Path, folder: Path, dtype: str, adapter: bool = False
) -> torch.dtype:
    """Write the policy in `checkpoint` to `folder`, and return the dtype of its weights.

    Adapters are added to the weights, or written alone.

    The checkpoint may be of any parallel layout. The call joins process groups of its own and
    leaves them, so it needs a process without any. Raises ValueError when the checkpoint is not of
    the model in `source`, or has no adapters to write.

    Args:
        checkpoint: a folder step-N of a run.
        source: the Hugging Face folder from which the run started. Everything but the weights is
            copied from it.
        folder: where to write; it is replaced when the export is complete.
        dtype: of the weights; `auto` is that of the checkpoint.
        adapter: write the adapters alone, in PEFT's format.
    """
    lora = stored_lora(checkpoint, _PART)
    if adapter and not lora.rank:
        raise ValueError(
            f"{checkpoint}: this checkpoint has no adapters, so leave out adapter=true"
        )
    trained = weights_dtype(checkpoint, _PART)
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

"""Hugging Face checkpoints <-> the parameters of this tensor-parallel rank.

`layout(name)` says of a Megatron parameter which Hugging Face tensors it holds, and how the shards of all tensor-parallel ranks and those
tensors make each other up. Import, export and weight pushes all go through it, so a round trip gives the same bits back.

| Megatron                        | Hugging Face                      | split over ranks           |
|---------------------------------|-----------------------------------|----------------------------|
| word_embeddings, output_layer   | embed_tokens, lm_head             | rows (vocabulary)          |
| linear_qkv                      | q_proj, k_proj, v_proj            | rows, by key-value group   |
| linear_fc1                      | gate_proj, up_proj                | rows of each               |
| linear_proj, linear_fc2         | o_proj, down_proj                 | columns                    |
| layer norms                     | the same                          | not                        |
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

from areal_lite.trainer.files import publish_folder, scratch_folder
from areal_lite.trainer.model import head_dim

SHARD_BYTES = 4 << 30  # of an exported checkpoint
# Beside these, a checkpoint folder holds only weights.
COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja")
Bucket = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Layout:
    """One parameter's Hugging Face tensors. `split(tensors, ranks)` gives each rank's shard; `join(shards)` gives the tensors back."""

    names: tuple[str, ...]
    split: Callable[[list[Tensor], int], list[Tensor]]
    join: Callable[[list[Tensor]], list[Tensor]]


def _cat(shards: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Without tensor parallelism nothing is copied: a push of the weights would read and write them once more."""
    return shards[0] if len(shards) == 1 else torch.cat(shards, dim)


def _whole(name: str) -> Layout:
    return Layout((name,), lambda tensors, ranks: tensors * ranks, lambda shards: shards[:1])


def _sliced(name: str, dim: int) -> Layout:
    return Layout((name,), lambda tensors, ranks: list(tensors[0].chunk(ranks, dim)), lambda shards: [_cat(shards, dim)])


def _gated(names: tuple[str, str]) -> Layout:
    def split(tensors: list[Tensor], ranks: int) -> list[Tensor]:
        gate, up = (t.chunk(ranks) for t in tensors)
        return [torch.cat(pair) for pair in zip(gate, up)]

    def join(shards: list[Tensor]) -> list[Tensor]:
        gate, up = zip(*(shard.chunk(2) for shard in shards))
        return [_cat(gate), _cat(up)]

    return Layout(names, split, join)


def _qkv(names: tuple[str, str, str], hf: PretrainedConfig) -> Layout:
    """Megatron interleaves by key-value group: the queries of the group, its key, its value."""
    groups, dim = hf.num_key_value_heads, head_dim(hf)
    queries = hf.num_attention_heads // groups * dim

    def split(tensors: list[Tensor], ranks: int) -> list[Tensor]:
        by_group = torch.cat([t.unflatten(0, (groups, -1)) for t in tensors], 1)
        return [part.flatten(0, 1) for part in by_group.chunk(ranks)]

    def join(shards: list[Tensor]) -> list[Tensor]:
        parts = _cat(shards).unflatten(0, (groups, -1)).split((queries, dim, dim), 1)
        return [part.flatten(0, 1).contiguous() for part in parts]

    return Layout(names, split, join)


def layout(name: str, hf: PretrainedConfig) -> Layout:
    """How the Megatron parameter `name` is kept in a Hugging Face checkpoint."""
    top = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}
    if name in top:
        return _sliced(top[name], 0)
    if name == "decoder.final_layernorm.weight":
        return _whole("model.norm.weight")
    _, _, index, part = name.split(".", 3)
    layer, kind = f"model.layers.{index}", part.rpartition(".")[2]
    if part.startswith("self_attention.linear_qkv."):
        return _qkv(tuple(f"{layer}.self_attn.{x}_proj.{kind}" for x in "qkv"), hf)
    if part == "mlp.linear_fc1.weight":
        return _gated((f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight"))
    columns = {"self_attention.linear_proj.weight": "self_attn.o_proj.weight", "mlp.linear_fc2.weight": "mlp.down_proj.weight"}
    if part in columns:
        return _sliced(f"{layer}.{columns[part]}", 1)
    norms = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    }
    return _whole(f"{layer}.{norms[part]}")


def load_hf(model: torch.nn.Module, folder: Path, hf: PretrainedConfig, group: dist.ProcessGroup) -> None:
    """Set this rank's parameters from the safetensors files in `folder`. Raises ValueError for a missing file or tensor."""
    index = weight_files(folder)
    readers = {path: safe_open(path, "pt") for path in set(index.values())}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            plan = layout(name, hf)
            missing = [n for n in plan.names if n not in index]
            if missing:
                raise ValueError(f"{folder}: no tensor {missing[0]} in its safetensors files")
            tensors = [readers[index[n]].get_tensor(n) for n in plan.names]
            shard = plan.split(tensors, group.size())[group.rank()]
            if shard.shape != parameter.shape:
                raise ValueError(f"{folder}: {plan.names[0]} does not have the shape that config.json implies")
            parameter.copy_(shard)


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it. Raises ValueError when the folder has none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no safetensors files; is it a Hugging Face checkpoint folder?")
    index: dict[str, Path] = {}
    for path in files:
        with safe_open(path, "pt") as reader:
            index.update(dict.fromkeys(reader.keys(), path))
    return index


def hf_weights(model: torch.nn.Module, hf: PretrainedConfig, group: dist.ProcessGroup, bucket_bytes: int) -> Iterator[Bucket]:
    """Whole Hugging Face tensors in buckets of about `bucket_bytes` (more only where one parameter is larger).

    All ranks of the tensor-parallel `group` iterate together, and each gets every tensor. Use a bucket before asking for the next: its
    memory is given up then, and without tensor parallelism most tensors are views of the live parameters.
    """
    bucket: Bucket = []
    held = 0
    for name, parameter in model.named_parameters():
        size = parameter.nbytes * group.size()
        if bucket and held + size > bucket_bytes:
            yield bucket
            bucket, held = [], 0
        plan = layout(name, hf)
        bucket.extend(zip(plan.names, plan.join(_gather(parameter.detach(), group))))
        held += size
    if bucket:
        yield bucket


def _gather(shard: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards


def export_hf(buckets: Iterator[Bucket], source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write a checkpoint that transformers and SGLang load: weights from `buckets`, all else copied from the folder `source`.

    The folder appears under its name only when it is complete and on disk.
    """
    scratch = scratch_folder(folder)
    for path in source.iterdir():
        if path.suffix in COPIED_SUFFIXES and path.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copy2(path, scratch / path.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weight_map: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(buckets, 1):
        tensors = {name: tensor.contiguous().cpu() for name, tensor in bucket}
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, scratch / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(t.nbytes for t in tensors.values())
    if len(set(weight_map.values())) == 1:
        (scratch / "model-00001.safetensors").rename(scratch / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (scratch / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    publish_folder(scratch, folder)

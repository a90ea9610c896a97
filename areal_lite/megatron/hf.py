"""Hugging Face checkpoints <-> the parameters of a model that is spread over tensor-, pipeline- and expert-parallel ranks.

Import: each rank reads from the safetensors files the slices that it holds, and nothing else. Export and weight pushes: global rank 0 gets
every tensor, bucket after bucket, so that no rank ever holds a copy of the whole model. Both go by the tables of `architectures`, whose
names count layers and experts over the whole model; a round trip gives the same bits back.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

from areal_lite.megatron.architectures import layout
from areal_lite.system.files import publish_folder, scratch_folder

SHARD_BYTES = 4 << 30  # of an exported checkpoint
# Beside these, a checkpoint folder holds only weights.
COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja")
Bucket = list[tuple[str, Tensor]]

_LOCAL_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_LOCAL_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


def global_parameters(
    chunks: Sequence[torch.nn.Module],
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters, with layers and experts counted over the whole model. `chunks`: its parts of the model, one per virtual stage."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            found = _LOCAL_LAYER.search(name)
            if found:
                layer = chunk.decoder.layers[int(found[0])]
                name = _LOCAL_LAYER.sub(str(layer.layer_number - 1), name)
                name = _LOCAL_EXPERT.sub(
                    lambda expert: str(layer.mlp.local_expert_indices[int(expert[0])]), name
                )
            yield name, parameter


def _is_expert(name: str) -> bool:
    return ".local_experts." in name


def _split_rank(name: str) -> tuple[int, int]:
    """(this rank, ranks) of the group over which the parameter is split."""
    if _is_expert(name):
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


@torch.no_grad()
def load_hf(chunks: Sequence[torch.nn.Module], folder: Path, hf: PretrainedConfig) -> None:
    """Set this rank's parameters from the safetensors files in `folder`. Raises ValueError for a missing file or tensor, or a wrong shape."""
    index = weight_files(folder)
    readers = {path: safe_open(path, "pt") for path in set(index.values())}
    for name, parameter in global_parameters(chunks):
        plan = layout(name, hf)
        missing = [n for n in plan.names if n not in index]
        if missing:
            raise ValueError(f"{folder}: no tensor {missing[0]} in its safetensors files")
        shard = plan.shard(
            hf, [readers[index[n]].get_slice(n) for n in plan.names], *_split_rank(name)
        )
        if shard.shape != parameter.shape:
            raise ValueError(
                f"{folder}: {plan.names[0]} does not have the shape that config.json implies"
            )
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


class WeightStream:
    """The live weights under their Hugging Face names, brought together on global rank 0. Every rank constructs one, together.

    `takes_part` says whether this rank holds something that rank 0 needs: one replica of each parameter is enough, so it is False on most
    data- and context-parallel ranks, except where those share experts.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], hf: PretrainedConfig):
        self.hf = hf
        self.own = {
            name: p
            for name, p in sorted(global_parameters(chunks), key=_order)
            if self._sends(name)
        }
        mine = [(name, _split_rank(name)[0], tuple(p.shape)) for name, p in self.own.items()]
        rank, world = dist.get_rank(), dist.get_world_size()
        self.takes_part = bool(mine) or rank == 0
        gathered = [None] * world if rank == 0 else None
        dist.gather_object(mine, gathered)
        # Of each parameter, in the order in which it is sent: (rank in its split, global rank, shape) of its shards.
        self.shards: dict[str, list[tuple[int, int, tuple[int, ...]]]] = {}
        for sender, theirs in enumerate(gathered or []):
            for name, part, shape in theirs:
                self.shards.setdefault(name, []).append((part, sender, shape))
        self.shards = {
            name: sorted(shards) for name, shards in sorted(self.shards.items(), key=_order)
        }

    def _sends(self, name: str) -> bool:
        if name == "output_layer.weight" and self.hf.tie_word_embeddings:
            return False  # a last pipeline stage's copy of the embedding
        if layout(name, self.hf).replicated and _split_rank(name)[0] > 0:
            return False
        if _is_expert(name):
            return parallel_state.get_expert_data_parallel_rank() == 0
        return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0

    def buckets(self, bucket_bytes: int) -> Iterator[Bucket]:
        """On rank 0: whole tensors in buckets of about `bucket_bytes` (more only where one parameter is larger), each tensor once.

        All ranks that take part iterate together; on those other than 0 there are no buckets, and the first step sends everything.
        The stream keeps no bucket: one lives as long as its consumer holds it, so a consumer that asks for the next before it has used one
        holds two. Of a parameter that is not split most tensors are views of the live parameter: use them before the next update.
        """
        if dist.get_rank() > 0:
            for parameter in self.own.values():
                dist.send(parameter.detach(), 0)
            return
        bucket: Bucket = []
        held = 0
        itemsize = next(iter(self.own.values())).itemsize
        for name, shards in self.shards.items():
            size = itemsize * sum(torch.Size(shape).numel() for _, _, shape in shards)
            if bucket and held + size > bucket_bytes:
                yield bucket
                bucket, held = [], 0
            plan = layout(name, self.hf)
            bucket.extend(zip(plan.names, plan.join(self.hf, self._receive(name, shards))))
            held += size
        yield bucket

    def _receive(self, name: str, shards: list[tuple[int, int, tuple[int, ...]]]) -> list[Tensor]:
        like = next(iter(self.own.values())).detach()
        tensors = [
            self.own[name].detach() if sender == 0 else like.new_empty(shape)
            for _, sender, shape in shards
        ]
        for request in [
            dist.irecv(tensor, sender)
            for tensor, (_, sender, _) in zip(tensors, shards)
            if sender > 0
        ]:
            request.wait()
        return tensors


def _order(item: tuple[str, object]) -> tuple[int, str]:
    """Layer by layer, the same on all ranks: what comes first is sent first."""
    name = item[0]
    layer = _LOCAL_LAYER.search(name)
    return (int(layer[0]) if layer else -1, name)


def export_hf(buckets: Iterator[Bucket], source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write a checkpoint that transformers and SGLang load: weights from `buckets`, a file each, all else copied from the folder `source`.

    The folder appears under its name only when it is complete and on disk.
    """
    scratch = scratch_folder(folder)
    for path in source.iterdir():
        if path.suffix in COPIED_SUFFIXES and path.name not in (
            "config.json",
            "model.safetensors.index.json",
        ):
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

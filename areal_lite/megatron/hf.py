"""Hugging Face checkpoints <-> the parameters of a model that is spread over many ranks.

* `load_hf`: each rank reads from the safetensors files the slices that it holds, and nothing else.
* `WeightStream`: global rank 0 receives every tensor, bucket after bucket, for exports and weight
  pushes. No rank ever holds a copy of the whole model. `AdapterStream` has the adapters alone.
* `export_hf` writes a folder.

A round trip returns the same bits (architectures.py).
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

from areal_lite.data.model_folder import UNTRAINED, open_tensors, weight_files
from areal_lite.megatron.architectures import EXPERT, layout
from areal_lite.megatron.lora import adapters, is_adapter
from areal_lite.megatron.model import LAYER, Backbone
from areal_lite.megatron.parallel import process_group
from areal_lite.megatron.parameters import Parameter, Replicated, RowParallel
from areal_lite.run_dir.resume import write_manifest
from areal_lite.system import heartbeat
from areal_lite.system.files import new_folder

Bucket = list[tuple[str, Tensor]]
# (rank in its split, global rank, shape) of one shard of a parameter.
_Shard = tuple[int, int, tuple[int, ...]]
# What a tensor's name ends with, in place of `.weight` of the weight that it adapts, as in PEFT.
_A, _B = ".lora_A.weight", ".lora_B.weight"
SHARD_BYTES = 4 << 30  # of one file
_INDEX = "model.safetensors.index.json"
# Files with other suffixes in a checkpoint folder are weights.
_COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja")


def global_parameters(chunks: Sequence[Backbone]) -> Iterator[tuple[str, Tensor]]:
    """Iterate over this rank's matrices, without adapters, by their names in the whole model."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if not is_adapter(name):
                yield from chunk.matrices(name, parameter)


def split_group(name: str) -> dist.ProcessGroup:
    """Return the ranks over which the parameter is split."""
    if EXPERT.search(name):
        return process_group(parallel_state.get_expert_tensor_parallel_group())
    return process_group(parallel_state.get_tensor_model_parallel_group())


class WeightStream:
    """Buckets of whole tensors on rank 0. All ranks construct it together.

    A weight with an adapter is sent with the adapter added to it. One replica of each parameter is
    enough, so most data- and context-parallel ranks send nothing, unless they share experts.
    """

    def __init__(self, chunks: Sequence[Backbone], hf: PretrainedConfig):
        self.hf = hf
        self._adapters = dict(adapters(chunks))
        parameters = sorted(self._parameters(chunks), key=_order)
        self.own = {name: p for name, p in parameters if self._sends(name)}
        mine = [(name, split_group(name).rank(), tuple(p.shape)) for name, p in self.own.items()]
        rank = dist.get_rank()
        gathered: list = [None] * dist.get_world_size()
        dist.gather_object(mine, gathered if rank == 0 else None)
        shards: dict[str, list[_Shard]] = {}
        for sender, theirs in enumerate(gathered if rank == 0 else []):
            for name, part, shape in theirs:
                shards.setdefault(name, []).append((part, sender, shape))
        # Parameters in the order in which they are sent, with their shards in the order of ranks.
        self.shards = {name: sorted(found) for name, found in sorted(shards.items(), key=_order)}
        self._connect()

    def _connect(self) -> None:
        """Exchange one number with every sender.

        NCCL connects two ranks at their first exchange, which would otherwise be within a pause.
        """
        numbers = [parameter.detach().new_zeros(1) for parameter in self.own.values()][:1]
        if dist.get_rank() > 0:
            for number in numbers:
                dist.send(number, 0)
            return
        senders = {sender for shards in self.shards.values() for _, sender, _ in shards} - {0}
        for sender in sorted(senders):
            dist.recv(numbers[0], sender)

    def _parameters(self, chunks: Sequence[Backbone]) -> Iterator[tuple[str, Tensor]]:
        return (each for each in global_parameters(chunks) if layout(each[0], self.hf).trained)

    def _plan(self, name: str) -> Parameter:
        return layout(name, self.hf)

    def _sends(self, name: str) -> bool:
        if name == "output_layer.weight" and self.hf.tie_word_embeddings:
            return False  # a last pipeline stage's copy of the embedding
        if self._plan(name).replicated and split_group(name).rank() > 0:
            return False
        if EXPERT.search(name):
            return parallel_state.get_expert_data_parallel_rank() == 0
        return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0

    def buckets(self, bucket_bytes: int) -> Iterator[Bucket]:
        """Iterate over whole tensors in buckets of about `bucket_bytes`, each tensor once.

        A bucket is larger only when one parameter is. All ranks iterate together; ranks other than
        0 get no buckets, and their first step sends everything.

        The stream keeps no bucket: a consumer that still holds the last one holds two. Most tensors
        of a parameter that is not split are views of the live parameter: use them before the next
        update.
        """
        if dist.get_rank() > 0:
            for name in self.own:
                dist.send(self._value(name), 0)
            return
        bucket: Bucket = []
        held = 0
        itemsize = next(iter(self.own.values())).itemsize
        # Several experts may share a tensor.
        for tensors, group in groupby(self.shards, lambda name: self._plan(name).names):
            names = list(group)
            shapes = [shape for name in names for _, _, shape in self.shards[name]]
            size = itemsize * sum(torch.Size(shape).numel() for shape in shapes)
            follows = names[0].endswith(_B)  # its A, in the same bucket
            if bucket and held + size > bucket_bytes and not follows:
                heartbeat.beat()
                yield bucket
                bucket, held = [], 0
            parts = [self._plan(n).join(self.hf, self._receive(n, self.shards[n])) for n in names]
            whole = parts[0] if len(parts) == 1 else [torch.stack([part for (part,) in parts])]
            bucket.extend(zip(tensors, whole, strict=True))
            held += size
        yield bucket

    def _value(self, name: str) -> Tensor:
        """Return this rank's shard of the parameter, or of its sum with an adapter."""
        own, adapter = self.own[name].detach(), self._adapters.get(name)
        return adapter.merged(own) if adapter else own

    def _receive(self, name: str, shards: list[_Shard]) -> list[Tensor]:
        like = next(iter(self.own.values())).detach()
        tensors = [
            self._value(name) if sender == 0 else like.new_empty(shape)
            for _, sender, shape in shards
        ]
        senders = [sender for _, sender, _ in shards]
        requests = [dist.irecv(x, sender) for x, sender in zip(tensors, senders) if sender > 0]
        for request in requests:
            assert request is not None
            request.wait()
        return tensors


class AdapterStream(WeightStream):
    """Buckets of A [rank, in] and B [out, rank] of every adapted Hugging Face weight, on rank 0.

    Both are in one bucket, A first. Projections that Megatron fuses have a copy of one A.
    """

    def _parameters(self, chunks: Sequence[Backbone]) -> Iterator[tuple[str, Tensor]]:
        for weight, adapter in adapters(chunks):
            yield weight.removesuffix(".weight") + _A, adapter.a
            yield weight.removesuffix(".weight") + _B, adapter.b

    def _plan(self, name: str) -> Parameter:
        end = _A if name.endswith(_A) else _B
        weight = layout(name.removesuffix(end) + ".weight", self.hf)
        # A row-parallel layer splits its inputs, and so A. Other layers split their outputs, and B.
        split = isinstance(weight, RowParallel) == (end == _A)
        names = (each.removesuffix(".weight") + end for each in weight.names)
        return (type(weight) if split else Replicated)(*names)


def _order(item: tuple[str, object]) -> tuple[int, str, int]:
    """Order parameters layer by layer, and experts by their numbers, the same on all ranks."""
    (layer, expert), name = (each.search(item[0]) for each in (LAYER, EXPERT)), item[0]
    number = int(expert[0]) if expert else -1
    return int(layer[0]) if layer else -1, EXPERT.sub("{expert}", name), number


@torch.no_grad()
def load_hf(chunks: Sequence[Backbone], folder: Path, hf: PretrainedConfig) -> None:
    """Set this rank's parameters from the safetensors files in `folder`.

    Raises ValueError for a missing or damaged file, a missing tensor, or a wrong shape.
    """
    readers = open_tensors(weight_files(folder), "pt")
    for name, parameter in global_parameters(chunks):
        plan = layout(name, hf)
        for tensor in plan.names:
            if tensor not in readers:
                raise ValueError(
                    f"{folder}: no tensor {tensor} in its safetensors files: is it complete?"
                )
        sources = [readers[tensor].get_slice(tensor) for tensor in plan.names]
        split = split_group(name)
        shard = plan.shard(hf, sources, split.rank(), split.size())
        if shard.shape != parameter.shape:
            raise ValueError(
                f"{folder}: {plan.names[0]} does not have the shape that config.json implies"
            )
        parameter.copy_(shard)


def export_hf(buckets: Iterator[Bucket], source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the weights in `buckets`, a file for each; copy everything else from `source`.

    `folder` appears under its name when it is complete and on disk, with a manifest of checksums.
    """
    with new_folder(folder) as scratch:
        for path in source.iterdir():
            if path.suffix in _COPIED_SUFFIXES and path.name not in ("config.json", _INDEX):
                shutil.copy2(path, scratch / path.name)
        config = json.loads((source / "config.json").read_text())
        for name in ("torch_dtype", "quantization_config"):
            config.pop(name, None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _write_weights(chain(buckets, _untrained(source)), scratch, dtype)
        write_manifest(scratch, {})


def _untrained(source: Path) -> Iterator[Bucket]:
    """Read the tensors that no training changes, in their own dtype."""
    for name, reader in open_tensors(weight_files(source), "pt").items():
        if name.endswith(UNTRAINED):
            yield [(name, reader.get_tensor(name))]


def _write_weights(buckets: Iterator[Bucket], folder: Path, dtype: torch.dtype) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(buckets, 1):
        tensors = {
            name: tensor.to("cpu", None if name.endswith(UNTRAINED) else dtype).contiguous()
            for name, tensor in bucket
        }
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

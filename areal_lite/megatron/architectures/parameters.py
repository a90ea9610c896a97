"""How one Megatron parameter is made of Hugging Face tensors, and split over the ranks of its tensor-parallel group.

Every kind has `names`, its Hugging Face tensors, and
* `shard(hf, sources, rank, ranks)`: the part of rank `rank` of `ranks`, read from `sources` (safetensors slices of the tensors in `names`);
  only what the rank needs is read,
* `join(hf, shards)`: the Hugging Face tensors, from the parts of all ranks in order. One part is not copied where it need not be: a push
  of the weights would read and write them once more.

Both only move numbers, so a round trip gives the same bits back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig


class Source(Protocol):
    """A tensor in a file: what `safe_open(...).get_slice(name)` gives."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor: ...


def head_dim(hf: PretrainedConfig) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def padded_vocab(hf: PretrainedConfig, tensor_parallel: int) -> int:
    """Rows of the embedding and the output layer over all ranks: `vocab_size`, rounded up to a multiple of `tensor_parallel`.

    The rows from `vocab_size` on are zero, are never exported, and are no tokens: their logits must not count in a softmax.
    """
    return -(-hf.vocab_size // tensor_parallel) * tensor_parallel


@dataclass(frozen=True)
class Parameter:
    """`names` may hold `{expert}`, which counts over the whole model."""

    names: tuple[str, ...]
    replicated = False  # whether every rank has the whole of it

    def __init__(self, *names: str):
        object.__setattr__(self, "names", names)

    def shard(
        self, hf: PretrainedConfig, sources: Sequence[Source], rank: int, ranks: int
    ) -> Tensor:
        raise NotImplementedError

    def join(self, hf: PretrainedConfig, shards: Sequence[Tensor]) -> list[Tensor]:
        raise NotImplementedError


class Replicated(Parameter):
    """One tensor, the same on all ranks."""

    replicated = True

    def shard(self, hf, sources, rank, ranks):
        return sources[0][:]

    def join(self, hf, shards):
        return list(shards[:1])


class RowParallel(Parameter):
    """One matrix [out, in], split by its inputs."""

    def shard(self, hf, sources, rank, ranks):
        return sources[0][:, _span(sources[0].get_shape()[1], rank, ranks)]

    def join(self, hf, shards):
        return [_cat(shards, 1)]


class GatedColumnParallel(Parameter):
    """Gate and up projection, split by rows; a rank has its rows of the one, then those of the other."""

    def shard(self, hf, sources, rank, ranks):
        return torch.cat([_rows(source, rank, ranks) for source in sources])

    def join(self, hf, shards):
        return [_cat(part) for part in zip(*(shard.chunk(2) for shard in shards))]


class QKV(Parameter):
    """Query, key and value projection. Megatron interleaves them by key-value group: the queries of the group, its key, its value."""

    def shard(self, hf, sources, rank, ranks):
        groups = hf.num_key_value_heads // ranks
        return torch.cat(
            [_rows(source, rank, ranks).unflatten(0, (groups, -1)) for source in sources], 1
        ).flatten(0, 1)

    def join(self, hf, shards):
        groups, dim = hf.num_key_value_heads, head_dim(hf)
        sizes = (hf.num_attention_heads // groups * dim, dim, dim)
        parts = _cat(shards).unflatten(0, (groups, -1)).split(sizes, 1)
        return [part.flatten(0, 1).contiguous() for part in parts]


class VocabParallel(Parameter):
    """One matrix [vocab_size, hidden], split by rows, with zero rows below it where it does not split evenly (`padded_vocab`)."""

    def shard(self, hf, sources, rank, ranks):
        found = sources[0].get_shape()[0]
        if found != hf.vocab_size:
            raise ValueError(
                f"{self.names[0]} has {found} rows, but config.json says vocab_size={hf.vocab_size}"
            )
        size = padded_vocab(hf, ranks) // ranks
        end = min((rank + 1) * size, hf.vocab_size)
        rows = sources[0][min(rank * size, end) : end]
        return F.pad(rows, (0, 0, 0, size - len(rows)))

    def join(self, hf, shards):
        return [_cat(shards)[: hf.vocab_size]]


def _rows(source: Source, rank: int, ranks: int) -> Tensor:
    return source[_span(source.get_shape()[0], rank, ranks)]


def _span(size: int, rank: int, ranks: int) -> slice:
    part, rest = divmod(size, ranks)
    if rest:
        raise ValueError(
            f"a checkpoint tensor of {size} rows or columns cannot be split over {ranks} tensor-parallel ranks"
        )
    return slice(rank * part, (rank + 1) * part)


def _cat(shards: Sequence[Tensor], dim: int = 0) -> Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(shards, dim)

"""Conversion of Hugging Face tensors to one Megatron parameter, split by tensor parallelism.

Matrices are [out, in]. Each kind of parameter has

* `names`: its Hugging Face tensors,
* `shard`: reads the part of one rank, and only that part, from the safetensors files,
* `join`: makes the Hugging Face tensors from the parts of all ranks. A part is not copied where
  that can be avoided, because a weight push would read and write it once more.

Both only move numbers, so a round trip returns the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig


class Source(Protocol):
    """A tensor in a file, as `safe_open(...).get_slice(name)` returns it."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor: ...


def head_dim(hf: PretrainedConfig) -> int:
    """Return the width of one attention head."""
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def padded_vocab(hf: PretrainedConfig, tensor_parallel: int) -> int:
    """Round `vocab_size` up to a multiple of `tensor_parallel`: rows of embedding and output layer.

    Rows from `vocab_size` on are zero and are never exported. They are not tokens, so their logits
    must not count in a softmax.
    """
    return -(-hf.vocab_size // tensor_parallel) * tensor_parallel


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter. Its `names` may hold `{expert}`, counted over the whole model."""

    names: tuple[str, ...]
    replicated = False  # whether every rank holds all of it

    def __init__(self, *names: str):
        object.__setattr__(self, "names", names)

    def shard(
        self, hf: PretrainedConfig, sources: Sequence[Source], rank: int, ranks: int
    ) -> Tensor:
        """Read the part of tensor-parallel rank `rank` of `ranks` from the tensors `sources`."""
        raise NotImplementedError

    def join(self, hf: PretrainedConfig, shards: Sequence[Tensor]) -> list[Tensor]:
        """Make the Hugging Face tensors from the parts of all ranks, in order of rank."""
        raise NotImplementedError


class Replicated(Parameter):
    """One tensor, the same on all ranks."""

    replicated = True

    def shard(self, hf, sources, rank, ranks):
        return sources[0][:]

    def join(self, hf, shards):
        return list(shards[:1])


class RowParallel(Parameter):
    """One matrix, split along its inputs."""

    def shard(self, hf, sources, rank, ranks):
        return sources[0][:, _span(sources[0].get_shape()[1], rank, ranks)]

    def join(self, hf, shards):
        return [_cat(shards, 1)]


class GatedColumnParallel(Parameter):
    """Gate and up projection, each split along its outputs; a rank stacks its parts of the two."""

    def shard(self, hf, sources, rank, ranks):
        return torch.cat([_outputs(source, rank, ranks) for source in sources])

    def join(self, hf, shards):
        return [_cat(part) for part in zip(*(shard.chunk(2) for shard in shards))]


class QKV(Parameter):
    """Query, key and value projection, split along their outputs.

    Megatron interleaves them by key-value group: the queries of the group, its key, its value.
    """

    def shard(self, hf, sources, rank, ranks):
        groups = hf.num_key_value_heads // ranks
        parts = [_outputs(source, rank, ranks).unflatten(0, (groups, -1)) for source in sources]
        return torch.cat(parts, 1).flatten(0, 1)

    def join(self, hf, shards):
        groups, dim = hf.num_key_value_heads, head_dim(hf)
        sizes = (hf.num_attention_heads // groups * dim, dim, dim)
        parts = _cat(shards).unflatten(0, (groups, -1)).split(sizes, 1)
        return [part.flatten(0, 1).contiguous() for part in parts]


class VocabParallel(Parameter):
    """One matrix [vocab_size, hidden], split along the vocabulary, padded as in `padded_vocab`."""

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


def _outputs(source: Source, rank: int, ranks: int) -> Tensor:
    return source[_span(source.get_shape()[0], rank, ranks)]


def _span(size: int, rank: int, ranks: int) -> slice:
    part, rest = divmod(size, ranks)
    if rest:
        raise ValueError(
            f"a checkpoint tensor of {size} rows or columns cannot be split over {ranks}"
            " tensor-parallel ranks"
        )
    return slice(rank * part, (rank + 1) * part)


def _cat(shards: Sequence[Tensor], dim: int = 0) -> Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(tuple(shards), dim)

"""The kinds of parameters: which tensors of a checkpoint each one is, and how ranks split it.

Each kind of parameter knows its Hugging Face tensors (`names`; matrices are [out, in]), and

* `shard`: reads the part of one rank, and only that part, from the safetensors files,
* `join`: makes the Hugging Face tensors from the parts of all ranks. A part is not copied where
  that can be avoided, because a weight push would read and write it once more.
* `cut`: undoes `join` for one rank.

They only move numbers, so a round trip returns the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig


class Source(Protocol):
    """A tensor in a file, as `safe_open(...).get_slice(name)` returns it."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor: ...


@dataclass(frozen=True)
class _Rows:
    """A slice of `size` rows of a source, from row `start` on."""

    source: Source
    start: int
    size: int

    def get_shape(self) -> list[int]:
        return [self.size, *self.source.get_shape()[1:]]

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        assert isinstance(index, slice)
        return self.source[self.start + index.start : self.start + index.stop]


@dataclass(frozen=True)
class _Whole:
    """A tensor in memory as a source."""

    tensor: Tensor

    def get_shape(self) -> list[int]:
        return [*self.tensor.shape]

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        return self.tensor[index]


def head_dim(hf: PretrainedConfig) -> int:
    """Return the width of one attention head."""
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def query_dim(hf: PretrainedConfig) -> int:
    """Return the width of a query, of which multi-latent attention rotates the last part."""
    return getattr(hf, "qk_head_dim", None) or head_dim(hf)


def padded_vocab(hf: PretrainedConfig, tensor_parallel: int) -> int:
    """Round `vocab_size` up to a multiple of `tensor_parallel`: rows of embedding and output layer.

    Rows from `vocab_size` on are zero, are never exported, and must not count in a softmax.
    """
    return -(-hf.vocab_size // tensor_parallel) * tensor_parallel


class Parameter:
    """One Megatron parameter. Its `names` may hold `{expert}`, counted over the whole model."""

    replicated = False  # whether every rank holds all of it
    trained = True  # otherwise servers keep their own, and exports copy that of the source

    def __init__(self, *names: str):
        self.names = names

    def shard(
        self, hf: PretrainedConfig, sources: Sequence[Source], rank: int, ranks: int
    ) -> Tensor:
        """Read the part of tensor-parallel rank `rank` of `ranks` from the tensors `sources`."""
        raise NotImplementedError

    def join(self, hf: PretrainedConfig, shards: Sequence[Tensor]) -> list[Tensor]:
        """Make the Hugging Face tensors from the parts of all ranks, in order of rank."""
        raise NotImplementedError

    def cut(self, hf: PretrainedConfig, tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        """Cut the part of a rank out of `tensors`, which are like those that `join` makes."""
        return self.shard(hf, [_Whole(tensor) for tensor in tensors], rank, ranks)


class Replicated(Parameter):
    """The same on all ranks, and in all tensors if there are several (an adapter's A)."""

    replicated = True

    def shard(self, hf, sources, rank, ranks):
        return sources[0][:]

    def join(self, hf, shards):
        return [shards[0]] * len(self.names)


class Untrained(Replicated):
    trained = False


class SplitVector(Parameter):
    """One vector or matrix, split along its outputs."""

    def shard(self, hf, sources, rank, ranks):
        return _outputs(sources[0], rank, ranks)

    def join(self, hf, shards):
        return [_cat(shards)]


class RowParallel(Parameter):
    """One matrix, split along its inputs."""

    def shard(self, hf, sources, rank, ranks):
        return sources[0][:, _span(sources[0].get_shape()[1], rank, ranks)]

    def join(self, hf, shards):
        return [_cat(shards, 1)]


class GatedColumnParallel(Parameter):
    """Gate and up projection, in two tensors or one; a rank stacks its outputs of each."""

    def shard(self, hf, sources, rank, ranks):
        if len(sources) == 1:
            half = sources[0].get_shape()[0] // 2
            sources = [_Rows(sources[0], start, half) for start in (0, half)]
        return torch.cat([_outputs(source, rank, ranks) for source in sources])

    def join(self, hf, shards):
        parts = [_cat(part) for part in zip(*(shard.chunk(2) for shard in shards))]
        return parts if len(self.names) == 2 else [torch.cat(parts)]


class Stacked(Parameter):
    """A part of a tensor with one entry for each expert, which `join` returns alone: `expert`."""

    expert = 0

    def cut(self, hf, tensors, rank, ranks):
        first = type(self)(*self.names)  # the only expert of these tensors
        return Parameter.cut(first, hf, [tensor[None] for tensor in tensors], rank, ranks)

    def _own(self, source: Source, rank: int, ranks: int, dim: int) -> Tensor:
        """Read the part of a rank along a dimension of an expert's entry."""
        shape = source.get_shape()[1:]
        index = [slice(0, size) for size in shape]
        index[dim] = _span(shape[dim], rank, ranks)
        return source[slice(self.expert, self.expert + 1), *index][0]


class StackedGate(Stacked):
    """Gate and up projection: entries [in, 2 n] or [2 n], in which columns of both alternate."""

    def shard(self, hf, sources, rank, ranks):
        rows = self._own(sources[0], rank, ranks, -1).t()
        return rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)

    def join(self, hf, shards):
        rows = [x.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) for x in shards]
        return [_cat(rows).t()]


class StackedRowParallel(Stacked):
    """Matrices, split along their inputs: entries [in, out]."""

    def shard(self, hf, sources, rank, ranks):
        return self._own(sources[0], rank, ranks, 0).t()

    def join(self, hf, shards):
        return [_cat(shards, 1).t()]


class StackedVector(Stacked, Replicated):
    """Vectors, the same on all ranks."""

    def shard(self, hf, sources, rank, ranks):
        return self._own(sources[0], 0, 1, 0)


class Grouped(Parameter):
    """Tensors made of pieces. A group has its rows of every piece, and a rank has whole groups."""

    def groups(self, hf: PretrainedConfig) -> int:
        raise NotImplementedError

    def pieces(self, hf: PretrainedConfig) -> list[list[int]]:
        """Return the number of rows of each piece of each tensor."""
        raise NotImplementedError

    def shard(self, hf, sources, rank, ranks):
        groups, parts = self.groups(hf) // ranks, []
        for name, source, sizes in zip(self.names, sources, self.pieces(hf), strict=True):
            if (found := source.get_shape()[0]) != sum(sizes):
                raise ValueError(f"{name} has {found} rows, but config.json implies {sum(sizes)}")
            for each in zip(accumulate(sizes[:-1], initial=0), sizes):
                rows = _outputs(_Rows(source, *each), rank, ranks)
                parts.append(rows.unflatten(0, (groups, -1)))
        return torch.cat(parts, 1).flatten(0, 1)

    def join(self, hf, shards):
        groups, pieces = self.groups(hf), self.pieces(hf)
        rows = _cat(shards).unflatten(0, (groups, -1))
        parts = iter(rows.split([size // groups for sizes in pieces for size in sizes], 1))
        return [_cat([next(parts).flatten(0, 1) for _ in sizes]).contiguous() for sizes in pieces]


class QKV(Grouped):
    """Query, key and value projection: a group has queries, the key and the value that they see."""

    def groups(self, hf):
        return hf.num_key_value_heads

    def pieces(self, hf):
        queries = hf.num_attention_heads * head_dim(hf)
        keys = hf.num_key_value_heads * head_dim(hf)
        return [[queries], [keys], [keys]] if len(self.names) == 3 else [[queries, keys, keys]]


class GatedQKV(QKV):
    """With gates. In a file queries and gates alternate; Megatron has a group's queries first."""

    def pieces(self, hf):
        (queries,), *others = super().pieces(hf)
        return [[2 * queries], *others]

    def shard(self, hf, sources, rank, ranks):
        return self._reorder(hf, super().shard(hf, sources, rank, ranks), back=False)

    def join(self, hf, shards):
        return super().join(hf, [self._reorder(hf, _cat(shards), back=True)])

    def _reorder(self, hf: PretrainedConfig, rows: Tensor, *, back: bool) -> Tensor:
        """Exchange the two orders of the heads of each group."""
        ends = 2 * (hf.num_attention_heads // hf.num_key_value_heads)
        order = torch.tensor([*range(0, ends, 2), *range(1, ends, 2), ends, ends + 1])
        heads = rows.unflatten(0, (-1, len(order), head_dim(hf)))
        return heads[:, order.argsort() if back else order].flatten(0, 2)


class DeltaNet(Grouped):
    """Rows of a gated delta net, grouped by key head, in Qwen3-Next's file too (delta_net.py)."""

    def groups(self, hf):
        return hf.linear_num_key_heads

    def pieces(self, hf):
        heads, keys = hf.linear_num_value_heads, hf.linear_num_key_heads * hf.linear_key_head_dim
        values = heads * hf.linear_value_head_dim
        split = [[keys, keys, values], [values], [heads], [heads]]
        packed = [[2 * keys + 2 * values], [2 * heads]]
        return packed if len(self.names) == 2 else split[: len(self.names)]


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

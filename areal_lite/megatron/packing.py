"""Sequences -> microbatches under a token budget, of about equal cost -> the tokens of this rank.

A microbatch is a set of whole sequences laid end to end, without padding. Invariants:

* Every sequence is in exactly one microbatch; none is cut or dropped.
* A microbatch holds at most `budget` tokens, or one sequence that is longer.

The budget bounds memory, which grows with tokens. Time also grows with the square of each length:
in units of the time that a layer's matrices take for one token, a sequence of L tokens costs
L + L^2 / crossover, where `crossover` is the length at which attention takes as much time as the
matrices (`attention_crossover`). Equal costs keep the stages of a pipeline busy.

With n context-parallel ranks each sequence is cut into 2n chunks of equal size, the last ones
padded. Rank r computes chunks r and 2n - 1 - r ("zigzag"), so causal attention costs every rank the
same (Llama 3, arXiv:2407.21783, 3.3.2). With n = 2 and a sequence of 8 tokens:

    tokens   0 1 | 2 3 | 4 5 | 6 7
    rank       0     1     1     0

Queries stay on their rank. Keys and values are gathered from all ranks, and a chunk sees those of
its sequence up to its own end. Where shapes must agree (sequence parallelism, pipeline stages), the
tokens of a rank are padded at the end by sequences of their own. The rest of the code sees whole
microbatches: `gathered_index` undoes the split and drops padding.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from areal_lite.routes import unrecorded
from areal_lite.train_batch import TrainBatch

_Dataclass = TypeVar("_Dataclass", bound=Any)


@dataclass(slots=True, kw_only=True)
class Microbatch:
    """t tokens of n sequences laid end to end."""

    tokens: Tensor  # int64 [t]
    cu_seqlens: Tensor  # int32 [n + 1], the bounds of the sequences
    position_ids: Tensor  # int64 [t], 0 at each sequence's first token
    token_index: Tensor  # int64 [t], the index of each token in the flat batch
    routes: Tensor | None = None  # [t, layers, top_k], as in TrainBatch; with routing replay


def to_device(instance: _Dataclass, device: torch.device) -> _Dataclass:
    """Copy a dataclass with its tensors on `device`."""
    values = {field.name: getattr(instance, field.name) for field in fields(instance)}
    moved = {
        name: value.to(device, non_blocking=True)
        for name, value in values.items()
        if isinstance(value, Tensor)
    }
    return replace(instance, **moved)


def attention_crossover(config: TransformerConfig) -> float:
    """Return the length, in tokens, at which causal attention costs as much as a layer's matrices.

    Per token and layer there are 2 operations for each weight of a matrix, and 2 L width for scores
    and mixing, half of which is masked.
    """
    assert config.kv_channels and config.num_query_groups and config.ffn_hidden_size
    width = config.num_attention_heads * config.kv_channels
    groups = config.num_query_groups * config.kv_channels
    ffn = config.ffn_hidden_size
    if config.num_moe_experts:
        ffn = (config.moe_ffn_hidden_size or ffn) * config.moe_router_topk
    projections = 3 if config.gated_linear_unit else 2
    return config.hidden_size * (2 * width + 2 * groups + projections * ffn) / width


def pack(
    lengths: Sequence[int] | np.ndarray,
    budget: int,
    *,
    crossover: float = math.inf,
    multiple: int = 1,
) -> list[list[int]]:
    """Divide sequences of these lengths into bins of at most `budget` tokens and about equal cost.

    The next longest sequence goes to the cheapest bin; a bin that it does not fit into is closed.
    Sequences that fit use fewer than 2 x tokens / budget + 1 bins; longer ones stand alone. The
    number of bins is a multiple of `multiple`, or there is one for each of too few sequences.

    Returns the indices of the sequences in each bin. Raises ValueError for a budget below 1.
    """
    if budget <= 0:
        raise ValueError(f"trainer.tokens_per_microbatch={budget}: it must be positive")
    sizes = np.asarray(lengths, np.int64)
    order = np.argsort(-sizes, kind="stable")
    alone = int((sizes > budget).sum())
    longest, rest = order[:alone], order[alone:]
    count = -(-int(sizes[rest].sum()) // budget)
    while True:
        count = min(count + -(count + alone) % multiple, len(rest))
        bins, left = _balance(rest, sizes, budget, crossover, count)
        if not left:
            return [[int(i)] for i in longest] + bins
        count += -(-left // budget)


def _balance(
    order: np.ndarray, sizes: np.ndarray, budget: int, crossover: float, count: int
) -> tuple[list[list[int]], int]:
    """Divide the sequences `order`, longest first, into `count` bins.

    Returns the bins and the number of tokens that did not fit.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    capacity = [budget] * count
    open_bins = [(0.0, b) for b in range(count)]  # a heap: (cost, bin), the cheapest first
    ordered = sizes[order]
    for done, (i, size) in enumerate(zip(order.tolist(), ordered.tolist())):
        while open_bins and capacity[open_bins[0][1]] < size:
            heapq.heappop(open_bins)
        if not open_bins:
            return bins, int(ordered[done:].sum())
        cost, target = open_bins[0]
        bins[target].append(i)
        capacity[target] -= size
        heapq.heapreplace(open_bins, (cost + size + size * size / crossover, target))
    return bins, 0


def make_microbatches(
    batch: TrainBatch, budget: int, *, crossover: float = math.inf, multiple: int = 1
) -> list[Microbatch]:
    """Pack the sequences of `batch`, this rank's, into microbatches; see `pack`.

    `token_index` of the result points into the tokens of `batch`. multiple: as an interleaved
    pipeline demands.
    """
    lengths = batch.lengths
    bins = pack(lengths, budget, crossover=crossover, multiple=multiple)
    return [_microbatch(batch, lengths, sorted(members)) for members in bins]


def _microbatch(batch: TrainBatch, lengths: np.ndarray, members: list[int]) -> Microbatch:
    own = lengths[members]
    position_ids = _ragged_arange(own)
    token_index = position_ids + np.repeat(batch.cu_seqlens[members], own)
    return Microbatch(
        tokens=torch.from_numpy(batch.tokens[token_index].astype(np.int64)),
        cu_seqlens=_bounds(own),
        position_ids=torch.from_numpy(position_ids),
        token_index=torch.from_numpy(token_index),
        routes=None if batch.routes is None else torch.from_numpy(batch.routes[token_index]),
    )


@dataclass(slots=True, kw_only=True)
class LocalTokens:
    """l tokens of this rank in m segments laid end to end: sequences, or chunks of sequences.

    The *gathered* tokens are those of all context-parallel ranks laid end to end, rank by rank.
    """

    tokens: Tensor  # int64 [l]
    position_ids: Tensor  # int64 [l], within the sequence
    following: Tensor  # int64 [l], the token after each; arbitrary after a sequence's last one
    cu_seqlens: Tensor  # int32 [m + 1], the bounds of the segments
    gathered_index: Tensor  # int64 [t], the gathered token of each token of the microbatch
    # int64 [k], the gathered index of every key that each segment sees, segment after segment. The
    # last token of a segment sees all its keys, each token before it one less. None without context
    # parallelism.
    key_index: Tensor | None = None
    cu_seqlens_k: Tensor | None = None  # int32 [m + 1], the bounds of the segments in `key_index`
    # [l, layers, top_k], as in TrainBatch; padding has none. None without routing replay.
    routes: Tensor | None = None


def local_length(microbatch: Microbatch, size: int, multiple: int = 1) -> int:
    """Count the tokens of each of `size` ranks with padding, a multiple of `multiple`."""
    lengths = microbatch.cu_seqlens.diff().numpy()
    length = lengths.sum() if size == 1 else 2 * _chunk(lengths, size).sum()
    return int(-(-length // multiple) * multiple)


def local_tokens(microbatch: Microbatch, size: int, rank: int, length: int) -> LocalTokens:
    """Select the tokens of context-parallel rank `rank` of `size`; each has `length`."""
    cu_seqlens = microbatch.cu_seqlens.numpy().astype(np.int64)
    split = [_segments(cu_seqlens, size, r) for r in range(size)]
    gathered_index = np.empty(cu_seqlens[-1], np.int64)
    for r, segments in enumerate(split):
        kept = segments.token_index[segments.real]
        gathered_index[kept] = r * length + np.flatnonzero(segments.real)
    mine = split[rank]
    padding = length - len(mine.token_index)
    # Sequences no longer than the longest real one: attention stays cheap.
    longest = int(mine.counts.max())
    full, rest = divmod(padding, longest)
    tail = np.array([longest] * full + [rest] * (rest > 0), np.int64)
    token_index = np.concatenate((mine.token_index, np.zeros(padding, np.int64)))
    local = LocalTokens(
        tokens=microbatch.tokens[token_index],
        position_ids=microbatch.position_ids[token_index],
        following=microbatch.tokens.roll(-1)[token_index],
        cu_seqlens=_bounds(np.concatenate((mine.counts, tail))),
        gathered_index=torch.from_numpy(gathered_index),
    )
    if microbatch.routes is not None:
        routes = microbatch.routes.numpy()[mine.token_index[mine.real]]
        local.routes = torch.from_numpy(unrecorded(length, routes))
        local.routes.numpy()[np.flatnonzero(mine.real)] = routes
    if size > 1:
        # Keys beyond the end of a sequence are seen by padding only.
        ends = mine.first + mine.counts
        last = np.repeat(np.diff(cu_seqlens)[mine.sequence] - 1, ends)
        starts = np.repeat(cu_seqlens[mine.sequence], ends)
        seen = starts + np.minimum(_ragged_arange(ends), last)
        own_padding = rank * length + np.arange(len(mine.token_index), length)
        local.key_index = torch.from_numpy(np.concatenate((gathered_index[seen], own_padding)))
        local.cu_seqlens_k = _bounds(np.concatenate((ends, tail)))
    return local


@dataclass(slots=True, kw_only=True)
class _Segments:
    """The m segments of one rank, l tokens with padding."""

    sequence: np.ndarray  # int64 [m], the sequence of each segment
    first: np.ndarray  # int64 [m], the position of its first token there
    counts: np.ndarray  # int64 [m], its tokens, with padding
    token_index: np.ndarray  # int64 [l], of the microbatch; padding repeats the sequence's last one
    real: np.ndarray  # bool [l], false for padding


def _segments(cu_seqlens: np.ndarray, size: int, rank: int) -> _Segments:
    starts, lengths = cu_seqlens[:-1], np.diff(cu_seqlens)
    sequence = np.arange(len(lengths))
    if size == 1:
        return _Segments(
            sequence=sequence,
            first=np.zeros_like(lengths),
            counts=lengths,
            token_index=np.arange(cu_seqlens[-1]),
            real=np.ones(cu_seqlens[-1], bool),
        )
    chunk = _chunk(lengths, size)
    sequence, counts = np.repeat(sequence, 2), np.repeat(chunk, 2)
    first = np.stack((rank * chunk, (2 * size - 1 - rank) * chunk), 1).ravel()
    position = np.repeat(first, counts) + _ragged_arange(counts)
    last = np.repeat(lengths[sequence] - 1, counts)
    return _Segments(
        sequence=sequence,
        first=first,
        counts=counts,
        token_index=np.repeat(starts[sequence], counts) + np.minimum(position, last),
        real=position <= last,
    )


def _chunk(lengths: np.ndarray, size: int) -> np.ndarray:
    return -(-lengths // (2 * size))


def _ragged_arange(counts: np.ndarray) -> np.ndarray:
    """Return 0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1, ..."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _bounds(counts: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))

"""The tokens of a microbatch that this rank computes: all, or its share (context parallelism).

With n context-parallel ranks each sequence is cut into 2n chunks of equal size, the last ones
padded. Rank r computes chunks r and 2n - 1 - r ("zigzag"), so causal attention costs every rank the
same (Llama 3, arXiv:2407.21783, 3.3.2). With n = 2 and a sequence of 8 tokens:

    tokens   0 1 | 2 3 | 4 5 | 6 7
    rank       0     1     1     0

Queries stay on their rank. Keys and values are gathered from all ranks, and a chunk sees those of
its sequence up to its own end. Where shapes must agree (sequence parallelism, pipeline stages), the
tokens of a rank are padded at the end by sequences of their own.

The rest of the code sees whole microbatches: `gathered_index` undoes the split and drops padding.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal_lite.megatron.packing import Microbatch
from areal_lite.routes import unrecorded


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
    tail = _padding_counts(padding, int(mine.counts.max()))
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


def _padding_counts(padding: int, longest: int) -> np.ndarray:
    """Divide padding into sequences no longer than the longest real one: attention stays cheap."""
    full, rest = divmod(padding, longest)
    return np.array([longest] * full + [rest] * (rest > 0), np.int64)


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

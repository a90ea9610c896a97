"""Which tokens of a microbatch this rank computes: all of them, or its share of each sequence (context parallelism).

With n context-parallel ranks each sequence is cut into 2n chunks of equal size, the last ones padded, and rank r takes chunks r and
2n - 1 - r ("zigzag"): causal attention then costs every rank the same (Llama 3, arXiv:2407.21783, 3.3.2). Queries stay where they are; keys
and values are gathered, and a chunk sees those of its sequence up to its own end.

Where shapes must agree (sequence parallelism, pipeline stages), the tokens of a rank are padded at the end by sequences of their own.
The rest of the code sees whole microbatches: `places` undoes the split, and drops all padding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from areal_lite.megatron.packing import Microbatch


@dataclass(slots=True)
class LocalTokens:
    """l tokens of this rank, in m segments laid end to end: sequences, or chunks of them.

    tokens, position_ids, following int64 [l]: ids, positions in the sequence, and the id of the token after each (any, after the last) ·
    cu_seqlens int32 [m + 1] · places int64 [t]: where token i of the microbatch stands among the tokens of all ranks laid end to end.
    Of context parallelism only: key_rows int64 [k], the tokens (counted like `places`) that each segment sees, segment after segment,
    bounded by cu_seqlens_k int32 [m + 1]; a segment's last token sees all of them, each token before it one less.
    """

    tokens: Tensor
    position_ids: Tensor
    following: Tensor
    cu_seqlens: Tensor
    places: Tensor
    key_rows: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    def to(self, device: torch.device) -> LocalTokens:
        """The same with its tensors on `device`."""
        tensors = (getattr(self, field.name) for field in fields(self))
        return LocalTokens(
            *(None if t is None else t.to(device, non_blocking=True) for t in tensors)
        )


def local_length(microbatch: Microbatch, size: int, multiple: int = 1) -> int:
    """Tokens of the microbatch that each of `size` context-parallel ranks computes, padding included: a multiple of `multiple`."""
    lengths = microbatch.cu_seqlens.diff().numpy()
    length = lengths.sum() if size == 1 else 2 * _chunk(lengths, size).sum()
    return int(-(-length // multiple) * multiple)


def local_tokens(microbatch: Microbatch, size: int, rank: int, length: int) -> LocalTokens:
    """The `length` tokens (at least `local_length`) of `rank` among `size` context-parallel ranks. The microbatch is in CPU memory."""
    cu_seqlens = microbatch.cu_seqlens.numpy().astype(np.int64)
    split = [_segments(cu_seqlens, size, r) for r in range(size)]
    places = np.empty(cu_seqlens[-1], np.int64)
    for r, segments in enumerate(split):
        places[segments.rows[segments.real]] = r * length + np.flatnonzero(segments.real)
    mine = split[rank]
    padding = length - len(mine.rows)
    # No padding sequence is longer than the longest real one: attention to it stays cheap.
    longest = int(mine.counts.max())
    tail = np.array(
        [longest] * (padding // longest) + [padding % longest] * (padding % longest > 0), np.int64
    )
    rows = np.concatenate((mine.rows, np.zeros(padding, np.int64)))
    local = LocalTokens(
        tokens=microbatch.tokens[rows],
        position_ids=microbatch.position_ids[rows],
        following=microbatch.tokens.roll(-1)[rows],
        cu_seqlens=_bounds(np.concatenate((mine.counts, tail))),
        places=torch.from_numpy(places),
    )
    if size > 1:
        # Keys beyond the end of a sequence are seen by padding only.
        ends = mine.first + mine.counts
        last = np.diff(cu_seqlens)[mine.sequence] - 1
        seen = np.repeat(cu_seqlens[mine.sequence], ends) + np.minimum(
            _ragged_arange(ends), np.repeat(last, ends)
        )
        own = rank * length + np.arange(len(mine.rows), length)
        local.key_rows = torch.from_numpy(np.concatenate((places[seen], own)))
        local.cu_seqlens_k = _bounds(np.concatenate((ends, tail)))
    return local


@dataclass(slots=True)
class _Segments:
    """sequence, first, counts int64 [m]: the sequence of each segment, its first position there, its tokens with padding.
    rows int64, real bool [l]: the token of the microbatch at each place (padding repeats the sequence's last), and whether it is no padding."""

    sequence: np.ndarray
    first: np.ndarray
    counts: np.ndarray
    rows: np.ndarray
    real: np.ndarray


def _segments(cu_seqlens: np.ndarray, size: int, rank: int) -> _Segments:
    starts, lengths = cu_seqlens[:-1], np.diff(cu_seqlens)
    sequence = np.arange(len(lengths))
    if size == 1:
        return _Segments(
            sequence,
            np.zeros_like(lengths),
            lengths,
            np.arange(cu_seqlens[-1]),
            np.ones(cu_seqlens[-1], bool),
        )
    chunk = _chunk(lengths, size)
    sequence, counts = np.repeat(sequence, 2), np.repeat(chunk, 2)
    first = np.stack((rank * chunk, (2 * size - 1 - rank) * chunk), 1).ravel()
    position = np.repeat(first, counts) + _ragged_arange(counts)
    last = np.repeat(lengths[sequence] - 1, counts)
    rows = np.repeat(starts[sequence], counts) + np.minimum(position, last)
    return _Segments(sequence, first, counts, rows, position <= last)


def _chunk(lengths: np.ndarray, size: int) -> np.ndarray:
    return -(-lengths // (2 * size))


def _ragged_arange(counts: np.ndarray) -> np.ndarray:
    """0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1, ..."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _bounds(counts: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))

"""Sequences -> microbatches under a token budget.

A microbatch is a set of whole sequences laid end to end, without padding. Every sequence is in exactly one microbatch; none is cut or
dropped. A sequence longer than the budget gets a microbatch of its own. Data-parallel ranks may run different numbers of microbatches:
gradients are reduced once, after the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal_lite.trajectory import TrainBatch


@dataclass(slots=True)
class MicroBatch:
    """t tokens of n sequences laid end to end.

    tokens int64 [t] · cu_seqlens int32 [n + 1] · position_ids int64 [t] (0 at each sequence's first token) ·
    where int64 [t]: the index of each token in the flat batch that the microbatch was made from.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    position_ids: Tensor
    where: Tensor
    max_seqlen: int

    def to(self, device: torch.device) -> MicroBatch:
        """The same microbatch with its tensors on `device`."""
        tensors = (t.to(device, non_blocking=True) for t in (self.tokens, self.cu_seqlens, self.position_ids, self.where))
        return MicroBatch(*tensors, self.max_seqlen)


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `budget` tokens: first-fit decreasing, so that a bin's sequences are of similar length.

    Uses at most 11/9 of the fewest possible bins, plus one (Johnson 1973). Raises ValueError when the budget is not positive.
    """
    if budget <= 0:
        raise ValueError(f"trainer.tokens_per_microbatch={budget}: must be positive")
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        target = next((b for b, free in enumerate(room) if lengths[i] <= free), len(bins))
        if target == len(bins):
            bins.append([])
            room.append(budget)
        bins[target].append(i)
        room[target] -= lengths[i]
    return bins


def make_microbatches(batch: TrainBatch, budget: int) -> list[MicroBatch]:
    """The sequences of `batch` in microbatches of at most `budget` tokens; `where` points into the tokens of `batch`."""
    lengths = batch.lengths
    return [_microbatch(batch, lengths, sorted(members)) for members in pack(lengths.tolist(), budget)]


def _microbatch(batch: TrainBatch, lengths: np.ndarray, members: list[int]) -> MicroBatch:
    own = lengths[members]
    cu_seqlens = np.concatenate(([0], np.cumsum(own)))
    position_ids = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], own)
    where = position_ids + np.repeat(batch.cu_seqlens[members], own)
    return MicroBatch(
        tokens=torch.from_numpy(batch.tokens[where].astype(np.int64)),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        position_ids=torch.from_numpy(position_ids.astype(np.int64)),
        where=torch.from_numpy(where.astype(np.int64)),
        max_seqlen=int(own.max()),
    )

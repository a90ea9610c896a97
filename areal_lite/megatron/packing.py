"""Sequences -> microbatches under a token budget, of about equal cost.

A microbatch is a set of whole sequences laid end to end, without padding. Every sequence is in exactly one microbatch; none is cut or
dropped. A sequence longer than the budget gets a microbatch of its own.

The budget bounds memory, which grows with tokens; time also grows with the square of each length. In units of the time that a layer's
matrices take for one token, a sequence of L tokens costs L + L^2 / crossover, where `crossover` is the length at which attention takes as
much time as the matrices (`attention_crossover`). Equal costs keep a pipeline's stages busy.

Data-parallel ranks may run different numbers of microbatches, since gradients are reduced once, after the last. Where ranks must keep step
(experts spread over them), they take the largest number that any of them needs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_lite.trajectory import TrainBatch

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


@dataclass(slots=True)
class Microbatch:
    """t tokens of n sequences laid end to end.

    tokens int64 [t] · cu_seqlens int32 [n + 1] · position_ids int64 [t] (0 at each sequence's first token) ·
    token_index int64 [t]: the index of each token in the flat batch that the microbatch was made from.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    position_ids: Tensor
    token_index: Tensor
    max_seqlen: int

    def to(self, device: torch.device) -> Microbatch:
        """The same microbatch with its tensors on `device`."""
        tensors = (
            t.to(device, non_blocking=True)
            for t in (self.tokens, self.cu_seqlens, self.position_ids, self.token_index)
        )
        return Microbatch(*tensors, self.max_seqlen)


def attention_crossover(config: TransformerConfig) -> float:
    """The sequence length at which causal attention takes as many operations as a layer's matrices; in Qwen3-0.6B, about 7,700 tokens.

    Per token and layer: 2 operations for each of a matrix's weights, and 2 L width for scores and mixing, half of it masked.
    """
    width, groups = (
        n * config.kv_channels for n in (config.num_attention_heads, config.num_query_groups)
    )
    experts = config.moe_router_topk if config.num_moe_experts else 1
    ffn = (config.moe_ffn_hidden_size if config.num_moe_experts else None) or config.ffn_hidden_size
    matrices = config.hidden_size * (
        2 * width + 2 * groups + (3 if config.gated_linear_unit else 2) * ffn * experts
    )
    return matrices / width


def pack(
    lengths: Sequence[int],
    budget: int,
    *,
    crossover: float = math.inf,
    at_least: int = 0,
    multiple: int = 1,
) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `budget` tokens and about equal cost; a longer sequence stands alone.

    The next longest sequence goes to the cheapest bin; a bin that it does not fit into is closed. So each bin costs at most one of its
    sequences more than any bin that still had room for another such as its own, and fewer than 2 x tokens / budget + 1 bins are used beside
    those of sequences that are too long. There are at least `at_least` bins and a multiple of `multiple`, or one per sequence.
    Raises ValueError when the budget is not positive.
    """
    if budget <= 0:
        raise ValueError(f"trainer.tokens_per_microbatch={budget}: must be positive")
    lengths = np.asarray(lengths, np.int64)
    order = np.argsort(-lengths, kind="stable")
    alone = int((lengths > budget).sum())
    longest, rest = order[:alone], order[alone:]
    count = max(at_least - alone, -(-int(lengths[rest].sum()) // budget))
    while True:
        count = min(count + -(count + alone) % multiple, len(rest))
        bins, left = _balance(rest, lengths, budget, crossover, count)
        if not left:
            return [[int(i)] for i in longest] + bins
        count += -(-left // budget)


def _balance(
    order: np.ndarray, lengths: np.ndarray, budget: int, crossover: float, count: int
) -> tuple[list[list[int]], int]:
    """Deal the sequences `order`, longest first, to `count` bins; also returns how many tokens found no place."""
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [budget] * count
    open_bins = [(0.0, b) for b in range(count)]  # a heap: the cheapest first
    sizes = lengths[order]
    for done, (i, size) in enumerate(zip(order.tolist(), sizes.tolist())):
        while open_bins and room[open_bins[0][1]] < size:
            heapq.heappop(open_bins)
        if not open_bins:
            return bins, int(sizes[done:].sum())
        cost, target = open_bins[0]
        bins[target].append(i)
        room[target] -= size
        heapq.heapreplace(open_bins, (cost + size + size * size / crossover, target))
    return bins, 0


def make_microbatches(
    batch: TrainBatch,
    budget: int,
    *,
    crossover: float = math.inf,
    group: dist.ProcessGroup | None = None,
    multiple: int = 1,
) -> list[Microbatch]:
    """The sequences of `batch` in microbatches of at most `budget` tokens; `token_index` points into the tokens of `batch`.

    group: ranks that should run equally many microbatches; all of them call this. multiple: of what their number should be, as an
    interleaved pipeline demands. A rank with too few sequences has fewer: as many as it has sequences.
    """
    lengths = batch.lengths
    bins = pack(lengths, budget, crossover=crossover, multiple=multiple)
    if group is not None and group.size() > 1:
        most = torch.tensor(
            len(bins), device=torch.device("cuda") if torch.cuda.is_available() else "cpu"
        )
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        bins = pack(lengths, budget, crossover=crossover, at_least=int(most), multiple=multiple)
    return [_microbatch(batch, lengths, sorted(members)) for members in bins]


def _microbatch(batch: TrainBatch, lengths: np.ndarray, members: list[int]) -> Microbatch:
    own = lengths[members]
    cu_seqlens = np.concatenate(([0], np.cumsum(own)))
    position_ids = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], own)
    token_index = position_ids + np.repeat(batch.cu_seqlens[members], own)
    return Microbatch(
        tokens=torch.from_numpy(batch.tokens[token_index].astype(np.int64)),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        position_ids=torch.from_numpy(position_ids.astype(np.int64)),
        token_index=torch.from_numpy(token_index.astype(np.int64)),
        max_seqlen=int(own.max()),
    )

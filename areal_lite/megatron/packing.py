"""Sequences -> microbatches under a token budget, of about equal cost.

A microbatch is a set of whole sequences laid end to end, without padding. Invariants:

* Every sequence is in exactly one microbatch; none is cut or dropped.
* A microbatch holds at most `budget` tokens, or one sequence that is longer.

The budget bounds memory, which grows with tokens. Time also grows with the square of each length:
in units of the time that a layer's matrices take for one token, a sequence of L tokens costs
L + L^2 / crossover, where `crossover` is the length at which attention takes as much time as the
matrices (`attention_crossover`). Equal costs keep the stages of a pipeline busy.

Data-parallel ranks may run different numbers of microbatches, because gradients are reduced once,
after the last.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from areal_lite.train_batch import TrainBatch

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

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
    and mixing, half of which is masked. Qwen3-0.6B: about 7,700 tokens.
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
    """Divide sequences into bins of at most `budget` tokens and about equal cost.

    The next longest sequence goes to the cheapest bin; a bin that it does not fit into is closed.
    So, without its shortest sequence, a bin costs no more than any bin that has room for one more
    sequence like its own shortest. Sequences that fit use fewer than 2 x tokens / budget + 1 bins;
    longer ones stand alone.

    Args:
        lengths: tokens of each sequence.
        crossover: tokens, see the module's docstring.
        multiple: the number of bins is a multiple of this, or one for each of too few sequences.

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
    cu_seqlens = np.concatenate(([0], np.cumsum(own)))
    position_ids = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], own)
    token_index = position_ids + np.repeat(batch.cu_seqlens[members], own)
    return Microbatch(
        tokens=torch.from_numpy(batch.tokens[token_index].astype(np.int64)),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        position_ids=torch.from_numpy(position_ids.astype(np.int64)),
        token_index=torch.from_numpy(token_index.astype(np.int64)),
        routes=None if batch.routes is None else torch.from_numpy(batch.routes[token_index]),
    )

"""Sequences -> microbatches under a token budget, of about equal cost -> the tokens of this rank.

A microbatch is a set of whole sequences. The model computes their trie (prefixes.py), laid end to
end without padding: each prefix that they share once. Invariants:

* Every sequence is in exactly one microbatch; none is cut or dropped.
* The model computes at most `budget` tokens of a microbatch, or one sequence that is longer.

Sequences that share much stay together. The budget bounds memory, which grows with tokens. Time
also grows with the square of each length: in units of the time that a layer's matrices take for one
token, the tokens a to b of a sequence cost b - a + (b^2 - a^2) / crossover, where `crossover` is
the length at which attention takes as much time as the matrices (`attention_crossover`). Equal
costs keep the stages of a pipeline busy.

With n context-parallel ranks each branch of the trie is cut into 2n chunks of equal size, the last
ones padded. Rank r computes chunks r and 2n - 1 - r ("zigzag"), so causal attention costs every
rank the same (Llama 3, arXiv:2407.21783, 3.3.2). With n = 2 and a sequence of 8 tokens:

    tokens   0 1 | 2 3 | 4 5 | 6 7
    rank       0     1     1     0

Queries stay on their rank. A branch or chunk sees the keys of its sequence up to its own end, which
are gathered from the trie and from all ranks. Where shapes must agree (sequence parallelism,
pipeline stages), the tokens of a rank are padded at the end by sequences of their own. The head
computes results for the *rows* of `LocalTokens`. The rest of the code sees whole microbatches.
"""

import heapq
import math
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from areal_lite.megatron.prefixes import (
    Sorted,
    Trie,
    build_trie,
    families,
    keys_of,
    ragged_arange,
    sort_sequences,
    unshared,
)
from areal_lite.routes import unrecorded
from areal_lite.train_batch import TrainBatch

_Dataclass = TypeVar("_Dataclass", bound=Any)


@dataclass(slots=True, kw_only=True)
class Microbatch:
    """t tokens of n sequences laid end to end, and the trie of them that the model computes."""

    tokens: Tensor  # int64 [t]
    cu_seqlens: Tensor  # int32 [n + 1], the bounds of the sequences
    position_ids: Tensor  # int64 [t], 0 at each sequence's first token
    token_index: Tensor  # int64 [t], the index of each token in the flat batch
    scored: Tensor  # bool [t], the tokens that get a log-prob and an entropy; others have zeros
    trie: Trie
    routes: Tensor | None = None  # [t, layers, top_k], as in TrainBatch; with routing replay


def to_device(instance: _Dataclass, device: torch.device) -> _Dataclass:
    """Copy a dataclass with its tensors on `device`."""
    values = ((field.name, getattr(instance, field.name)) for field in fields(instance))
    tensors = {name: value for name, value in values if isinstance(value, Tensor)}
    return replace(instance, **{n: x.to(device, non_blocking=True) for n, x in tensors.items()})


def attention_crossover(config: TransformerConfig) -> float:
    """Return the length, in tokens, at which causal attention costs as much as a layer's matrices.

    Per token and layer there are 2 operations for each weight of a matrix, and 2 L width for scores
    and mixing, half of which is masked. Layers with a gated delta net have the matrices alone.
    """
    assert config.kv_channels and config.num_query_groups and config.ffn_hidden_size
    width = config.num_attention_heads * config.kv_channels
    groups = config.num_query_groups * config.kv_channels
    ffn = config.ffn_hidden_size
    if config.num_moe_experts:
        ffn = (config.moe_ffn_hidden_size or ffn) * config.moe_router_topk
    projections = 3 if config.gated_linear_unit else 2
    length = config.hidden_size * (2 * width + 2 * groups + projections * ffn) / width
    nets = config.linear_attention_freq
    return length / (1 - sum(nets) / len(nets)) if isinstance(nets, list) else length


def pack(
    sizes: np.ndarray, budget: int, *, costs: np.ndarray | None = None, multiple: int = 1
) -> list[list[int]]:
    """Divide items of these sizes into bins of at most `budget` tokens and about equal cost.

    The next largest item goes to the cheapest bin; a bin that it does not fit into is closed. Items
    that fit use fewer than 2 x tokens / budget + 1 bins; larger ones stand alone. The number of
    bins is a multiple of `multiple`, or there is one for each of too few items.

    costs: float [n]; by default the sizes. Returns the indices of the items in each bin. Raises
    ValueError for a budget below 1.
    """
    if budget <= 0:
        raise ValueError(f"trainer.tokens_per_microbatch={budget}: it must be positive")
    costs = sizes if costs is None else costs
    order = np.argsort(-sizes, kind="stable")
    alone = int((sizes > budget).sum())
    largest, rest = order[:alone], order[alone:]
    count = -(-int(sizes[rest].sum()) // budget)
    while True:
        count = min(count + -(count + alone) % multiple, len(rest))
        bins, left = _balance(rest, sizes[rest], costs[rest], budget, count)
        if not left:
            return [[int(i)] for i in largest] + bins
        count += -(-left // budget)


def _balance(
    items: np.ndarray, sizes: np.ndarray, costs: np.ndarray, budget: int, count: int
) -> tuple[list[list[int]], int]:
    """Divide `items`, the largest first, into `count` bins.

    Returns the bins and the number of tokens that did not fit.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    capacity = [budget] * count
    open_bins = [(0.0, b) for b in range(count)]  # a heap: (cost, bin), the cheapest first
    for done, (i, size, cost) in enumerate(zip(items.tolist(), sizes.tolist(), costs.tolist())):
        while open_bins and capacity[open_bins[0][1]] < size:
            heapq.heappop(open_bins)
        if not open_bins:
            return bins, int(sizes[done:].sum())
        before, target = open_bins[0]
        bins[target].append(i)
        capacity[target] -= size
        heapq.heapreplace(open_bins, (before + cost, target))
    return bins, 0


def make_microbatches(
    batch: TrainBatch,
    budget: int,
    *,
    crossover: float = math.inf,
    multiple: int = 1,
    scored: np.ndarray | None = None,
    share: bool = True,
) -> list[Microbatch]:
    """Pack the sequences of `batch`, this rank's, into microbatches; see `pack`.

    `token_index` of the result points into the tokens of `batch`. multiple: as an interleaved
    pipeline demands; share: whether prefixes are computed once; scored: bool [T], the tokens that
    need a log-prob. The model computes nothing after the last of them. None: all tokens, and the
    state after the last one.
    """
    lengths, bounds = _computed_lengths(batch, scored), batch.cu_seqlens
    found = unshared(len(lengths))
    if share:
        keys = keys_of(batch.tokens, batch.routes)
        found = sort_sequences([keys[s : s + n] for s, n in zip(bounds[:-1], lengths)])
    ordered = lengths[found.order]
    starts = families(ordered, found.shared, budget)
    shared = found.shared.copy()
    shared[starts] = 0
    costs = ordered - shared + (ordered**2 - shared**2) / crossover
    sizes = np.add.reduceat(ordered - shared, starts)
    bins = pack(sizes, budget, costs=np.add.reduceat(costs, starts), multiple=multiple)
    members = np.split(np.arange(len(lengths)), starts[1:])
    if scored is None:
        scored = np.ones(len(batch.tokens), bool)
    places = [np.concatenate([members[i] for i in sorted(one)]) for one in bins]
    return [_microbatch(batch, lengths, scored, found, some) for some in places]


def _computed_lengths(batch: TrainBatch, scored: np.ndarray | None) -> np.ndarray:
    """Count the tokens of each sequence that the model computes, at least one: int64 [n].

    A log-prob needs the tokens before its own.
    """
    if scored is None:
        return batch.lengths
    starts, ends = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
    marked = np.concatenate(([-1], np.flatnonzero(scored)))
    last = marked[np.searchsorted(marked, ends) - 1]
    return np.maximum(last - starts, 1)


def _microbatch(
    batch: TrainBatch, lengths: np.ndarray, scored: np.ndarray, found: Sorted, places: np.ndarray
) -> Microbatch:
    """Make the microbatch of the sequences at `places` of the order `found`, ascending."""
    members = np.sort(found.order[places])
    own = batch.lengths[members]
    position_ids = ragged_arange(own)
    token_index = position_ids + np.repeat(batch.cu_seqlens[members], own)
    bounds = np.cumsum([0, *own])
    # Neighbors here share the least of what the sequences between them share.
    passed = found.shared[: places[-1] + 1]
    shared = np.minimum.reduceat(passed, places[:-1] + 1) if len(places) > 1 else []
    order = np.searchsorted(members, found.order[places])
    here = Sorted(order, np.array([0, *shared], np.int64))
    return Microbatch(
        tokens=torch.from_numpy(batch.tokens[token_index].astype(np.int64)),
        cu_seqlens=_bounds(own),
        position_ids=torch.from_numpy(position_ids),
        token_index=torch.from_numpy(token_index),
        scored=torch.from_numpy(scored[token_index]),
        trie=build_trie(lengths[members], bounds[:-1], here, bounds[-1]),
        routes=None if batch.routes is None else torch.from_numpy(batch.routes[token_index]),
    )


@dataclass(slots=True, kw_only=True)
class LocalTokens:
    """l tokens of this rank in m segments laid end to end: branches of a trie, or their chunks.

    The *gathered* tokens are those of all context-parallel ranks laid end to end, rank by rank.
    """

    tokens: Tensor  # int64 [l]
    position_ids: Tensor  # int64 [l], within the sequence
    cu_seqlens: Tensor  # int32 [m + 1], the bounds of the segments
    # Results are computed for r rows, equally many on each rank: one for each state, or for each
    # state and token after it, that the microbatch asks for.
    rows: Tensor  # int64 [r], the token of this rank whose hidden state it is
    targets: Tensor  # int64 [r], the token after it
    # int64 [t], the row of each token of the microbatch among the rows of all ranks; after the last
    # one where the token has no result
    result_index: Tensor
    # int64 [k], the gathered index of every key that each segment sees, segment after segment. The
    # last token of a segment sees all its keys, each token before it one less. None where they are
    # the segment's own tokens.
    key_index: Tensor | None = None
    cu_seqlens_k: Tensor | None = None  # int32 [m + 1], the bounds of the segments in `key_index`
    # [l, layers, top_k], as in TrainBatch; padding has none. None without routing replay.
    routes: Tensor | None = None


def local_length(microbatch: Microbatch, size: int, multiple: int = 1) -> int:
    """Count the tokens of each of `size` ranks with padding, a multiple of `multiple`."""
    counts = microbatch.trie.counts
    length = counts.sum() if size == 1 else 2 * _chunk(counts, size).sum()
    return int(-(-length // multiple) * multiple)


def local_tokens(
    microbatch: Microbatch, size: int, rank: int, length: int, *, states: bool = False
) -> LocalTokens:
    """Select the tokens of context-parallel rank `rank` of `size`; each has `length`.

    states: results are of states and not of the tokens after them; see policy.py.
    """
    trie = microbatch.trie
    split = [_segments(trie, size, r) for r in range(size)]
    place = np.empty(len(trie.token), np.int64)  # the gathered index of each node
    for r, segments in enumerate(split):
        place[segments.node[segments.real]] = r * length + np.flatnonzero(segments.real)
    mine = split[rank]
    padding = length - len(mine.node)
    # Sequences no longer than the longest real one: attention stays cheap.
    longest = int(mine.counts.max())
    full, rest = divmod(padding, longest)
    tail = np.array([longest] * full + [rest] * (rest > 0), np.int64)
    token = np.concatenate((trie.token[mine.node], np.zeros(padding, np.int64)))
    rows, targets, result_index = _rows(microbatch, place, size, rank, length, states)
    local = LocalTokens(
        tokens=microbatch.tokens[token],
        position_ids=microbatch.position_ids[token],
        cu_seqlens=_bounds(np.concatenate((mine.counts, tail))),
        rows=torch.from_numpy(rows),
        targets=torch.from_numpy(targets),
        result_index=torch.from_numpy(result_index),
    )
    if microbatch.routes is not None:
        routes = microbatch.routes.numpy()[trie.token[mine.node[mine.real]]]
        local.routes = torch.from_numpy(unrecorded(length, routes))
        local.routes.numpy()[np.flatnonzero(mine.real)] = routes
    if size > 1 or trie.first.any():
        # Keys beyond the end of a branch are seen by padding only.
        ends = mine.first + mine.counts
        last = np.repeat(trie.ends[mine.branch] - 1, ends)
        starts = np.repeat(microbatch.cu_seqlens.numpy()[trie.sequence[mine.branch]], ends)
        seen = trie.node[starts + np.minimum(ragged_arange(ends), last)]
        own_padding = rank * length + np.arange(len(mine.node), length)
        local.key_index = torch.from_numpy(np.concatenate((place[seen], own_padding)))
        local.cu_seqlens_k = _bounds(np.concatenate((ends, tail)))
    return local


def _rows(
    microbatch: Microbatch, place: np.ndarray, size: int, rank: int, length: int, states: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, targets and result_index of `LocalTokens`. place: int64 [c], of the nodes."""
    tokens, bounds = microbatch.tokens.numpy(), microbatch.cu_seqlens.numpy()
    before = np.arange(len(tokens)) - 1
    before[bounds[:-1]] = bounds[1:] - 1  # a first token gets the state after the last one
    if states:
        asked, following = np.arange(len(tokens)), np.zeros_like(tokens)
    else:
        scored = microbatch.scored.numpy() & (microbatch.position_ids.numpy() > 0)
        asked = np.flatnonzero(scored)
        following = tokens[asked]
    # Equal pairs of a state and the token after it are one row.
    state = place[microbatch.trie.node[before[asked]]]
    pairs, inverse = np.unique(state << 32 | following, return_inverse=True)
    state, following = pairs >> 32, pairs & 0xFFFFFFFF
    owner = state // length
    counts = np.bincount(owner, minlength=size)
    most = max(int(counts.max()), 1)
    result_index = np.full(len(tokens), size * most)
    result_index[asked] = (owner * most + ragged_arange(counts))[inverse]
    rows, targets = np.zeros((2, most), np.int64)
    rows[: counts[rank]] = state[owner == rank] - rank * length
    targets[: counts[rank]] = following[owner == rank]
    return rows, targets, result_index


@dataclass(slots=True, kw_only=True)
class _Segments:
    """The m segments of one rank, l tokens with padding."""

    branch: np.ndarray  # int64 [m], the branch of each segment
    first: np.ndarray  # int64 [m], the position of its first token in the branch's sequence
    counts: np.ndarray  # int64 [m], its tokens, with padding
    node: np.ndarray  # int64 [l], the node of each token; padding repeats the branch's last one
    real: np.ndarray  # bool [l], false for padding


def _segments(trie: Trie, size: int, rank: int) -> _Segments:
    branch, nodes = np.arange(len(trie.counts)), len(trie.token)
    if size == 1:
        return _Segments(
            branch=branch,
            first=trie.first,
            counts=trie.counts,
            node=np.arange(nodes),
            real=np.ones(nodes, bool),
        )
    chunk = _chunk(trie.counts, size)
    branch, counts = np.repeat(branch, 2), np.repeat(chunk, 2)
    first = np.stack((rank * chunk, (2 * size - 1 - rank) * chunk), 1).ravel()
    place = np.repeat(first, counts) + ragged_arange(counts)
    last = np.repeat(trie.counts[branch] - 1, counts)
    starts = np.cumsum(trie.counts) - trie.counts
    return _Segments(
        branch=branch,
        first=trie.first[branch] + first,
        counts=counts,
        node=np.repeat(starts[branch], counts) + np.minimum(place, last),
        real=place <= last,
    )


def _chunk(lengths: np.ndarray, size: int) -> np.ndarray:
    return -(-lengths // (2 * size))


def _bounds(counts: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))

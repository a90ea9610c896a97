"""Sequences -> the trie of their prefixes: what a causal model computes, each token once.

The output of a model at a token depends on the tokens up to it alone. Sequences that begin with the
same tokens therefore share what is computed there: the samples of a group share their prompt, the
traces of an episode their history. A *node* is a distinct prefix, computed as its last token:

    sequence 0   a b c d      nodes 0 1 2 3     branch 0: nodes 0 1 2 3
    sequence 1   a b e              0 1 4       branch 1: node 4, which sees nodes 0 and 1
    sequence 2   a b c              0 1 2       no branch

A branch is what a sequence adds to the trie, so there is at most one for each sequence, and the
last token of a branch sees all nodes of its sequence. Gradients of a shared node add up over its
sequences, as the chain rule says: results equal the plain layout's up to rounding.

In lexicographic order neighbors share most, so one pass over the sorted sequences finds the trie.
The order is reversed: a sequence that is a prefix of another comes after it and adds nothing.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from areal_lite.trajectory import shared_length

_CUT = 20
"""A family ends where a cut computes at most one token in so many twice."""


class Sorted(NamedTuple):
    """Sequences in an order in which each shares most with the one before it."""

    order: np.ndarray  # int64 [n], indices of sequences
    shared: np.ndarray  # int64 [n], tokens that each one in this order shares with the one before


@dataclass(slots=True, kw_only=True)
class Trie:
    """c nodes in m branches, laid end to end, of n sequences with t tokens in all."""

    node: np.ndarray  # int64 [t], the node of each token; -1 where none is computed
    token: np.ndarray  # int64 [c], the index of a token of each node
    sequence: np.ndarray  # int64 [m], the sequence that each branch ends
    first: np.ndarray  # int64 [m], the position of the branch's first token there
    counts: np.ndarray  # int64 [m], its nodes

    @property
    def ends(self) -> np.ndarray:
        """Return the position after each branch's last token, int64 [m]: the nodes it sees."""
        return self.first + self.counts


def keys_of(tokens: np.ndarray, routes: np.ndarray | None) -> np.ndarray:
    """Return what must be equal for two tokens to be one node: bytes, uint8 [t, width].

    Their order is that of the tokens. tokens: int32 [t]. Replayed routes, [t, layers, top_k],
    decide which experts compute a token, so they must be equal, too.
    """
    parts = [tokens.astype(">u4").view(np.uint8).reshape(len(tokens), 4)]
    if routes is not None:
        parts.append(np.ascontiguousarray(routes).reshape(len(tokens), -1).view(np.uint8))
    return np.concatenate(parts, 1) if len(parts) > 1 else parts[0]


def sort_sequences(keys: list[np.ndarray]) -> Sorted:
    """Sort sequences, given by the keys of their tokens, uint8 [length, width]."""
    strings = [key.tobytes() for key in keys]
    order = sorted(range(len(keys)), key=strings.__getitem__, reverse=True)
    shared = [0, *(shared_length(keys[a], keys[b]) for a, b in zip(order, order[1:]))]
    return Sorted(np.array(order, np.int64), np.array(shared, np.int64))


def unshared(count: int) -> Sorted:
    """Return `count` sequences, in their own order, as if none had a prefix of another."""
    return Sorted(np.arange(count), np.zeros(count, np.int64))


def families(lengths: np.ndarray, shared: np.ndarray, budget: int) -> list[int]:
    """Cut sorted sequences into families that are computed together: the index of each first one.

    A cut costs the shared prefix once more. It comes where that is little of what the family has
    already, or where the family would exceed `budget` tokens: there, if possible, in its second
    half, at the place that shares least. A family of one may exceed the budget.

    lengths, shared: int64 [n], in the order of `Sorted`.
    """
    starts, i = [0], 1
    sizes = [int(lengths[0])]  # of the family up to each of its sequences
    while i < len(lengths):
        common = int(shared[i])
        size = sizes[-1] + int(lengths[i]) - common
        if common * _CUT <= sizes[-1]:
            cut = i
        elif size > budget:
            begin = starts[-1]
            half = begin + 1 + int(np.searchsorted(sizes, sizes[-1] / 2))
            cut = min(range(min(half, i), i + 1), key=lambda j: (shared[j], -j))
        else:
            sizes.append(size)
            i += 1
            continue
        starts.append(cut)
        sizes, i = [int(lengths[cut])], cut + 1
    return starts


def build_trie(lengths: np.ndarray, starts: np.ndarray, found: Sorted, total: int) -> Trie:
    """Build the trie of sequences with `lengths` computed tokens from `starts` on, of `total`."""
    node = np.full(total, -1, np.int64)
    count = previous = 0
    for i, common in zip(found.order.tolist(), found.shared.tolist()):
        start, end = int(starts[i]), int(starts[i] + lengths[i])
        node[start : start + common] = node[previous : previous + common]
        node[start + common : end] = np.arange(count, count + end - start - common)
        count, previous = count + end - start - common, start
    own = lengths[found.order] - found.shared
    branch = own > 0
    sequence, first, counts = found.order[branch], found.shared[branch], own[branch]
    return Trie(
        node=node,
        token=ragged_arange(counts) + np.repeat(starts[sequence] + first, counts),
        sequence=sequence,
        first=first,
        counts=counts,
    )


def ragged_arange(counts: np.ndarray) -> np.ndarray:
    """Return 0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1, ..."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)

"""The interface between a training step and an objective.

A step makes these calls, in this order:

    mask         -> which tokens count
    (forward passes fill reference, values and, if prox_pass is "all", prox and entropy)
    set_targets  -> rewards become advantages and returns
    trains_on    -> which sequences can have a gradient
    (if prox_pass is "rest", a forward pass fills prox and entropy where the first update will not)
    minibatch    -> totals of one optimizer update, over all data-parallel ranks
    loss         -> one microbatch's share of that update's loss
    lr_factor    -> how much of the learning rate that update takes

T is the number of tokens and n the number of sequences in a rank's batch; t is the number of tokens
in a microbatch. A token index is an int64 index into the T tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from areal_lite.algo.losses import LossOutput
from areal_lite.algo.reduction import reduction_count
from areal_lite.algo.sequences import sequence_length

# Sums a tensor over the data-parallel ranks. Every rank calls it.
Reduce = Callable[[Tensor], Tensor]

# The tokens of a forward pass before the first update, which fills `prox` and `entropy`:
# all of them; those that the first update does not run on, which fills in its own; or none, in
# which case `loss` fills `prox`, and `entropy` stays 0.
ProxPass = Literal["all", "rest", "none"]

_PER_TOKEN = {
    *("sampled", "mask", "behavior", "versions", "sequence_ids", "prox", "entropy"),
    *("reference", "values", "advantages", "returns"),
}


@dataclass(kw_only=True)
class FlatBatch:
    """The whole groups of one rank as flat tensors on its device.

    The step fills in `reference`, `values`, `advantages` and `returns` only for an objective that
    uses them. `prox_pass` of the objective says when `prox` and `entropy` are
    filled in.
    """

    version: int
    """The trainer's version at the start of the step."""
    sampled: Tensor
    """bool [T]: the policy sampled this token."""
    mask: Tensor
    """bool [T]: the token counts in the loss; a subset of `sampled`."""
    behavior: Tensor
    """float32 [T]: log-probs under the weights that sampled the token."""
    versions: Tensor
    """int [T]: the version of those weights; -1 where the token was not sampled."""
    sequence_ids: Tensor
    """int64 [T]: the index of the token's sequence."""
    prox: Tensor
    """float32 [T]: log-probs under the weights before the step."""
    entropy: Tensor
    """float32 [T]: entropies under the weights before the step."""
    reference: Tensor = field(init=False)
    """float32 [T]: log-probs under the reference policy."""
    values: Tensor = field(init=False)
    """float32 [T]: the critic's values before the step, of the state before each token. The entry
    of a sequence's first token is the value of the state after its last token."""
    advantages: Tensor = field(init=False)
    """float32 [T]."""
    returns: Tensor = field(init=False)
    """float32 [T]: the targets of the critic."""
    rewards: Tensor
    """float32 [n]."""
    group_ids: Tensor
    """int64 [n]: sequences of one prompt share an id."""
    episode_ids: Tensor
    """int64 [n]: the index, from 0, of the sequence's episode, of which it is a trace."""
    truncated: Tensor
    """bool [n]: the sequence ended at the token limit."""

    @property
    def token_episodes(self) -> Tensor:
        """Return the index of each token's episode, int64 [T]."""
        return self.episode_ids[self.sequence_ids]

    @property
    def episode_lengths(self) -> Tensor:
        """Count the unmasked tokens of each episode, over all of its traces: int64 [n]."""
        return sequence_length(self.mask, self.token_episodes, num=len(self.rewards))

    def at(self, token_index: Tensor) -> FlatBatch:
        """Select tokens. Per-sequence tensors stay whole, so that sequence ids stay valid."""
        part = copy.copy(self)
        for name in vars(self).keys() & _PER_TOKEN:
            setattr(part, name, getattr(self, name)[token_index])
        return part


@dataclass(kw_only=True)
class Minibatch:
    """Totals of one optimizer update, for the losses of its microbatches."""

    denominator: float
    """Tokens or episodes over all ranks, as the reduction counts them; at least 1."""
    episode_lengths: Tensor | None = None
    """int64 [n]: the unmasked tokens of each episode, over all of its traces."""
    rejection_limit: Tensor | None = None
    """A scalar: the largest distance that algo/rejection.py accepts at level `batch`."""
    staleness_share: Tensor | None = None
    """float64 [k]: the share of staleness in the log-ratio of a token, from algo/mismatch.py."""
    group_log_q: Tensor | None = None
    """float64 [n]: what `gepo_loss` divides each sequence's probability by."""
    log_z: Tensor | None = None
    """float [n]: Trajectory Balance's log-partition of each episode's group."""
    completions: tuple[Tensor, Tensor] | None = None
    """float [n], int64 [n]: Trajectory Balance's log-ratio and unmasked tokens of each episode."""


class Objective(Protocol):
    """The calls of a training step, in the order given above."""

    @property
    def needs_reference(self) -> bool:
        """Return whether the step computes log-probs under a reference policy."""
        ...

    @property
    def needs_critic(self) -> bool:
        """Return whether the step computes values and trains the critic on the returns."""
        ...

    @property
    def prox_pass(self) -> ProxPass:
        """Return which tokens have a forward pass of their own, for `prox` and `entropy`."""
        ...

    def lr_factor(self, sums: dict[str, float]) -> float:
        """Return the factor of an update's learning rate, given what `loss` summed for it."""
        ...

    def mask(self, batch: FlatBatch) -> Tensor:
        """Return the tokens that count, bool [T]; `batch.mask` marks the usable ones."""
        ...

    def set_targets(self, batch: FlatBatch, reduce: Reduce) -> None:
        """Turn the rewards of `batch` into the targets that the loss reads."""
        ...

    def trains_on(self, batch: FlatBatch) -> Tensor:
        """Return the sequences whose loss can have a gradient, bool [n].

        The model does not run on the others. `loss` gets their tokens once, with the log-probs and
        entropies from before the step. `prox_pass` is not "none" if there are any.
        """
        ...

    def minibatch(
        self,
        batch: FlatBatch,
        token_index: Tensor,
        current_logprobs: Callable[[], Tensor],
        reduce: Reduce,
    ) -> Minibatch:
        """Compute the totals of one optimizer update. Every rank calls it.

        Args:
            batch: the batch of the step
            token_index: int64, the tokens of this update
            current_logprobs: computes log-probs under the present weights, valid at `token_index`;
                call it only if needed, since it can cost a forward pass
            reduce: the sum over data-parallel ranks
        """
        ...

    def loss(
        self,
        batch: FlatBatch,
        minibatch: Minibatch,
        token_index: Tensor,
        logprobs: Tensor,
        entropy: Tensor,
    ) -> LossOutput:
        """Compute one microbatch's share of the loss, and metrics that add up over microbatches.

        Args:
            batch: the batch of the step
            minibatch: the totals of the update that the microbatch belongs to
            token_index: int64 [t], the tokens of the microbatch, in whole sequences
            logprobs: float [t], under the weights being trained, with gradient
            entropy: float [t], of the next-token distribution, with gradient
        """
        ...


def denominator(batch: FlatBatch, token_index: Tensor, *, mode: str, reduce: Reduce) -> float:
    """Count the tokens or episodes of an update over all ranks, as `mode` does; at least 1."""
    count = reduction_count(batch.mask[token_index], batch.token_episodes[token_index], mode=mode)
    device = token_index.device
    total = reduce(torch.tensor(float(count), dtype=torch.float64, device=device))
    return max(1.0, float(total))

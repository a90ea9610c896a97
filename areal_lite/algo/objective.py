"""The interface between a training step and its objective.

A step makes these calls, in this order:

    mask         -> the tokens that count
    (forward passes fill reference, values and, if prox_pass is "all", prox and entropy)
    set_targets  -> rewards become advantages and returns
    trains_on    -> the sequences that can have a gradient
    (if prox_pass is "rest", a forward pass fills prox and entropy where the first update will not)
    minibatch    -> totals of one optimizer update, over all data-parallel ranks
    loss         -> one microbatch's share of that update's loss

T is the number of tokens and n the number of sequences in a rank's batch; t is the number of tokens
in a microbatch. A token index is an int64 index into the T tokens.

A loss of your own, `algo.loss=module:name`, sees the same tensors; see `OwnLoss`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from areal_lite.algo.kl import kl_estimate
from areal_lite.algo.losses import LossOutput
from areal_lite.algo.metrics import by_staleness, entropy_sum
from areal_lite.algo.sequences import reduction_count, sequence_length

# Sums a tensor over the data-parallel ranks. Every rank calls it.
Reduce = Callable[[Tensor], Tensor]

# The tokens of a forward pass before the first update, which fills `prox` and `entropy`: all of
# them; the ones that the first update does not run on, since it fills in its own; or none. In that
# case `loss` fills `prox`, and `entropy` stays 0.
ProxPass = Literal["all", "rest", "none"]

_PER_TOKEN = {
    *("sampled", "mask", "behavior", "versions", "sequence_ids", "prox", "entropy"),
    *("reference", "values", "advantages", "returns"),
}


@dataclass(kw_only=True)
class FlatBatch:
    """The whole groups of one rank, or a selection of their tokens, as flat tensors.

    The step fills in `reference`, `values`, `advantages` and `returns` only for an objective that
    uses them. `prox_pass` of the objective says when `prox` and `entropy` are filled in.
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
    prepared: dict[str, Any] = field(default_factory=dict)
    """What `OwnLoss.prepare` returned."""
    lr_factor: float = 1.0
    """Multiplies the learning rate of the update."""
    log_z: Tensor | None = None
    """float [n]: Trajectory Balance's log-partition of each episode's group."""
    completions: tuple[Tensor, Tensor] | None = None
    """float [n], int64 [n]: Trajectory Balance's log-ratio and unmasked tokens of each episode."""


class TokenLoss(NamedTuple):
    """What a loss of your own returns, besides its losses alone.

    losses: float [t], with gradient. The reduction (algo.reduction) weighs and adds them.
    kept: bool [t]; other tokens have no share in the loss, but still count in its denominator.
    metrics: by name float or bool [t]; metrics.jsonl has the mean over unmasked tokens.
    """

    losses: Tensor
    kept: Tensor | None = None
    metrics: dict[str, Tensor] = {}


@dataclass(frozen=True)
class OwnLoss:
    """A loss of your own: `algo.loss=module:name` names one, or its `function` alone.

    function(tokens, logprobs, algo, **prepared) returns float [t] with gradient, or a `TokenLoss`.
    It sees whole sequences of one microbatch.

        tokens: FlatBatch of t tokens, whose per-sequence tensors [n] are those of the whole batch.
            Log-probs and advantages are finite and without gradient, also where masked.
        logprobs: float [t], under the weights being trained, with gradient
        algo: the section `algo` of the configuration, such as algo.eps_low

    prepare(tokens, algo, reduce) is called once before each update, on every rank, with all tokens
    of the update on that rank. `reduce` sums a tensor over the ranks. It returns keywords for
    `function`, such as a scalar or one number per sequence [n]. `lr_factor` among them multiplies
    the learning rate of the update instead. It costs a forward pass over all tokens before the
    first update, which fills `prox`.

    zero_without_advantage: the loss of a token is 0 if its advantage is. The model then does not
    run on sequences without an advantage.

    The configuration decides the rest: advantages, reduction, and terms for KL and entropy.
    examples/recipes has examples.
    """

    function: Callable[..., Tensor | TokenLoss]
    prepare: Callable[[FlatBatch, Any, Reduce], dict[str, Any]] | None = None
    zero_without_advantage: bool = False

    def __call__(self, *args: Any, **prepared: Any) -> Tensor | TokenLoss:
        return self.function(*args, **prepared)


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


@torch.no_grad()
def token_metrics(
    tokens: FlatBatch, logprobs: Tensor, entropy: Tensor, *, to_reference: bool
) -> dict[str, Tensor]:
    """Sum, over a microbatch's unmasked tokens, what every objective reports.

    Args:
        tokens: of the microbatch
        logprobs, entropy: float [t], under the weights being trained
        to_reference: measure the divergence from the reference policy
    """
    metrics = {
        "entropy": entropy_sum(entropy, tokens.mask).float(),
        "trained_tokens": tokens.mask.sum().float(),
    }
    if to_reference:
        divergence = kl_estimate(logprobs, tokens.reference, tokens.mask, estimator="k3")
        metrics["reference_kl"] = divergence.sum().float()
    return metrics


def batch_metrics(
    flat: FlatBatch, *, oldest: int, mask_truncated: bool, reduce: Reduce
) -> dict[str, float | list[float]]:
    """Count tokens by staleness and masked tokens by reason. Every rank calls it.

    `behave_abs_by_staleness` is the mean |prox - behavior| of each staleness, in nats. Where tokens
    are fresh, `mismatch_square` is the mean square of their difference, and `stale_square` what the
    older tokens have besides: if both causes are independent, their squares add up.

    Args:
        oldest: the staleness bound; an older token is overdue
        mask_truncated: sequences that ended at the token limit are masked
        reduce: the sum over data-parallel ranks
    """
    masked = flat.sampled & ~flat.mask
    truncated = masked & flat.truncated[flat.sequence_ids] & mask_truncated
    overdue = masked & ~truncated & (flat.version - flat.versions > oldest)
    reasons = {
        "masked_truncated": truncated,
        "masked_overdue": overdue,
        "masked_nonfinite": masked & ~truncated & ~overdue,
    }
    difference = (flat.prox - flat.behavior).double()
    where = {"version": flat.version, "oldest": oldest}
    absolute, tokens = by_staleness(difference.abs(), flat.versions, flat.mask, **where)
    square, _ = by_staleness(difference**2, flat.versions, flat.mask, **where)
    counts = torch.stack([reason.sum() for reason in reasons.values()])
    # One collective for all of them.
    parts = [counts, tokens, absolute, square]
    total = reduce(torch.cat(parts).double()).split([len(part) for part in parts])
    counts, tokens, absolute, square = (part.tolist() for part in total)
    return {
        **dict(zip(reasons, counts)),
        "tokens_by_staleness": tokens,
        "behave_abs_by_staleness": [d / max(n, 1.0) for d, n in zip(absolute, tokens)],
        **_two_causes(tokens, square),
    }


def _two_causes(tokens: list[float], square: list[float]) -> dict[str, float]:
    """Split the mean square of log-ratios, given counts and sums by staleness."""
    if not tokens[0]:
        return {}
    mismatch, older = square[0] / tokens[0], sum(tokens[1:])
    if not older:
        return {"mismatch_square": mismatch}
    stale = max(sum(square[1:]) / older - mismatch, 0.0)
    return {"mismatch_square": mismatch, "stale_square": stale}

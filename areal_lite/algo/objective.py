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
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from areal_lite.algo.kl import kl_estimate
from areal_lite.algo.losses import LossOutput
from areal_lite.algo.metrics import by_staleness
from areal_lite.algo.sequences import reduction_count, sequence_length

if TYPE_CHECKING:
    from areal_lite.config.algo import AlgoConfig

Reduce = Callable[[Tensor], Tensor]  # sums over the data-parallel ranks; every rank calls it
Logprobs = Callable[[], Tensor]

# The tokens of a forward pass before the first update, which fills `prox` and `entropy`: all of
# them; the ones that the first update does not run on, since it fills in its own; or none. In that
# case `loss` fills `prox`, and `entropy` stays 0.
ProxPass = Literal["all", "rest", "none"]

_NOT_PER_TOKEN = {"version", "rewards", "group_ids", "episode_ids", "truncated"}


@dataclass(kw_only=True)
class FlatBatch:
    """The whole groups of one rank, or a selection of their tokens, as flat tensors.

    The step fills in `reference`, `values`, `advantages` and `returns` only for an objective that
    uses them. `prox_pass` of the objective says when `prox` and `entropy` are filled in.
    """

    version: int  # the trainer's, at the start of the step
    # Of tokens, [T]:
    sampled: Tensor  # bool: the policy sampled this token
    mask: Tensor  # bool: it counts in the loss; a subset of `sampled`
    behavior: Tensor  # float32: log-probs under the weights that sampled it
    versions: Tensor  # int: the version of those weights; -1 where it was not sampled
    sequence_ids: Tensor  # int64: the index of its sequence
    prox: Tensor  # float32: log-probs under the weights before the step
    entropy: Tensor  # float32: entropies under the weights before the step
    reference: Tensor = field(init=False)  # float32: log-probs under the reference policy
    # float32: the critic's values before the step, of the state before each token. The entry of a
    # sequence's first token is the value of the state after its last token.
    values: Tensor = field(init=False)
    advantages: Tensor = field(init=False)  # float32
    returns: Tensor = field(init=False)  # float32: the targets of the critic
    # Of sequences, [n]:
    rewards: Tensor  # float32
    group_ids: Tensor  # int64: sequences of one prompt share an id
    episode_ids: Tensor  # int64: the index, from 0, of the episode of which it is a trace
    truncated: Tensor  # bool: it ended at the token limit

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
        for name in vars(self).keys() - _NOT_PER_TOKEN:
            setattr(part, name, getattr(self, name)[token_index])
        return part


@dataclass(kw_only=True)
class Minibatch:
    """Totals of one optimizer update, for the losses of its microbatches."""

    denominator: float  # tokens or episodes over all ranks, as the reduction counts; at least 1
    # int64 [n]: the unmasked tokens of each episode, over all of its traces
    episode_lengths: Tensor | None = None
    prepared: dict[str, Any] = field(default_factory=dict)  # what `OwnLoss.prepare` returned
    lr_factor: float = 1.0  # multiplies the learning rate of the update
    # Trajectory Balance: the log-partition of each episode's group, float [n], and the log-ratio
    # and unmasked tokens of each episode, float [n] and int64 [n]
    log_z: Tensor | None = None
    completions: tuple[Tensor, Tensor] | None = None


class TokenLoss(NamedTuple):
    """The losses of a loss of your own, with the tokens that it keeps and its metrics."""

    losses: Tensor  # float [t], with gradient; algo.reduction weighs and adds them
    kept: Tensor | None = None  # bool [t]; others have no share, but count in the denominator
    metrics: dict[str, Tensor] = {}  # float or bool [t]; metrics.jsonl has means over tokens


@dataclass(frozen=True)
class OwnLoss:
    """A loss of your own: `algo.loss=module:name` names one, or its `function` alone.

    function(tokens, logprobs, algo, **prepared) returns float [t] with gradient, or a `TokenLoss`.
    It sees whole sequences of one microbatch.

        tokens: FlatBatch of t tokens; its per-sequence tensors [n] belong to the whole batch.
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


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The calls of a training step, in the order given above.

    algo: the section `algo` of the configuration.
    max_new_tokens: the longest completion.
    """

    algo: AlgoConfig
    max_new_tokens: int

    @property
    def needs_reference(self) -> bool:
        """Return whether the step computes log-probs under a reference policy."""
        return True

    @property
    def needs_critic(self) -> bool:
        """Return whether the step computes values and trains the critic on the returns."""
        return False

    @property
    def prox_pass(self) -> ProxPass:
        return "all"

    def mask(self, batch: FlatBatch) -> Tensor:
        """Return the tokens that count, bool [T]; `batch.mask` marks the usable ones."""
        raise NotImplementedError

    def set_targets(self, batch: FlatBatch, reduce: Reduce) -> None:
        raise NotImplementedError

    def trains_on(self, batch: FlatBatch) -> Tensor:
        """Return the sequences whose loss can have a gradient, bool [n].

        The model does not run on the others. `loss` gets their tokens once, with the log-probs and
        entropies from before the step. `prox_pass` is not "none" if there are any.
        """
        return torch.ones_like(batch.truncated)

    def minibatch(
        self, batch: FlatBatch, index: Tensor, current_logprobs: Logprobs, reduce: Reduce
    ) -> Minibatch:
        """Compute the totals of the update on the tokens `index`. Every rank calls it.

        current_logprobs: computes log-probs under the present weights, valid at `index`; call it
            only if needed, since it can cost a forward pass
        """
        raise NotImplementedError

    def loss(
        self, batch: FlatBatch, update: Minibatch, index: Tensor, logprobs: Tensor, entropy: Tensor
    ) -> LossOutput:
        """Compute one microbatch's share of the loss, and metrics that add up over microbatches.

        Args:
            batch: the batch of the step
            update: the totals of the update that the microbatch belongs to
            index: int64 [t], the tokens of the microbatch, in whole sequences
            logprobs, entropy: float [t], under the weights being trained, with gradient; entropy is
                that of the next-token distribution
        """
        raise NotImplementedError


def denominator(batch: FlatBatch, token_index: Tensor, *, mode: str, reduce: Reduce) -> float:
    """Count the tokens or episodes of an update over all ranks, as `mode` does; at least 1."""
    count = reduction_count(batch.mask[token_index], batch.token_episodes[token_index], mode=mode)
    own = torch.tensor(float(count), dtype=torch.float64, device=token_index.device)
    return max(1.0, float(reduce(own)))


@torch.no_grad()
def token_metrics(
    tokens: FlatBatch, logprobs: Tensor, entropy: Tensor, *, to_reference: bool
) -> dict[str, Tensor]:
    """Sum, over a microbatch's unmasked tokens, what every objective reports.

    logprobs, entropy: float [t], under the weights being trained.
    """
    metrics = {
        "entropy": entropy.detach()[tokens.mask].sum().float(),
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

    oldest: the staleness bound; an older token is overdue. mask_truncated: sequences that ended at
    the token limit are masked.
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

"""The objective of a training step: from the tensors of a batch to losses.

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

`PolicyObjective` has PPO, GSPO, CISPO, REINFORCE, or a loss of your own (`algo.loss=module:name`),
which sees the same tensors; see `OwnLoss`. trajectory_balance.py has the other objective.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from areal_lite.algo import advantages, sequences
from areal_lite.algo.correction import behavior_weight, loglinear_prox
from areal_lite.algo.losses import LossInputs, LossOutput, entropy_loss, kl_estimate, kl_loss
from areal_lite.algo.metrics import bounded_exp, by_staleness, mismatch, ratio_sums

if TYPE_CHECKING:
    from areal_lite.config.algo import AdvantageConfig, AlgoConfig

Reduce = Callable[[Tensor], Tensor]  # sums over the data-parallel ranks; every rank calls it
Logprobs = Callable[[], Tensor]

_NOT_PER_TOKEN = {"version", "earned", "rewards", "truncated"}
_NOT_PER_TOKEN |= {"group_ids", "episode_ids", "trace_indices"}


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
    # float32: what a turn earned, at its last token, else 0; for the whole batch only
    earned: Tensor | None = None
    # Of sequences, [n]:
    rewards: Tensor  # float32
    group_ids: Tensor  # int64: sequences of one prompt share an id
    episode_ids: Tensor  # int64: the index, from 0, of the episode of which it is a trace
    trace_indices: Tensor  # int: its number within that episode
    truncated: Tensor  # bool: it ended at the token limit

    @property
    def token_episodes(self) -> Tensor:
        """Return the index of each token's episode, int64 [T]."""
        return self.episode_ids[self.sequence_ids]

    @property
    def episode_lengths(self) -> Tensor:
        """Count the unmasked tokens of each episode, over all of its traces: int64 [n]."""
        return sequences.sequence_length(self.mask, self.token_episodes, num=len(self.rewards))

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
    episode_lengths: Tensor
    prepared: dict[str, Any] = field(default_factory=dict)  # what `OwnLoss.prepare` returned
    lr_factor: float = 1.0  # multiplies the learning rate of the update
    # Trajectory Balance: float [n], the log-partition of each episode's group, and the log-ratio
    # of each episode
    log_z: Tensor | None = None
    log_ratios: Tensor | None = None


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
        logprobs: float [t], under the weights being trained, with gradient; 0 if not sampled
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
    """The calls of a training step, in the order given above."""

    algo: AlgoConfig
    max_new_tokens: int  # of a completion

    @property
    def needs_reference(self) -> bool:
        """Return whether the step computes log-probs under a reference policy."""
        return self.algo.kl.coef != 0

    @property
    def needs_critic(self) -> bool:
        """Return whether the step computes values and trains the critic on the returns."""
        return self.algo.advantage.estimator == "gae"

    @property
    def prox_pass(self) -> str:
        """Return the tokens of the forward pass before the first update; see `AlgoConfig`."""
        return self.algo.prox_pass

    def mask(self, batch: FlatBatch) -> Tensor:
        """Return the tokens that count, bool [T]; `batch.mask` marks the usable ones."""
        return self._trained(batch.mask, batch)

    def _trained(self, usable: Tensor, batch: FlatBatch) -> Tensor:
        if not self.algo.shaping.mask_truncated:
            return usable
        return usable & ~batch.truncated[batch.sequence_ids]

    def shaped_rewards(self, batch: FlatBatch) -> Tensor:
        """Shape the rewards of sequences, float [n]. Masked sampled tokens count in the length."""
        shaping = self.algo.shaping
        rewards = shaping.scale * (batch.rewards + shaping.bias)
        if not shaping.overlong_margin:
            return rewards
        lengths = torch.bincount(batch.sequence_ids[batch.sampled], minlength=len(rewards))
        return rewards + advantages.overlong_penalty(
            lengths, max_length=self.max_new_tokens, margin=shaping.overlong_margin
        )

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

        batch: of the step; update: to which the microbatch belongs; index: int64 [t], its tokens,
        in whole sequences; logprobs, entropy: float [t], under the weights being trained, with
        gradient, the entropy of the next-token distribution.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PolicyObjective(Objective):
    """A policy loss of log-prob ratios and advantages, plus KL and entropy terms."""

    # A function of losses.py with its settings bound, or a loss of your own.
    policy_loss: Callable[[LossInputs], LossOutput] | OwnLoss

    @property
    def prox_pass(self) -> str:
        prepares = isinstance(self.policy_loss, OwnLoss) and self.policy_loss.prepare
        return "all" if prepares else self.algo.prox_pass

    @property
    def _kl_in_loss(self) -> bool:
        return self.algo.kl.coef != 0 and self.algo.kl.into == "loss"

    def set_targets(self, batch: FlatBatch, reduce: Reduce) -> None:
        """Set `batch.advantages`, and `batch.returns` with `gae`.

        A trace of an episode is a sequence. Means and deviations of rewards count its episode once.
        """
        advantage, kl, mask = self.algo.advantage, self.algo.kl, batch.mask
        rewards, divergence = self.shaped_rewards(batch), None
        if kl.coef and kl.into == "reward":
            divergence = kl_estimate(batch.prox, batch.reference, mask, estimator=kl.estimator)
        turns = None
        if advantage.credit == "turns":
            turns = advantages.find_turns(batch.sampled, batch.sequence_ids)
        match advantage.estimator:
            case "grpo" | "rloo":
                if divergence is not None:  # that of the whole episode
                    ids, num = batch.token_episodes, len(rewards)
                    by_episode = sequences.sequence_sum(divergence, mask, ids, num=num)
                    rewards = rewards - kl.coef * by_episode[batch.episode_ids]
                batch.advantages = self._relative_to_group(batch, rewards, turns, reduce)
            case "reinforce_pp" | "gae":
                self._set_by_token(batch, rewards, divergence, turns, reduce)
            case _:  # off
                batch.advantages = torch.zeros_like(batch.behavior)
        if advantage.whiten:
            stats = advantages.moments(batch.advantages, mask, reduce=reduce)
            batch.advantages = advantages.whiten(batch.advantages, stats, mask=mask)
        if kl.coef and kl.into == "advantage":
            # The policy gradient of this term alone is that of beta KL(policy || reference), token
            # by token over the sequences that the policy samples: on-policy distillation, if the
            # reference is a teacher (arXiv 2306.13649, section 3, with the reverse KL and only
            # samples of the student; Thinking Machines Lab, 2025, where later tokens do not count,
            # either). Whitening would take out its mean, so it comes after.
            divergence = kl_estimate(batch.prox, batch.reference, mask, estimator="k1")
            batch.advantages = batch.advantages - kl.coef * divergence

    def _credits(
        self, batch: FlatBatch, rewards: Tensor, turns: advantages.Turns, reduce: Reduce
    ) -> Tensor:
        """Divide the shaped rewards of sequences among their turns: float64 [k]."""
        # In float32, sums of credits differ by rounding, which a deviation would make a signal of.
        earned = batch.earned
        if earned is not None:
            earned = self.algo.shaping.scale * earned.double()
        return advantages.steadied(
            advantages.credits(rewards.double(), earned, turns),
            turns,
            batch.group_ids,
            batch.trace_indices,
            gamma=self.algo.advantage.gamma,
            reduce=reduce,
        )

    def _relative_to_group(
        self, batch: FlatBatch, rewards: Tensor, turns: advantages.Turns | None, reduce: Reduce
    ) -> Tensor:
        """Compute advantages relative to groups from rewards of sequences: float [T]."""
        advantage, group_ids = self.algo.advantage, batch.group_ids
        if turns is None:
            by_sequence = _relative(rewards, group_ids, advantage, reduce, batch.episode_ids)
            return by_sequence[batch.sequence_ids]
        by_turn = advantages.relative_to_turns(
            self._credits(batch, rewards, turns, reduce),
            turns,
            group_ids,
            batch.trace_indices,
            gamma=advantage.gamma,
            relative=lambda returns, ids: _relative(returns, ids, advantage, reduce),
        )
        return by_turn[turns.of_token].to(rewards.dtype)

    def _set_by_token(
        self,
        batch: FlatBatch,
        rewards: Tensor,
        divergence: Tensor | None,
        turns: advantages.Turns | None,
        reduce: Reduce,
    ) -> None:
        """Set advantages, and returns with `gae`, from rewards at ends of sequences or turns."""
        advantage, ids, turn_ids = self.algo.advantage, batch.sequence_ids, None
        if turns is not None:
            ids = turn_ids = turns.of_token
            rewards = self._credits(batch, rewards, turns, reduce).to(rewards.dtype)
        by_token = advantages.token_rewards(
            rewards, batch.mask, ids, divergence=divergence, beta=self.algo.kl.coef
        )
        if advantage.estimator == "gae":
            batch.advantages, batch.returns = self._gae(batch, by_token, turn_ids)
            return
        settings = {"gamma": advantage.gamma, "turn_ids": turn_ids, "reduce": reduce}
        batch.advantages = advantages.reinforce_plus_plus(
            by_token, batch.mask, batch.sequence_ids, **settings
        )

    def _gae(
        self, batch: FlatBatch, rewards: Tensor, turn_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute advantages and returns from rewards of tokens: float [T] each.

        The token limit is not a property of the task, so a truncated sequence is worth what would
        have followed (arXiv 1712.00378, section 4): the value of the state in which it was cut off.
        """
        settings, ids = self.algo.advantage, batch.sequence_ids
        first = torch.searchsorted(ids, torch.arange(len(batch.truncated), device=ids.device))
        after = torch.where(batch.truncated, batch.values[first], 0.0)
        options = {"gamma": settings.gamma, "lam": settings.lam, "turn_ids": turn_ids}
        return advantages.gae(rewards, batch.values, batch.mask, ids, **options, bootstrap=after)

    def trains_on(self, batch: FlatBatch) -> Tensor:
        """Leave out sequences without an advantage, such as sequences of a group of equal rewards.

        A KL term in the loss, an entropy term and a critic train on every sequence. Interpolated
        proximal log-probs are only known for a sequence that runs.
        """
        own = isinstance(self.policy_loss, OwnLoss) and not self.policy_loss.zero_without_advantage
        others = self._kl_in_loss or self.algo.entropy_coef or self.needs_critic
        if own or others or self.algo.prox != "recompute":
            return torch.ones_like(batch.truncated)
        counted = batch.mask & (batch.advantages != 0)
        return sequences.sequence_length(counted, batch.sequence_ids, num=len(batch.rewards)) > 0

    def minibatch(
        self, batch: FlatBatch, index: Tensor, current_logprobs: Logprobs, reduce: Reduce
    ) -> Minibatch:
        update = Minibatch(
            denominator=denominator(batch, index, mode=self.algo.reduction, reduce=reduce),
            episode_lengths=batch.episode_lengths,
        )
        own = self.policy_loss
        if isinstance(own, OwnLoss) and own.prepare:
            update.prepared = own.prepare(_finite(batch.at(index)), self.algo, reduce)
            update.lr_factor = float(update.prepared.pop("lr_factor", 1.0))
        return update

    def loss(
        self, batch: FlatBatch, update: Minibatch, index: Tensor, logprobs: Tensor, entropy: Tensor
    ) -> LossOutput:
        if self.algo.prox == "loglinear":
            behavior, versions = batch.behavior[index], batch.versions[index]
            batch.prox[index] = loglinear_prox(
                behavior, logprobs.float(), versions, version=batch.version
            )
        tokens = batch.at(index)
        weights = sequences.reduction_weights(
            tokens.mask,
            tokens.token_episodes,
            mode=self.algo.reduction,
            denominator=update.denominator,
            length=self.max_new_tokens,
            lengths=update.episode_lengths,
        )
        inputs = self._inputs(tokens, logprobs, weights)
        if isinstance(self.policy_loss, OwnLoss):
            loss, metrics = self._own_loss(tokens, logprobs, weights, update)
        else:
            loss, metrics = self.policy_loss(inputs)
        if inputs.corrected:
            # Its tokens are stale in the same way, so they have the weight w, too.
            importance, kept = inputs.corrected
            settings = {"estimator": self.algo.kl.estimator, "importance": importance}
            kl = kl_loss(logprobs, tokens.reference, kept, weights, **settings)
            loss = loss + self.algo.kl.coef * kl
        if self.algo.entropy_coef:
            loss = loss + self.algo.entropy_coef * entropy_loss(entropy, tokens.mask, weights)
        more = token_metrics(tokens, logprobs, entropy, to_reference=self.needs_reference)
        return LossOutput(loss, metrics | more)

    def _inputs(self, tokens: FlatBatch, logprobs: Tensor, weights: Tensor) -> LossInputs:
        inputs = LossInputs(
            logprobs=logprobs,
            prox=tokens.prox,
            behavior=tokens.behavior,
            advantages=tokens.advantages,
            mask=tokens.mask,
            sequence_ids=tokens.sequence_ids,
            weights=weights,
        )
        if self._kl_in_loss:
            settings = {"sequence_ids": tokens.sequence_ids, **vars(self.algo.correction)}
            inputs.corrected = behavior_weight(
                tokens.prox, tokens.behavior, tokens.mask, **settings
            )
        return inputs

    def _own_loss(
        self, tokens: FlatBatch, logprobs: Tensor, weights: Tensor, update: Minibatch
    ) -> LossOutput:
        tokens = _finite(tokens)
        assert isinstance(self.policy_loss, OwnLoss)
        returned = self.policy_loss(tokens, logprobs, self.algo, **update.prepared)
        losses, kept, more = returned if isinstance(returned, TokenLoss) else TokenLoss(returned)
        if losses.shape != logprobs.shape:  # torch would spread it over the tokens
            raise ValueError(
                f"algo.loss={self.algo.loss}: return a loss of each token, not {list(losses.shape)}"
            )
        kept = tokens.mask if kept is None else tokens.mask & kept
        weighed = torch.where(kept, weights * losses, torch.zeros_like(losses))
        metrics = {
            **{name: values.detach()[tokens.mask].sum() for name, values in more.items()},
            **ratio_sums(bounded_exp(logprobs - tokens.prox), tokens.mask),
            "rejected": (tokens.mask & ~kept).sum(),
            **mismatch(tokens.prox, tokens.behavior, tokens.mask),
        }
        return LossOutput(weighed.sum(), {name: value.float() for name, value in metrics.items()})


def _finite(tokens: FlatBatch) -> FlatBatch:
    """Replace behavior log-probs that are masked, where they may be NaN, by proximal ones.

    A NaN would reach the gradient in spite of its mask.
    """
    tokens.behavior = torch.where(tokens.mask, tokens.behavior, tokens.prox)
    return tokens


def _relative(
    rewards: Tensor,
    group_ids: Tensor,
    advantage: AdvantageConfig,
    reduce: Reduce,
    episode_ids: Tensor | None = None,
) -> Tensor:
    if advantage.estimator == "rloo":
        return advantages.rloo(rewards, group_ids, episode_ids=episode_ids)
    whole_batch = None
    if "batch" in (advantage.mean, advantage.std):
        weights = None if episode_ids is None else advantages.shares(rewards, episode_ids)
        whole_batch = advantages.moments(rewards, weights=weights, reduce=reduce)
    return advantages.grpo(
        rewards,
        group_ids,
        episode_ids=episode_ids,
        divide_by_std=advantage.std != "off",
        batch_mean=whole_batch if advantage.mean == "batch" else None,
        batch_std=whole_batch if advantage.std == "batch" else None,
    )


def denominator(batch: FlatBatch, token_index: Tensor, *, mode: str, reduce: Reduce) -> float:
    """Count the tokens or episodes of an update over all ranks, as `mode` does; at least 1."""
    episodes = batch.token_episodes[token_index]
    count = sequences.reduction_count(batch.mask[token_index], episodes, mode=mode)
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
    causes = {}
    if tokens[0]:
        causes["mismatch_square"] = square[0] / tokens[0]
        if older := sum(tokens[1:]):
            stale = sum(square[1:]) / older - causes["mismatch_square"]
            causes["stale_square"] = max(stale, 0.0)
    return causes

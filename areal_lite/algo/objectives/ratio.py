"""Ratio losses: PPO, GSPO, CISPO and REINFORCE, with their KL and entropy terms."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lite.algo.correction import (
    Correction,
    behavior_weight,
    finite_mask,
    loglinear_prox,
    sample_sums,
)
from areal_lite.algo.kl import entropy_loss, kl_loss
from areal_lite.algo.losses import LossInputs, LossOutput, group_log_q
from areal_lite.algo.metrics import effective_sample_size
from areal_lite.algo.mismatch import staleness_share, trainer_behavior
from areal_lite.algo.objectives.base import (
    FlatBatch,
    Minibatch,
    ProxPass,
    Reduce,
    denominator,
)
from areal_lite.algo.objectives.estimator import AdvantageEstimator
from areal_lite.algo.objectives.metrics import token_metrics
from areal_lite.algo.objectives.rewards import KLTerm, RewardShaping
from areal_lite.algo.reduction import reduction_weights
from areal_lite.algo.rejection import Rejection, accepted, batch_limit, distance, outward
from areal_lite.algo.sequences import sequence_length, sequence_sum


@dataclass(frozen=True, kw_only=True)
class RatioObjective:
    """A policy loss of log-prob ratios and advantages, plus KL and entropy terms."""

    policy_loss: Callable[[LossInputs], LossOutput]
    """A function of algo/losses.py with its settings bound."""
    correction: Correction
    """Weighs the KL term; `policy_loss` has its own."""
    rejection: Rejection
    """Leaves tokens out of the loss."""
    reduction: str
    length: int
    """Reduction and its constant length, in tokens; see algo/reduction.py."""
    shaping: RewardShaping
    estimator: AdvantageEstimator
    kl: KLTerm
    entropy_coef: float
    prox: str
    """The source of the log-probs: `recompute`, `reuse` or `loglinear`."""
    prox_pass: ProxPass
    correct_mismatch: bool = True
    """False: the log-ratio is that of staleness, without the mismatch of server and trainer."""
    oldest: int = 0
    """The staleness bound, in versions."""
    compares_with_group: bool = False
    """The loss needs `group_log_q`."""
    scale_lr_by_ess: bool = False
    """Take smaller updates the fewer samples their weights leave, at the correction's level."""

    @property
    def needs_reference(self) -> bool:
        return self.kl.needs_reference

    @property
    def needs_critic(self) -> bool:
        return self.estimator.estimator == "gae"

    def lr_factor(self, sums: dict[str, float]) -> float:
        """Return sqrt(ESS) if the learning rate follows it (VCPO, arXiv 2602.17616), otherwise 1.

        ESS is the effective sample size as a share of the samples. The square root suits Adam.
        """
        if not self.scale_lr_by_ess:
            return 1.0
        return (
            effective_sample_size(
                sums["sample_weight_sum"], sums["sample_weight_square_sum"], sums["samples"]
            )
            ** 0.5
        )

    def mask(self, batch: FlatBatch) -> Tensor:
        return self.shaping.mask(batch.mask, batch)

    def set_targets(self, batch: FlatBatch, reduce: Reduce) -> None:
        norms = self._squared_norms(batch) if self.estimator.needs_norms else None
        self.estimator.set_advantages(batch, self.shaping.rewards(batch), self.kl, reduce, norms)
        # After whitening, which would take out the mean: a divergence of all tokens alike.
        batch.advantages = self.kl.token_advantages(batch)

    def trains_on(self, batch: FlatBatch) -> Tensor:
        """Leave out sequences without an advantage, such as those of a group of equal rewards.

        A KL term in the loss, an entropy term and a critic train on every sequence. Other proximal
        log-probs than those of `recompute` are only known for a sequence that runs.
        """
        others = self.kl.in_loss or self.entropy_coef or self.needs_critic
        if others or self.prox != "recompute":
            return torch.ones_like(batch.truncated)
        counted = batch.mask & (batch.advantages != 0)
        return sequence_length(counted, batch.sequence_ids, num=len(batch.rewards)) > 0

    def minibatch(
        self,
        batch: FlatBatch,
        token_index: Tensor,
        current_logprobs: Callable[[], Tensor],
        reduce: Reduce,
    ) -> Minibatch:
        tokens, share = batch.at(token_index), None
        if not self.correct_mismatch:
            share = staleness_share(
                tokens.prox - tokens.behavior,
                tokens.versions,
                tokens.mask,
                version=batch.version,
                oldest=self.oldest,
                reduce=reduce,
            )
        tokens = _without_mismatch(tokens, share)
        return Minibatch(
            denominator=denominator(batch, token_index, mode=self.reduction, reduce=reduce),
            episode_lengths=batch.episode_lengths,
            staleness_share=share,
            rejection_limit=self._rejection_limit(tokens, reduce),
            group_log_q=self._group_log_q(tokens),
        )

    def loss(
        self,
        batch: FlatBatch,
        minibatch: Minibatch,
        token_index: Tensor,
        logprobs: Tensor,
        entropy: Tensor,
    ) -> LossOutput:
        self._set_prox(batch, token_index, logprobs)
        tokens = _without_mismatch(batch.at(token_index), minibatch.staleness_share)
        accepted_tokens = self._accepted(tokens, minibatch)
        corrected = self._behavior_weight(tokens, accepted_tokens) if self.kl.in_loss else None
        weights = reduction_weights(
            tokens.mask,
            tokens.token_episodes,
            mode=self.reduction,
            denominator=minibatch.denominator,
            length=self.length,
            lengths=minibatch.episode_lengths,
        )
        inputs = LossInputs(
            logprobs=logprobs,
            prox=tokens.prox,
            behavior=tokens.behavior,
            advantages=tokens.advantages,
            mask=tokens.mask,
            sequence_ids=tokens.sequence_ids,
            weights=weights,
            accepted=accepted_tokens,
            group_log_q=_per_token(minibatch.group_log_q, tokens),
            corrected=corrected,
        )
        output = self.policy_loss(inputs)
        loss = output.loss
        if corrected:
            loss = loss + self._kl_loss(tokens, logprobs, weights, corrected)
        if self.entropy_coef:
            loss = loss + self.entropy_coef * entropy_loss(entropy, tokens.mask, weights)
        metrics = token_metrics(tokens, logprobs, entropy, to_reference=self.needs_reference)
        if self.scale_lr_by_ess:
            metrics |= self._sample_sums(tokens, accepted_tokens)
        return LossOutput(loss, output.metrics | metrics)

    def _squared_norms(self, batch: FlatBatch) -> Tensor:
        """Sum the squared factors of a sequence's token gradients, without A: float [n]."""
        weight, kept = self._behavior_weight(batch, batch.mask)
        ids, num = batch.sequence_ids, len(batch.rewards)
        norms = sequence_sum(weight**2, kept, ids, num=num)
        if self.reduction == "sequence":
            norms = norms / batch.episode_lengths.clamp(min=1)[batch.episode_ids] ** 2
        return norms.to(batch.rewards.dtype)

    def _set_prox(self, batch: FlatBatch, token_index: Tensor, logprobs: Tensor) -> None:
        if self.prox == "loglinear":
            batch.prox[token_index] = loglinear_prox(
                batch.behavior[token_index],
                logprobs.float(),
                batch.versions[token_index],
                version=batch.version,
            )

    def _group_log_q(self, tokens: FlatBatch) -> Tensor | None:
        if not self.compares_with_group:
            return None
        mask = finite_mask(tokens.mask, tokens.behavior)
        return group_log_q(tokens.behavior, mask, tokens.sequence_ids, tokens.group_ids)

    def _rejection_limit(self, tokens: FlatBatch, reduce: Reduce) -> Tensor | None:
        rejection = self.rejection
        if rejection.by is None or rejection.level != "batch":
            return None
        mask = tokens.mask
        if rejection.outward:
            mask = mask & outward(tokens.prox, tokens.behavior, tokens.advantages)
        values = distance(tokens.prox, tokens.behavior, mask, by=rejection.by)
        return batch_limit(values[mask], bound=rejection.above, reduce=reduce)

    def _accepted(self, tokens: FlatBatch, minibatch: Minibatch) -> Tensor:
        return accepted(
            tokens.prox,
            tokens.behavior,
            tokens.mask,
            self.rejection,
            sequence_ids=tokens.sequence_ids,
            advantages=tokens.advantages,
            limit=minibatch.rejection_limit,
        )

    def _sample_sums(self, tokens: FlatBatch, mask: Tensor) -> dict[str, Tensor]:
        return sample_sums(
            tokens.prox,
            tokens.behavior,
            mask,
            level=self.correction.level,
            sequence_ids=tokens.sequence_ids,
        )

    def _behavior_weight(self, tokens: FlatBatch, mask: Tensor) -> tuple[Tensor, Tensor]:
        return behavior_weight(
            tokens.prox,
            tokens.behavior,
            mask,
            sequence_ids=tokens.sequence_ids,
            **vars(self.correction),
        )

    def _kl_loss(
        self,
        tokens: FlatBatch,
        logprobs: Tensor,
        weights: Tensor,
        corrected: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Weigh the KL term like the loss, because its tokens are stale in the same way."""
        importance, kept = corrected
        return self.kl.coef * kl_loss(
            logprobs,
            self.kl.anchor(tokens),
            kept,
            weights,
            estimator=self.kl.estimator,
            importance=importance,
        )


def _without_mismatch(tokens: FlatBatch, share: Tensor | None) -> FlatBatch:
    """Replace the behavior log-probs of `tokens` by the trainer's estimate of them."""
    if share is not None:
        tokens.behavior = trainer_behavior(
            tokens.prox, tokens.behavior, tokens.versions, share, version=tokens.version
        )
    return tokens


def _per_token(by_sequence: Tensor | None, tokens: FlatBatch) -> Tensor | None:
    """Give every token, in the dtype of its log-prob, the value of its sequence."""
    if by_sequence is None:
        return None
    return by_sequence[tokens.sequence_ids].to(tokens.behavior.dtype)

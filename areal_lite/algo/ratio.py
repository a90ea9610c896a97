"""Objectives of log-prob ratios and advantages: PPO, GSPO, CISPO, REINFORCE, and your own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from areal_lite.algo.correction import Correction, behavior_weight, loglinear_prox
from areal_lite.algo.kl import entropy_loss, kl_loss
from areal_lite.algo.losses import LossInputs, LossOutput
from areal_lite.algo.metrics import mismatch, ratio_sums
from areal_lite.algo.objective import (
    FlatBatch,
    Minibatch,
    OwnLoss,
    ProxPass,
    Reduce,
    TokenLoss,
    denominator,
    token_metrics,
)
from areal_lite.algo.sequences import reduction_weights, sequence_length
from areal_lite.algo.targets import set_advantages, shaped_rewards, trained_mask

if TYPE_CHECKING:
    from areal_lite.config.algo import AlgoConfig, CorrectionConfig


def correction_of(settings: CorrectionConfig) -> Correction:
    """Convert the section `algo.correction` of the configuration."""
    return Correction(mode=settings.mode, cap=settings.cap, low=settings.low, level=settings.level)


@dataclass(frozen=True, kw_only=True)
class AdvantageObjective:
    """A policy loss of advantages, plus KL and entropy terms.

    max_new_tokens: the longest completion, which `algo.reduction=constant` divides by.
    """

    algo: AlgoConfig
    max_new_tokens: int

    @property
    def needs_reference(self) -> bool:
        return self.algo.kl.coef != 0

    @property
    def needs_critic(self) -> bool:
        return self.algo.advantage.estimator == "gae"

    @property
    def prox_pass(self) -> ProxPass:
        return self.algo.prox_pass

    @property
    def _kl_in_loss(self) -> bool:
        return self.algo.kl.coef != 0 and self.algo.kl.into == "loss"

    def mask(self, batch: FlatBatch) -> Tensor:
        return trained_mask(batch.mask, batch, self.algo.shaping)

    def set_targets(self, batch: FlatBatch, reduce: Reduce) -> None:
        rewards = shaped_rewards(batch, self.algo.shaping, self.max_new_tokens)
        set_advantages(batch, rewards, self.algo, reduce)

    def trains_on(self, batch: FlatBatch) -> Tensor:
        """Leave out sequences without an advantage, such as those of a group of equal rewards.

        A KL term in the loss, an entropy term and a critic train on every sequence. Interpolated
        proximal log-probs are only known for a sequence that runs.
        """
        others = self._kl_in_loss or self.algo.entropy_coef or self.needs_critic
        if others or self.algo.prox != "recompute":
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
        return Minibatch(
            denominator=denominator(batch, token_index, mode=self.algo.reduction, reduce=reduce),
            episode_lengths=batch.episode_lengths,
        )

    def loss(
        self,
        batch: FlatBatch,
        minibatch: Minibatch,
        token_index: Tensor,
        logprobs: Tensor,
        entropy: Tensor,
    ) -> LossOutput:
        if self.algo.prox == "loglinear":
            batch.prox[token_index] = loglinear_prox(
                batch.behavior[token_index],
                logprobs.float(),
                batch.versions[token_index],
                version=batch.version,
            )
        tokens = batch.at(token_index)
        weights = reduction_weights(
            tokens.mask,
            tokens.token_episodes,
            mode=self.algo.reduction,
            denominator=minibatch.denominator,
            length=self.max_new_tokens,
            lengths=minibatch.episode_lengths,
        )
        corrected = self._behavior_weight(tokens) if self._kl_in_loss else None
        loss, metrics = self._policy_loss(tokens, logprobs, weights, corrected, minibatch)
        if corrected:
            loss = loss + self._kl_loss(tokens, logprobs, weights, corrected)
        if self.algo.entropy_coef:
            loss = loss + self.algo.entropy_coef * entropy_loss(entropy, tokens.mask, weights)
        more = token_metrics(tokens, logprobs, entropy, to_reference=self.needs_reference)
        return LossOutput(loss, metrics | more)

    def _policy_loss(
        self,
        tokens: FlatBatch,
        logprobs: Tensor,
        weights: Tensor,
        corrected: tuple[Tensor, Tensor] | None,
        minibatch: Minibatch,
    ) -> LossOutput:
        """Compute the policy loss alone; weights: float [t], of the reduction."""
        raise NotImplementedError

    def _behavior_weight(self, tokens: FlatBatch) -> tuple[Tensor, Tensor]:
        return behavior_weight(
            tokens.prox,
            tokens.behavior,
            tokens.mask,
            mode=self.algo.correction.mode,
            cap=self.algo.correction.cap,
            low=self.algo.correction.low,
            level=self.algo.correction.level,
            sequence_ids=tokens.sequence_ids,
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
        return self.algo.kl.coef * kl_loss(
            logprobs,
            tokens.reference,
            kept,
            weights,
            estimator=self.algo.kl.estimator,
            importance=importance,
        )


@dataclass(frozen=True, kw_only=True)
class RatioObjective(AdvantageObjective):
    """The objective of a function of losses.py, which has its settings bound."""

    policy_loss: Callable[[LossInputs], LossOutput]

    def _policy_loss(
        self,
        tokens: FlatBatch,
        logprobs: Tensor,
        weights: Tensor,
        corrected: tuple[Tensor, Tensor] | None,
        minibatch: Minibatch,
    ) -> LossOutput:
        inputs = LossInputs(
            logprobs=logprobs,
            prox=tokens.prox,
            behavior=tokens.behavior,
            advantages=tokens.advantages,
            mask=tokens.mask,
            sequence_ids=tokens.sequence_ids,
            weights=weights,
            corrected=corrected,
        )
        return self.policy_loss(inputs)


@dataclass(frozen=True, kw_only=True)
class OwnObjective(AdvantageObjective):
    """The objective of a loss of your own."""

    own: OwnLoss

    @property
    def prox_pass(self) -> ProxPass:
        return "all" if self.own.prepare else self.algo.prox_pass

    def trains_on(self, batch: FlatBatch) -> Tensor:
        if self.own.zero_without_advantage:
            return super().trains_on(batch)
        return torch.ones_like(batch.truncated)

    def minibatch(
        self,
        batch: FlatBatch,
        token_index: Tensor,
        current_logprobs: Callable[[], Tensor],
        reduce: Reduce,
    ) -> Minibatch:
        minibatch = super().minibatch(batch, token_index, current_logprobs, reduce)
        if self.own.prepare:
            prepared = self.own.prepare(_finite(batch.at(token_index)), self.algo, reduce)
            minibatch.lr_factor = float(prepared.pop("lr_factor", 1.0))
            minibatch.prepared = prepared
        return minibatch

    def _policy_loss(
        self,
        tokens: FlatBatch,
        logprobs: Tensor,
        weights: Tensor,
        corrected: tuple[Tensor, Tensor] | None,
        minibatch: Minibatch,
    ) -> LossOutput:
        tokens = _finite(tokens)
        returned = self.own(tokens, logprobs, self.algo, **minibatch.prepared)
        losses, kept, own = returned if isinstance(returned, TokenLoss) else TokenLoss(returned)
        kept = tokens.mask if kept is None else tokens.mask & kept
        weighed = torch.where(kept, weights * losses, torch.zeros_like(losses))
        metrics = {
            **{name: values.detach()[tokens.mask].sum() for name, values in own.items()},
            **ratio_sums((logprobs - tokens.prox).exp(), tokens.mask),
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

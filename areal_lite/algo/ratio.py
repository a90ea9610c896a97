"""The objective of a policy loss: PPO, GSPO, CISPO, REINFORCE, or a loss of your own."""

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
    Logprobs,
    Minibatch,
    Objective,
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
    from areal_lite.config.algo import CorrectionConfig


def correction_of(settings: CorrectionConfig) -> Correction:
    """Convert the section `algo.correction` of the configuration."""
    return Correction(mode=settings.mode, cap=settings.cap, low=settings.low, level=settings.level)


@dataclass(frozen=True, kw_only=True)
class PolicyObjective(Objective):
    """A policy loss of log-prob ratios and advantages, plus KL and entropy terms.

    policy_loss: a function of losses.py with its settings bound, or a loss of your own.
    """

    policy_loss: Callable[[LossInputs], LossOutput] | OwnLoss

    @property
    def needs_reference(self) -> bool:
        return self.algo.kl.coef != 0

    @property
    def needs_critic(self) -> bool:
        return self.algo.advantage.estimator == "gae"

    @property
    def prox_pass(self) -> ProxPass:
        prepares = isinstance(self.policy_loss, OwnLoss) and self.policy_loss.prepare
        return "all" if prepares else self.algo.prox_pass

    @property
    def _kl_in_loss(self) -> bool:
        return self.algo.kl.coef != 0 and self.algo.kl.into == "loss"

    def mask(self, batch: FlatBatch) -> Tensor:
        return trained_mask(batch.mask, batch, self.algo.shaping)

    def set_targets(self, batch: FlatBatch, reduce: Reduce) -> None:
        rewards = shaped_rewards(batch, self.algo.shaping, self.max_new_tokens)
        set_advantages(batch, rewards, self.algo, reduce)

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
        return sequence_length(counted, batch.sequence_ids, num=len(batch.rewards)) > 0

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
        weights = reduction_weights(
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
        corrected, ids = None, tokens.sequence_ids
        if self._kl_in_loss:
            correction = vars(correction_of(self.algo.correction))
            corrected = behavior_weight(
                tokens.prox, tokens.behavior, tokens.mask, sequence_ids=ids, **correction
            )
        return LossInputs(
            logprobs=logprobs,
            prox=tokens.prox,
            behavior=tokens.behavior,
            advantages=tokens.advantages,
            mask=tokens.mask,
            sequence_ids=ids,
            weights=weights,
            corrected=corrected,
        )

    def _own_loss(
        self, tokens: FlatBatch, logprobs: Tensor, weights: Tensor, update: Minibatch
    ) -> LossOutput:
        tokens = _finite(tokens)
        assert isinstance(self.policy_loss, OwnLoss)
        returned = self.policy_loss(tokens, logprobs, self.algo, **update.prepared)
        losses, kept, more = returned if isinstance(returned, TokenLoss) else TokenLoss(returned)
        kept = tokens.mask if kept is None else tokens.mask & kept
        weighed = torch.where(kept, weights * losses, torch.zeros_like(losses))
        metrics = {
            **{name: values.detach()[tokens.mask].sum() for name, values in more.items()},
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

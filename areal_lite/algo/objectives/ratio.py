"""Ratio losses: PPO, GSPO, CISPO and REINFORCE, with their KL and entropy terms."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from areal_lite.algo.correction import Correction, behavior_weight, loglinear_prox
from areal_lite.algo.kl import entropy_loss, kl_loss
from areal_lite.algo.losses import LossInputs, LossOutput
from areal_lite.algo.objectives.base import (
    FlatBatch,
    Minibatch,
    Reduce,
    denominator,
)
from areal_lite.algo.objectives.estimator import AdvantageEstimator
from areal_lite.algo.objectives.metrics import token_metrics
from areal_lite.algo.objectives.rewards import KLTerm, RewardShaping
from areal_lite.algo.reduction import reduction_weights


@dataclass(frozen=True, kw_only=True)
class RatioObjective:
    """A policy loss of log-prob ratios and advantages, plus KL and entropy terms."""

    policy_loss: Callable[[LossInputs], LossOutput]
    """A function of algo/losses.py with its settings bound."""
    correction: Correction
    """Weighs the KL term; `policy_loss` has its own."""
    reduction: str
    length: int
    """Reduction and its constant length, in tokens; see algo/reduction.py."""
    shaping: RewardShaping
    estimator: AdvantageEstimator
    kl: KLTerm
    entropy_coef: float
    prox: str
    """The source of the log-probs: `recompute` (a forward pass), `reuse` or `loglinear`."""

    @property
    def needs_reference(self) -> bool:
        return self.kl.coef != 0

    @property
    def needs_critic(self) -> bool:
        return self.estimator.estimator == "gae"

    @property
    def recompute_prox(self) -> bool:
        return self.prox == "recompute"

    def mask(self, batch: FlatBatch) -> Tensor:
        return self.shaping.mask(batch.mask, batch)

    def set_targets(self, batch: FlatBatch, reduce: Reduce) -> None:
        self.estimator.set_advantages(batch, self.shaping.rewards(batch), self.kl, reduce)

    def minibatch(
        self,
        batch: FlatBatch,
        token_index: Tensor,
        current_logprobs: Callable[[], Tensor],
        reduce: Reduce,
    ) -> Minibatch:
        return Minibatch(
            denominator=denominator(batch, token_index, mode=self.reduction, reduce=reduce)
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
        tokens = batch.at(token_index)
        corrected = self._behavior_weight(tokens) if self.kl.in_loss else None
        weights = reduction_weights(
            tokens.mask,
            tokens.sequence_ids,
            mode=self.reduction,
            denominator=minibatch.denominator,
            length=self.length,
        )
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
        output = self.policy_loss(inputs)
        loss = output.loss
        if corrected:
            loss = loss + self._kl_loss(tokens, logprobs, weights, corrected)
        if self.entropy_coef:
            loss = loss + self.entropy_coef * entropy_loss(entropy, tokens.mask, weights)
        metrics = token_metrics(tokens, logprobs, entropy, with_reference=self.needs_reference)
        return LossOutput(loss, output.metrics | metrics)

    def _set_prox(self, batch: FlatBatch, token_index: Tensor, logprobs: Tensor) -> None:
        if self.prox == "reuse":
            batch.prox[token_index] = logprobs.detach().float()
        elif self.prox == "loglinear":
            batch.prox[token_index] = loglinear_prox(
                batch.behavior[token_index],
                logprobs.float(),
                batch.versions[token_index],
                version=batch.version,
            )

    def _behavior_weight(self, tokens: FlatBatch) -> tuple[Tensor, Tensor]:
        return behavior_weight(
            tokens.prox,
            tokens.behavior,
            tokens.mask,
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
            tokens.reference,
            kept,
            weights,
            estimator=self.kl.estimator,
            importance=importance,
        )

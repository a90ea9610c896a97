"""Trajectory Balance as an objective; the derivation is in algo/trajectory_balance.py."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lite.algo.losses import LossOutput
from areal_lite.algo.metrics import mismatch
from areal_lite.algo.objectives.base import (
    FlatBatch,
    Minibatch,
    Reduce,
    denominator,
)
from areal_lite.algo.objectives.metrics import token_metrics
from areal_lite.algo.objectives.rewards import RewardShaping
from areal_lite.algo.trajectory_balance import log_partition, log_ratios, trajectory_balance_loss


@dataclass(frozen=True, kw_only=True)
class BalanceObjective:
    """Trajectory Balance with a beta that moves in a straight line and then stays.

    beta is `beta_start` at version 0 and `beta_end` from version `beta_steps` on.
    """

    shaping: RewardShaping
    beta_start: float
    beta_end: float
    beta_steps: int

    needs_reference = True
    needs_average = False
    needs_critic = False
    recompute_prox = True

    def lr_factor(self, sums: dict[str, float]) -> float:
        return 1.0

    def beta(self, version: int) -> float:
        """Return beta in the step that starts from `version`."""
        progress = min(1.0, version / self.beta_steps)
        return self.beta_start + (self.beta_end - self.beta_start) * progress

    def mask(self, batch: FlatBatch) -> Tensor:
        """Keep whole completions: no token is too old, and the behavior log-prob is not used."""
        return self.shaping.mask(batch.sampled, batch)

    def set_targets(self, batch: FlatBatch, reduce: Reduce) -> None:
        batch.rewards = self.shaping.rewards(batch)

    def trains_on(self, batch: FlatBatch) -> Tensor:
        return torch.ones_like(batch.truncated)

    def minibatch(
        self,
        batch: FlatBatch,
        token_index: Tensor,
        current_logprobs: Callable[[], Tensor],
        reduce: Reduce,
    ) -> Minibatch:
        tokens = batch.at(token_index)
        ratios, present = log_ratios(
            current_logprobs()[token_index],
            tokens.reference,
            tokens.mask,
            tokens.sequence_ids,
            num=len(batch.rewards),
        )
        beta = self.beta(batch.version)
        return Minibatch(
            denominator=denominator(batch, token_index, mode="sequence", reduce=reduce),
            log_z=log_partition(ratios, present, batch.rewards, batch.group_ids, beta=beta),
        )

    def loss(
        self,
        batch: FlatBatch,
        minibatch: Minibatch,
        token_index: Tensor,
        logprobs: Tensor,
        entropy: Tensor,
    ) -> LossOutput:
        tokens = batch.at(token_index)
        output = trajectory_balance_loss(
            logprobs,
            tokens.reference,
            tokens.mask,
            tokens.sequence_ids,
            tokens.rewards,
            tokens.group_ids,
            beta=self.beta(batch.version),
            denominator=minibatch.denominator,
            log_z=minibatch.log_z,
        )
        metrics = {
            **output.metrics,
            **mismatch(tokens.prox, tokens.behavior, tokens.mask),
            **token_metrics(tokens, logprobs, entropy, to=("reference",)),
        }
        return LossOutput(output.loss, metrics)

"""Trajectory Balance as an objective; the derivation is in algo/trajectory_balance.py."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lite.algo.advantages import episode_mean
from areal_lite.algo.losses import LossOutput
from areal_lite.algo.metrics import mismatch
from areal_lite.algo.objectives.base import (
    FlatBatch,
    Minibatch,
    ProxPass,
    Reduce,
    denominator,
)
from areal_lite.algo.objectives.metrics import token_metrics
from areal_lite.algo.objectives.rewards import RewardShaping
from areal_lite.algo.trajectory_balance import log_partition, log_ratios, trajectory_balance_loss


@dataclass(frozen=True, kw_only=True)
class BalanceObjective:
    """Trajectory Balance with a beta that moves in a straight line and then stays.

    A completion is all that the policy wrote in an episode, with the mean reward of its traces.
    beta is `beta_start` at version 0 and `beta_end` from version `beta_steps` on.
    """

    shaping: RewardShaping
    beta_start: float
    beta_end: float
    beta_steps: int

    needs_reference = True
    needs_critic = False

    @property
    def prox_pass(self) -> ProxPass:
        return "all"

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
            tokens.token_episodes,
            num=len(batch.rewards),
        )
        rewards, group_ids = _by_episode(batch)
        beta = self.beta(batch.version)
        return Minibatch(
            denominator=denominator(batch, token_index, mode="sequence", reduce=reduce),
            log_z=log_partition(ratios, present, rewards, group_ids, beta=beta),
            completions=(ratios, batch.episode_lengths),
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
        rewards, group_ids = _by_episode(batch)
        output = trajectory_balance_loss(
            logprobs,
            tokens.reference,
            tokens.mask,
            tokens.token_episodes,
            rewards,
            group_ids,
            beta=self.beta(batch.version),
            denominator=minibatch.denominator,
            log_z=minibatch.log_z,
            whole=minibatch.completions,
        )
        metrics = {
            **output.metrics,
            **mismatch(tokens.prox, tokens.behavior, tokens.mask),
            **token_metrics(tokens, logprobs, entropy, to_reference=True),
        }
        return LossOutput(output.loss, metrics)


def _by_episode(batch: FlatBatch) -> tuple[Tensor, Tensor]:
    """Return the mean reward and the group of each episode, [n]. There may be fewer episodes."""
    rewards, group_ids = torch.zeros_like(batch.rewards), batch.group_ids.clone()
    rewards[batch.episode_ids] = episode_mean(batch.rewards, batch.episode_ids)
    group_ids[batch.episode_ids] = batch.group_ids
    return rewards, group_ids

"""Rewards of a flat batch: shaping, and the KL divergence from a reference policy as a penalty."""

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lite.algo import shaping
from areal_lite.algo.kl import kl_estimate
from areal_lite.algo.objectives.base import FlatBatch


@dataclass(frozen=True, kw_only=True)
class RewardShaping:
    """The reward to train on: scale (r + bias), clipped, less a length penalty; algo/shaping.py."""

    scale: float = 1.0
    bias: float = 0.0
    clip: float | None = None
    overlong_margin: int = 0
    mask_truncated: bool = False
    max_new_tokens: int

    def rewards(self, batch: FlatBatch) -> Tensor:
        """Shape the rewards of sequences, float [n]. Masked sampled tokens count in the length."""
        rewards = shaping.scale_and_clip(
            batch.rewards, scale=self.scale, bias=self.bias, clip=self.clip
        )
        if not self.overlong_margin:
            return rewards
        lengths = torch.bincount(batch.sequence_ids[batch.sampled], minlength=len(rewards))
        return rewards + shaping.overlong_penalty(
            lengths, max_length=self.max_new_tokens, margin=self.overlong_margin
        )

    def mask(self, mask: Tensor, batch: FlatBatch) -> Tensor:
        """Remove truncated sequences from `mask`, bool [T], if `mask_truncated`."""
        return mask & ~batch.truncated[batch.sequence_ids] if self.mask_truncated else mask


@dataclass(frozen=True, kw_only=True)
class KLTerm:
    """The divergence from another policy, times `coef`; algo/kl.py has the formulas."""

    coef: float = 0.0
    estimator: str = "k3"
    into: str = "loss"
    """`loss`, `reward` or `advantage`."""
    to: str = "reference"
    """The other policy: `reference`, `proximal` or `behavior`."""

    @property
    def in_loss(self) -> bool:
        return self.coef != 0 and self.into == "loss"

    @property
    def needs_reference(self) -> bool:
        return self.coef != 0 and self.to == "reference"

    def anchor(self, tokens: FlatBatch) -> Tensor:
        """Return the log-probs of the other policy, float [t]."""
        return getattr(tokens, "prox" if self.to == "proximal" else self.to)

    @property
    def in_reward(self) -> bool:
        return self.coef != 0 and self.into == "reward"

    def sequence_rewards(self, rewards: Tensor, batch: FlatBatch) -> Tensor:
        """Subtract the penalty of the whole episode from each sequence's reward: float [n]."""
        if not self.in_reward:
            return rewards
        penalties = shaping.kl_in_reward(
            torch.zeros_like(rewards),
            batch.prox,
            batch.reference,
            batch.mask,
            batch.token_episodes,
            beta=self.coef,
            estimator=self.estimator,
        )
        return rewards + penalties[batch.episode_ids]

    def token_rewards(self, rewards: Tensor, batch: FlatBatch) -> Tensor:
        """Place rewards at last tokens and penalties at all: float [n] -> float [T]."""
        divergence = None
        if self.in_reward:
            divergence = kl_estimate(
                batch.prox, batch.reference, batch.mask, estimator=self.estimator
            )
        return shaping.token_rewards(
            rewards, batch.mask, batch.sequence_ids, divergence=divergence, beta=self.coef
        )

    def token_advantages(self, batch: FlatBatch) -> Tensor:
        """Subtract each token's penalty from its advantage: float [T]."""
        if not self.coef or self.into != "advantage":
            return batch.advantages
        return shaping.kl_in_advantage(
            batch.advantages, batch.prox, batch.reference, batch.mask, beta=self.coef
        )

"""From rewards to the targets of the loss: shaping, a penalty for divergence, and advantages.

First pure functions, then the same for a flat batch, as the settings of `algo` say. advantages.py
has the formulas of the estimators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from areal_lite.algo import advantages
from areal_lite.algo.kl import kl_estimate
from areal_lite.algo.objective import FlatBatch, Reduce
from areal_lite.algo.sequences import sequence_sum

if TYPE_CHECKING:
    from areal_lite.config.algo import AdvantageConfig, AlgoConfig, KLConfig, ShapingConfig


def scale_and_clip(
    rewards: Tensor, *, scale: float = 1.0, bias: float = 0.0, clip: float | None = None
) -> Tensor:
    """Compute scale (r + bias), limited to [-clip, clip]."""
    shaped = scale * (rewards + bias)
    return shaped if clip is None else shaped.clamp(-clip, clip)


def overlong_penalty(lengths: Tensor, *, max_length: int, margin: int) -> Tensor:
    """Compute the soft overlong punishment to add to the reward (DAPO, arXiv 2503.14476, eq. 13).

    It is 0 up to max_length - margin tokens, falls linearly to -1 at max_length, and stays at -1.
    lengths int [n] -> float [n].
    """
    return ((max_length - margin - lengths).float() / margin).clamp(-1.0, 0.0)


def kl_in_reward(
    rewards: Tensor,
    logprobs: Tensor,
    reference: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    beta: float,
    estimator: str = "k1",
) -> Tensor:
    """Compute r_i - beta sum_t k_t over the sequence's unmasked tokens, detached.

    Source: arXiv 1909.08593. rewards float [n] -> float [n]; a sequence without unmasked tokens
    keeps its reward. sequence_ids: int [t], indices into `rewards`. kl.py has the estimators.
    """
    divergence = kl_estimate(logprobs.detach(), reference, mask, estimator=estimator)
    return rewards - beta * sequence_sum(divergence, mask, sequence_ids, num=len(rewards))


def token_rewards(
    rewards: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    divergence: Tensor | None = None,
    beta: float = 0.0,
) -> Tensor:
    """Place each sequence's reward at its last unmasked token: float [n] -> float [t].

    With `divergence`, float [t] from `kl_estimate`, every unmasked token also gets -beta k_t. The
    reward of a sequence without an unmasked token is dropped.
    """
    positions = torch.arange(len(mask), device=mask.device)
    last = torch.full((len(rewards),), -1, device=mask.device).scatter_reduce_(
        0, sequence_ids[mask], positions[mask], "amax"
    )
    result = rewards.new_zeros(len(mask))
    result[last[last >= 0]] = rewards[last >= 0]
    if divergence is None:
        return result
    return result - beta * torch.where(mask, divergence.detach(), torch.zeros_like(divergence))


def trained_mask(mask: Tensor, batch: FlatBatch, shaping: ShapingConfig) -> Tensor:
    """Remove truncated sequences from `mask`, bool [T], if `shaping.mask_truncated`."""
    return mask & ~batch.truncated[batch.sequence_ids] if shaping.mask_truncated else mask


def shaped_rewards(batch: FlatBatch, shaping: ShapingConfig, max_new_tokens: int) -> Tensor:
    """Shape the rewards of sequences, float [n]. Masked sampled tokens count in the length."""
    settings = {"scale": shaping.scale, "bias": shaping.bias, "clip": shaping.clip}
    rewards, margin = scale_and_clip(batch.rewards, **settings), shaping.overlong_margin
    if not margin:
        return rewards
    lengths = torch.bincount(batch.sequence_ids[batch.sampled], minlength=len(rewards))
    return rewards + overlong_penalty(lengths, max_length=max_new_tokens, margin=margin)


def set_advantages(batch: FlatBatch, rewards: Tensor, algo: AlgoConfig, reduce: Reduce) -> None:
    """Set `batch.advantages`, and `batch.returns` with `gae`, from shaped rewards float [n].

    A trace of an episode is a sequence. Means and deviations of rewards count its episode once.
    """
    advantage, kl, mask = algo.advantage, algo.kl, batch.mask
    match advantage.estimator:
        case "grpo" | "rloo":
            penalized = _penalized_rewards(rewards, batch, kl)
            by_sequence = _relative_to_group(penalized, batch, advantage, reduce)
            batch.advantages = by_sequence[batch.sequence_ids]
        case "reinforce_pp":
            by_token = _token_rewards(rewards, batch, kl)
            batch.advantages = advantages.reinforce_plus_plus(
                by_token, mask, batch.sequence_ids, gamma=advantage.gamma, reduce=reduce
            )
        case "gae":
            by_token, after = _token_rewards(rewards, batch, kl), _values_after_truncation(batch)
            discounts = {"gamma": advantage.gamma, "lam": advantage.lam}
            batch.advantages, batch.returns = advantages.gae(
                by_token, batch.values, mask, batch.sequence_ids, bootstrap=after, **discounts
            )
        case "off":
            batch.advantages = torch.zeros_like(batch.behavior)
        case unknown:
            raise ValueError(f"algo.advantage.estimator={unknown} is unknown")
    if advantage.whiten:
        stats = advantages.moments(batch.advantages, mask, reduce=reduce)
        batch.advantages = advantages.whiten(batch.advantages, stats, mask=mask)
    if kl.coef and kl.into == "advantage":
        # The policy gradient of this term alone is that of beta KL(policy || reference), token by
        # token over the sequences that the policy samples: on-policy distillation, if the reference
        # is a teacher (arXiv 2306.13649, section 3, with the reverse KL and only samples of the
        # student; Thinking Machines Lab, 2025, where later tokens do not count, either). Whitening
        # would take out its mean, so it comes after.
        divergence = kl_estimate(batch.prox, batch.reference, mask, estimator="k1")
        batch.advantages = batch.advantages - kl.coef * divergence


def _relative_to_group(
    rewards: Tensor, batch: FlatBatch, advantage: AdvantageConfig, reduce: Reduce
) -> Tensor:
    group_ids, episode_ids = batch.group_ids, batch.episode_ids
    if advantage.estimator == "rloo":
        return advantages.rloo(rewards, group_ids, episode_ids=episode_ids)
    whole_batch = None
    if "batch" in (advantage.mean, advantage.std):
        weights = advantages.shares(rewards, episode_ids)
        whole_batch = advantages.moments(rewards, weights=weights, reduce=reduce)
    return advantages.grpo(
        rewards,
        group_ids,
        episode_ids=episode_ids,
        divide_by_std=advantage.std != "off",
        batch_mean=whole_batch if advantage.mean == "batch" else None,
        batch_std=whole_batch if advantage.std == "batch" else None,
    )


def _penalized_rewards(rewards: Tensor, batch: FlatBatch, kl: KLConfig) -> Tensor:
    """Subtract the penalty of the whole episode from each sequence's reward: float [n]."""
    if not kl.coef or kl.into != "reward":
        return rewards
    none, settings = torch.zeros_like(rewards), {"beta": kl.coef, "estimator": kl.estimator}
    tokens = batch.prox, batch.reference, batch.mask, batch.token_episodes
    return rewards + kl_in_reward(none, *tokens, **settings)[batch.episode_ids]


def _token_rewards(rewards: Tensor, batch: FlatBatch, kl: KLConfig) -> Tensor:
    """Place rewards at last tokens and penalties at all: float [n] -> float [T]."""
    divergence = None
    if kl.coef and kl.into == "reward":
        divergence = kl_estimate(batch.prox, batch.reference, batch.mask, estimator=kl.estimator)
    return token_rewards(
        rewards, batch.mask, batch.sequence_ids, divergence=divergence, beta=kl.coef
    )


def _values_after_truncation(batch: FlatBatch) -> Tensor:
    """Return the value of the state in which each sequence was cut off: float [n], else 0.

    The token limit is not a property of the task, so a truncated sequence is worth what would have
    followed (arXiv 1712.00378, section 4).
    """
    sequences = torch.arange(len(batch.truncated), device=batch.sequence_ids.device)
    first = torch.searchsorted(batch.sequence_ids, sequences)
    return torch.where(batch.truncated, batch.values[first], 0.0)

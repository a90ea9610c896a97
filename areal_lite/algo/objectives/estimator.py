"""Advantages of a flat batch by the chosen estimator; the formulas are in algo/advantages.py."""

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lite.algo import advantages
from areal_lite.algo.objectives.base import FlatBatch, Reduce
from areal_lite.algo.objectives.rewards import KLTerm


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimator:
    """The advantages of shaped rewards, and with `gae` the critic's targets."""

    estimator: str = "grpo"
    """One advantage per sequence (`grpo`, `rloo`) or token (`reinforce_pp`, `gae`); `off`: 0.

    A trace of an episode is a sequence. Means and deviations of rewards count its episode once."""
    mean: str = "group"
    """grpo: baseline over the `group` or the `batch`, or the `optimal` one of the group."""
    std: str = "group"
    """grpo: divide by the deviation of the `group` or the `batch`, or `off`."""
    leave_one_out: bool = False
    """grpo: the baseline is the mean of the others."""
    whiten: bool = False
    """Normalize over the tokens of the batch."""
    gamma: float = 1.0
    """reinforce_pp, gae: discount per token."""
    lam: float = 1.0
    """gae: lambda."""

    @property
    def needs_norms(self) -> bool:
        return self.estimator == "grpo" and self.mean == "optimal"

    def set_advantages(
        self,
        batch: FlatBatch,
        rewards: Tensor,
        kl: KLTerm,
        reduce: Reduce,
        squared_norms: Tensor | None = None,
    ) -> None:
        """Set `batch.advantages`, and `batch.returns` with `gae`, from rewards float [n].

        squared_norms: float [n], if `needs_norms`; see `advantages.optimal_baseline`
        """
        mask, sequence_ids = batch.mask, batch.sequence_ids
        match self.estimator:
            case "grpo" | "rloo":
                penalized = kl.sequence_rewards(rewards, batch)
                by_sequence = self._relative_to_group(penalized, batch, reduce, squared_norms)
                batch.advantages = by_sequence[sequence_ids]
            case "reinforce_pp":
                batch.advantages = advantages.reinforce_plus_plus(
                    kl.token_rewards(rewards, batch),
                    mask,
                    sequence_ids,
                    gamma=self.gamma,
                    reduce=reduce,
                )
            case "gae":
                batch.advantages, batch.returns = advantages.gae(
                    kl.token_rewards(rewards, batch),
                    batch.values,
                    mask,
                    sequence_ids,
                    gamma=self.gamma,
                    lam=self.lam,
                    bootstrap=_values_after_truncation(batch),
                )
            case "off":
                batch.advantages = torch.zeros_like(batch.behavior)
            case unknown:
                raise ValueError(f"algo.advantage.estimator={unknown} is unknown")
        if self.whiten:
            stats = advantages.moments(batch.advantages, mask, reduce=reduce)
            batch.advantages = advantages.whiten(batch.advantages, stats, mask=mask)

    def _relative_to_group(
        self, rewards: Tensor, batch: FlatBatch, reduce: Reduce, squared_norms: Tensor | None
    ) -> Tensor:
        group_ids, episode_ids = batch.group_ids, batch.episode_ids
        if self.estimator == "rloo":
            return advantages.rloo(rewards, group_ids, episode_ids=episode_ids)
        weights = advantages.shares(rewards, episode_ids)
        whole_batch = advantages.moments(rewards, weights=weights, reduce=reduce)
        return advantages.grpo(
            rewards,
            group_ids,
            episode_ids=episode_ids,
            divide_by_std=self.std != "off",
            leave_one_out=self.leave_one_out,
            batch_mean=whole_batch if self.mean == "batch" else None,
            batch_std=whole_batch if self.std == "batch" else None,
            squared_norms=squared_norms,
        )


def _values_after_truncation(batch: FlatBatch) -> Tensor:
    """Return the value of the state in which each sequence was cut off: float [n], else 0.

    The token limit is not a property of the task, so a truncated sequence is worth what would have
    followed (arXiv 1712.00378, section 4).
    """
    sequences = torch.arange(len(batch.truncated), device=batch.sequence_ids.device)
    first = torch.searchsorted(batch.sequence_ids, sequences)
    return torch.where(batch.truncated, batch.values[first], 0.0)

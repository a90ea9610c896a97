"""Trajectory Balance: an objective that is off-policy by construction.

Sources: TBA, arXiv 2503.18929; Malkin et al., arXiv 2201.13259.

The policy that maximizes E[R] - beta KL(theta || ref) is proportional to ref exp(R / beta). For
this policy the value

    d_k = lp_theta(y_k) - lp_ref(y_k) - R_k / beta          (log-probs of whole completions)

is the same for every completion y_k of a prompt: -log Z. The loss makes it the same, whichever
policy sampled y_k (VarGrad, arXiv 2010.10436):

    logZ = mean_k(-d_k), detached
    loss = mean_k (logZ + d_k)^2, the variance of d in the group

* The gradient is -(2 / beta) mean_k A_k grad lp_theta(y_k), where A_k is R_k - beta KL_k less its
  group's mean. On-policy this is REINFORCE with a group baseline on a KL-shaped reward.
* The loss grows with (length / beta)^2: clip the gradient.
* A group is the completions that carry one id and have an unmasked token. A completion that is
  alone in its group has loss 0.
* A completion is all that the policy wrote in an episode, whose traces may be in several
  microbatches. A mask that hides a part of one changes the objective.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lite.algo import objective
from areal_lite.algo.advantages import episode_mean
from areal_lite.algo.losses import LossOutput
from areal_lite.algo.metrics import mismatch
from areal_lite.algo.objective import FlatBatch, Logprobs, Minibatch, Objective, Reduce
from areal_lite.algo.sequences import group_mean, sequence_length, sequence_sum


def log_ratios(
    logprobs: Tensor, reference: Tensor, mask: Tensor, sequence_ids: Tensor, *, num: int
) -> tuple[Tensor, Tensor]:
    """Compute lp_theta(y) - lp_ref(y), float [num] with gradient, and find those with tokens."""
    present = sequence_length(mask, sequence_ids, num=num) > 0
    return sequence_sum(logprobs - reference.detach(), mask, sequence_ids, num=num), present


def log_partition(
    log_ratio: Tensor, present: Tensor, rewards: Tensor, group_ids: Tensor, *, beta: float
) -> Tensor:
    """Estimate log Z of each sequence's group, detached: [n] -> [n].

    VarGrad's estimate is the mean of R / beta - log_ratio over the sequences that are `present`.
    """
    return group_mean(rewards / beta - log_ratio.detach(), present, group_ids)


def trajectory_balance_loss(
    logprobs: Tensor,
    reference: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    rewards: Tensor,
    group_ids: Tensor,
    *,
    beta: float,
    denominator: float,
    log_z: Tensor | None = None,
    whole: tuple[Tensor, Tensor] | None = None,
) -> LossOutput:
    """Compute sum_k (logZ + d_k)^2 / denominator. Metrics are sums over sequences.

    Args:
        logprobs, reference: float [t], lp_theta with gradient, and lp_ref
        sequence_ids: int [t], indices into `rewards`, float [n], and `group_ids`, int [n]
        denominator: sequences with an unmasked token, over all ranks and microbatches
            (`reduction_count(mode="sequence")`); every completion then counts the same, also in a
            group that has lost some
        log_z: float [n], from `log_partition`; computed here by default, which needs whole groups
        whole: `log_ratios` and unmasked tokens, [n] each, of completions that are only partly here;
            the parts of a completion, and their gradients, add up to those of its square
    """
    here, present = log_ratios(logprobs, reference, mask, sequence_ids, num=len(rewards))
    if log_z is None:
        log_z = log_partition(here, present, rewards, group_ids, beta=beta)
    length = sequence_length(mask, sequence_ids, num=len(rewards))
    log_ratio, whole_length = (here, length) if whole is None else whole
    residual = torch.where(present, log_z + log_ratio - rewards / beta, 0.0).detach()
    share = length / whole_length.clamp(min=1)
    # The value of the part, and the gradient of the whole by what is here.
    squares = share * residual**2 + 2 * residual * (here - here.detach())
    metrics = {"log_z": (share * log_z).sum().float(), "sequences": share.sum().float()}
    return LossOutput(squares.sum() / denominator, metrics)


@dataclass(frozen=True, kw_only=True)
class BalanceObjective(Objective):
    """Trajectory Balance with beta = `algo.kl.coef`.

    A completion is all that the policy wrote in an episode, with the mean reward of its traces.
    """

    def mask(self, batch: FlatBatch) -> Tensor:
        """Keep whole completions: no token is too old, and the behavior log-prob is not used."""
        return self._trained(batch.sampled, batch)

    def set_targets(self, batch: FlatBatch, reduce: Reduce) -> None:
        batch.rewards = self.shaped_rewards(batch)

    def minibatch(
        self, batch: FlatBatch, index: Tensor, current_logprobs: Logprobs, reduce: Reduce
    ) -> Minibatch:
        tokens, num = batch.at(index), len(batch.rewards)
        logprobs, episodes = current_logprobs()[index], tokens.token_episodes
        ratios, present = log_ratios(logprobs, tokens.reference, tokens.mask, episodes, num=num)
        return Minibatch(
            denominator=objective.denominator(batch, index, mode="sequence", reduce=reduce),
            episode_lengths=batch.episode_lengths,
            log_z=log_partition(ratios, present, *_by_episode(batch), beta=self.algo.kl.coef),
            log_ratios=ratios,
        )

    def loss(
        self, batch: FlatBatch, update: Minibatch, index: Tensor, logprobs: Tensor, entropy: Tensor
    ) -> LossOutput:
        tokens = batch.at(index)
        assert update.log_ratios is not None
        loss, metrics = trajectory_balance_loss(
            logprobs,
            tokens.reference,
            tokens.mask,
            tokens.token_episodes,
            *_by_episode(batch),
            beta=self.algo.kl.coef,
            denominator=update.denominator,
            log_z=update.log_z,
            whole=(update.log_ratios, update.episode_lengths),
        )
        metrics |= mismatch(tokens.prox, tokens.behavior, tokens.mask)
        metrics |= objective.token_metrics(tokens, logprobs, entropy, to_reference=True)
        return LossOutput(loss, metrics)


def _by_episode(batch: FlatBatch) -> tuple[Tensor, Tensor]:
    """Return the mean reward and the group of each episode, [n]. There may be fewer episodes."""
    rewards, group_ids = torch.zeros_like(batch.rewards), batch.group_ids.clone()
    rewards[batch.episode_ids] = episode_mean(batch.rewards, batch.episode_ids)
    group_ids[batch.episode_ids] = batch.group_ids
    return rewards, group_ids

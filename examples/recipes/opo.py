"""OPO: on-policy REINFORCE with the baseline of least variance (arXiv 2505.23585).

    L_t = -w_t (A_i - b) lp_theta,  b = sum_i q_i A_i / sum_i q_i over the group

A_i is the reward less the mean of its group, and q_i the sum of the squared weights
w_t = min(exp(lp_prox - lp_behav), 5) of completion i: its length, on fresh data. The weights are
ours; on data of the newest weights they are 1.

    areal-lite train algo.loss=examples.recipes.opo:loss schedule=sync algo.reduction=constant \
      algo.advantage.std=off algo.advantage.whiten=false model=…

Paper: On-Policy RL with Optimal Reward Baseline. Source: docs/algo/opo.md of verl as
mit-han-lab/vcpo has it at c7f030f: no entropy bonus, no KL, one update per batch of 1024.
reduction=constant divides the sum of token losses by rollout.max_new_tokens, which only changes the
size of the gradient.
"""

import torch
from torch import Tensor

from areal_lite.algo.correction import behavior_weight
from areal_lite.algo.objective import OwnLoss
from areal_lite.algo.sequences import sequence_sum

CAP = 5.0


def optimal_baseline(rewards: Tensor, group_ids: Tensor, squared_norms: Tensor) -> Tensor:
    """Compute the baseline of least variance, sum_i q_i r_i / sum_i q_i over the group: float [n].

    q_i is the squared norm of what sequence i adds to the gradient per unit of advantage. With
    orthogonal and equally long gradients of tokens it is proportional to the sum of w_t^2.
    squared_norms: float [n] >= 0, q up to a factor; the baseline is 0 where all are 0.
    """
    _, group = torch.unique(group_ids, return_inverse=True)
    sums = rewards.new_zeros(2, len(rewards))
    total, norm = sums.index_add_(1, group, torch.stack([squared_norms * rewards, squared_norms]))
    return torch.where(norm > 0, total / norm, torch.zeros_like(norm))[group]


def prepare(tokens, algo, reduce):
    """Compute the baseline b of each sequence. An update has whole groups."""
    weight, kept = behavior_weight(tokens.prox, tokens.behavior, tokens.mask, mode="cap", cap=CAP)
    num, ids = len(tokens.rewards), tokens.sequence_ids
    norms = sequence_sum(weight**2, kept, ids, num=num)
    advantages = sequence_sum(tokens.advantages, tokens.mask, ids, num=num)
    lengths = sequence_sum(tokens.mask.to(weight.dtype), tokens.mask, ids, num=num)
    advantages = advantages / lengths.clamp(min=1)
    return {"baseline": optimal_baseline(advantages, tokens.group_ids, norms)}


def opo(tokens, logprobs, algo, baseline):
    weight, _ = behavior_weight(
        logprobs.detach(), tokens.behavior, tokens.mask, mode="cap", cap=CAP
    )
    return -weight * (tokens.advantages - baseline[tokens.sequence_ids]) * logprobs


loss = OwnLoss(opo, prepare)

"""VCPO: one weight per completion, a baseline and a learning rate that suit it (arXiv 2602.17616).

    L_t = -w_i (A_i - b) lp_theta,  w_i = min(exp(sum_t (lp_theta - lp_behav)), 8)
    b = sum_i q_i A_i / sum_i q_i over the group,  q_i = w_i^2 / n_i
    lr' = lr sqrt((sum_i W_i)^2 / (n sum_i W_i^2)),  W_i = exp(sum_t (lp_prox - lp_behav))

A_i is the normalized reward, n_i the length of completion i, and n the number of completions of the
update. The learning rate follows the effective sample size of the weights before their bound. The
square root suits Adam.

    areal-lite train algo.loss=examples.recipes.vcpo:loss algo.reduction=sequence \
      algo.advantage.whiten=false model=…

Paper: Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs. Source: README.md and
recipe/fully_async_policy/shell/vcpo/gsm8k/vcpo_k=12.sh of mit-han-lab/vcpo at c7f030f. Its baseline
measures the gradient norm of each completion; the one here takes it to grow with the length.
Their scale (the script): 8 prompts, learning rate 1e-6, weight decay 0.1, gradient norm 1.0, 500
updates, 2048 new tokens, weights up to 12 steps old.
"""

import torch

from areal_lite.algo.correction import behavior_weight
from areal_lite.algo.metrics import effective_sample_size
from areal_lite.algo.objective import OwnLoss
from areal_lite.algo.sequences import sequence_length, sequence_sum
from examples.recipes.opo import optimal_baseline

# The square of a weight of e^300 is still finite in float64, and so is a sum of such squares.
_LARGEST_LOG_WEIGHT = 300.0
WEIGHT = {"mode": "cap", "cap": 8.0, "level": "product"}


def prepare(tokens, algo, reduce):
    """Compute the baseline b of each sequence, and the factor of the learning rate."""
    ids, num = tokens.sequence_ids, len(tokens.rewards)
    weight, kept = behavior_weight(
        tokens.prox, tokens.behavior, tokens.mask, sequence_ids=ids, **WEIGHT
    )
    lengths = sequence_sum(tokens.mask.to(weight.dtype), tokens.mask, ids, num=num).clamp(min=1)
    advantages = sequence_sum(tokens.advantages, tokens.mask, ids, num=num) / lengths
    written = tokens.episode_lengths.clamp(min=1)[tokens.episode_ids]
    norms = sequence_sum(weight**2, kept, ids, num=num) / written**2
    log_ratio = (tokens.prox - tokens.behavior).double()
    present = sequence_length(tokens.mask, ids, num=num) > 0
    log_weight = sequence_sum(log_ratio, tokens.mask, ids, num=num)[present]
    unbounded = log_weight.clamp(max=_LARGEST_LOG_WEIGHT).exp()
    sums = torch.stack([present.sum().double(), unbounded.sum(), (unbounded**2).sum()])
    count, total, squares = reduce(sums).tolist()
    return {
        "baseline": optimal_baseline(advantages, tokens.group_ids, norms),
        "lr_factor": effective_sample_size(total, squares, count) ** 0.5,
    }


def vcpo(tokens, logprobs, algo, baseline):
    weight, _ = behavior_weight(
        logprobs.detach(),
        tokens.behavior,
        tokens.mask,
        sequence_ids=tokens.sequence_ids,
        **WEIGHT,
    )
    return -weight * (tokens.advantages - baseline[tokens.sequence_ids]) * logprobs


loss = OwnLoss(vcpo, prepare)

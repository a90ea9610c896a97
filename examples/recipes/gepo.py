"""GEPO: a completion's ratio to the expectation of its group (arXiv 2508.17850).

    L_t = max(-A_i s_i, -A_i clip(s_i, 1 - eps_low, 1 + eps_high)) + 0.005 k3_t
    s_i = p_i / E_q[q],  E_q[q] = sum_j q_j^2 / sum_j q_j over the group

p_i is the geometric mean of the probabilities of completion i's tokens, q_j the same under the
policy that sampled completion j. The denominator is one for a whole group, so it varies less than
that of GSPO. k3 estimates the divergence from the behavior policy.

    areal-lite train algo.loss=examples.recipes.gepo:loss algo.reduction=sequence \
      algo.advantage.std=off algo.advantage.whiten=false model=…

Paper: Group Expectation Policy Optimization for Heterogeneous Reinforcement Learning.
Sources: README.md, recipes/HeteoRL/config.yaml, sh_dir/HeteroRL_Learner_4gpus.sh and
src/open-r1/learner_script_checkpoint.py of yelurebajrang/HeteroRL_GEPO at 97000a8. The clip range
of 0.2 is the default of huggingface/trl, on which the code is built.
Their scale (config and script): 8 answers per prompt, learning rate 1e-6, 2048 new tokens,
temperature 0.6, data up to 32 steps old (64 in the README's table).
"""

import torch

from areal_lite.algo.losses import clipped, kl_estimate
from areal_lite.algo.metrics import bounded_exp
from areal_lite.algo.objective import OwnLoss, TokenLoss
from areal_lite.algo.sequences import sequence_length, sequence_mean, sequence_sum

PENALTY = 0.005


def prepare(tokens, algo, reduce):
    """Compute log E_q[q] of each sequence's group. An update has whole groups."""
    num, ids = len(tokens.rewards), tokens.sequence_ids
    length = sequence_length(tokens.mask, ids, num=num)
    log_q = sequence_sum(tokens.behavior.double(), tokens.mask, ids, num=num)
    q = (log_q / length.clamp(min=1)).exp() * (length > 0)
    _, group = torch.unique(tokens.group_ids, return_inverse=True)
    total, squares = (q.new_zeros(num).index_add(0, group, x) for x in (q, q**2))
    # A group without tokens has no ratio; any number will do.
    return {"log_q": torch.where(total > 0, squares / total, 1.0).log()[group]}


def gepo(tokens, logprobs, algo, log_q):
    log_p = sequence_mean(logprobs, tokens.mask, tokens.sequence_ids)
    ratio = bounded_exp(log_p[tokens.sequence_ids] - log_q[tokens.sequence_ids].to(logprobs.dtype))
    losses = clipped(ratio, tokens.advantages, eps_low=algo.eps_low, eps_high=algo.eps_high)
    clip = losses > -tokens.advantages * ratio
    penalty = PENALTY * kl_estimate(logprobs, tokens.behavior, tokens.mask, estimator="k3")
    return TokenLoss(losses + penalty, metrics={"clip_fraction": clip})


loss = OwnLoss(gepo, prepare)

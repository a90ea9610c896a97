"""DPPO: a trust region of probabilities instead of ratios (arXiv 2602.04879).

    L_t = -A_t exp(lp_theta - lp_behav) + 0.001 (lp_theta - lp_behav)^2

A token leaves the loss if its probability has moved by more than 0.2, |p_prox - p_behav| > 0.2, and
the update would move it further away, A_t (lp_prox - lp_behav) > 0. This is the paper's binary
approximation of total variation.

    areal-lite train algo.loss=examples.recipes.dppo:loss algo.advantage.std=off \
      algo.advantage.whiten=false model=…

Paper: Divergence Proximal Policy Optimization: Rethinking the Trust Region in LLM Reinforcement
Learning. Source: the default loss of PrimeIntellect-ai/prime-rl at 559b447
(src/prime_rl/trainer/rl/loss.py), with its penalty of 1e-3. There the policy in training rejects,
which is the same with one update per batch, and rejected tokens have the penalty, too.
"""

from areal_lite.algo.metrics import bounded_exp
from areal_lite.algo.objective import OwnLoss, TokenLoss
from examples.recipes.m2po import outward

BOUND, PENALTY = 0.2, 1e-3


def dppo(tokens, logprobs, algo):
    moved = (tokens.prox.exp() - tokens.behavior.exp()).abs() > BOUND
    far = moved & outward(tokens.prox, tokens.behavior, tokens.advantages)
    log_ratio = logprobs - tokens.behavior
    losses = -tokens.advantages * bounded_exp(log_ratio) + PENALTY * log_ratio**2
    return TokenLoss(losses, kept=~far)


loss = OwnLoss(dppo)

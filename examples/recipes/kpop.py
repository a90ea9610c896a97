"""KPop: tokens whose probability has changed too much leave the loss (ringtech.notion.site/kpop).

Decoupled PPO with a weight w_t = exp(lp_prox - lp_behav) of at most 1e6:

    L_t = w_t max(-A_t r_t, -A_t clip(r_t, 1 - eps_low, 1 + eps_high))
    r_t = exp(lp_theta - lp_prox)

With p and q the probability of a token under proximal and behavior policy, and all other tokens of
the vocabulary counted as one, it leaves the loss if the larger of

    p log(p / q) + (1 - p) log((1 - p) / (1 - q))   and the same with p and q exchanged

is above 0.1. For rare tokens that allows a large ratio, for likely ones a small one.

    areal-lite train algo.loss=examples.recipes.kpop:loss algo.eps_low=0.4 algo.eps_high=0.4 model=…

Sources: examples/math/gsm8k_kpop.yaml, docs/en/algorithms/grpo_series.md and
areal/utils/functional/functional.py of areal-project/AReaL at cbff54d: advantages normalized over
the group and then over the batch. The bound of 0.1 is the paper's according to
PrimeIntellect-ai/prime-rl#3283; AReaL's example has 2.0. AReaL's denominator leaves rejected tokens
out; here it counts them.
Their scale (the example): 4 answers per prompt, one update per batch, learning rate 1.7e-5,
weight decay 0.017, gradient norm 1.0, 1024 new tokens, data up to 2 steps old.
"""

import math

import torch
from torch import Tensor

from areal_lite.algo.correction import behavior_weight
from areal_lite.algo.losses import clipped
from areal_lite.algo.metrics import bounded_exp
from areal_lite.algo.objective import OwnLoss, TokenLoss

BOUND, CAP = 0.1, 1e6
# Where p or 1 - p is smaller, the divergence is computed with this (as prime-rl does).
_LEAST = 1e-6


@torch.no_grad()
def binary_kl(prox: Tensor, behavior: Tensor) -> Tensor:
    """Compute the larger of the two divergences of each token: float [t], in nats."""
    bounds = math.log(_LEAST), math.log1p(-_LEAST)
    log_p, log_q = prox.clamp(*bounds), behavior.clamp(*bounds)
    chosen = log_p - log_q
    other = torch.log1p(-log_p.exp()) - torch.log1p(-log_q.exp())
    forward, reverse = (lp.exp() * chosen + (1 - lp.exp()) * other for lp in (log_p, log_q))
    return torch.maximum(forward, -reverse).clamp(min=0)


def kpop(tokens, logprobs, algo):
    near = binary_kl(tokens.prox, tokens.behavior) <= BOUND
    weight, kept = behavior_weight(
        tokens.prox, tokens.behavior, tokens.mask & near, mode="cap", cap=CAP
    )
    ratio = bounded_exp(logprobs - tokens.prox)
    losses = clipped(ratio, tokens.advantages, eps_low=algo.eps_low, eps_high=algo.eps_high)
    clip = kept & (losses > -tokens.advantages * ratio)
    return TokenLoss(weight * losses, kept, {"clip_fraction": clip})


loss = OwnLoss(kpop, zero_without_advantage=True)

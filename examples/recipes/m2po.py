"""M2PO: no clip; the tokens that have moved furthest leave the loss (arXiv 2510.01161).

    L_t = -A_t exp(lp_theta - lp_behav)

d_t = lp_prox - lp_behav. Among the tokens that the update moves further away, A_t d_t > 0, the ones
with the largest d_t^2 leave the loss, until the mean d^2 of the others is below 0.04. All ranks and
microbatches of an update count as one batch.

    areal-lite train algo.loss=examples.recipes.m2po:loss algo.advantage.whiten=false model=…

Paper: Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?
Sources: train-scripts/m2po-qwen-math-7b-s256.sh and verl/trainer/ppo/core_algos.py of
Infini-AI-Lab/M2PO at af54a3e. There the bound is on tokens that are clipped; here they leave.
docs/en/algorithms/m2po.md of inclusionAI/AReaL at 4aef98d bounds all tokens, in decoupled PPO.
Their scale (the script): 256 prompts x 8 answers, 4 minibatches, learning rate 1e-6, 2560 new
tokens, data 256 updates old.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from areal_lite.algo.metrics import bounded_exp
from areal_lite.algo.objective import OwnLoss, TokenLoss

BOUND = 0.04
_LARGEST = 0x7F7FFFFF  # the bits of the largest finite float32


def outward(prox: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    """Mark the tokens whose update moves them further from the behavior policy: bool [t]."""
    return advantages * (prox - behavior) > 0


@torch.no_grad()
def batch_limit(
    values: Tensor, *, bound: float, reduce: Callable[[Tensor], Tensor] = lambda partial: partial
) -> Tensor:
    """Find the largest limit such that the values up to it have a mean below `bound`: a scalar.

    Every rank calls it, with the values of its tokens, float [t] >= 0. `reduce` sums over ranks.
    Equal values stay or leave together. The bits of positive float32 numbers are in the order of
    the numbers, so each round finds eight bits of the limit.
    """
    ordered = values.float().sort().values
    sums = torch.cat([ordered.new_zeros(1), ordered]).double().cumsum(0)
    digits = torch.arange(256, dtype=torch.int32, device=values.device)
    limit = torch.zeros_like(digits[:1])
    for shift, choices in ((24, 128), (16, 256), (8, 256), (0, 256)):
        candidates = (limit + (digits[:choices] << shift)).clamp(max=_LARGEST)
        below = torch.searchsorted(ordered, candidates.view(torch.float32), right=True)
        count, total = reduce(torch.stack([below.double(), sums[below]]))
        # The mean grows with the limit, so all candidates up to the last good one are good.
        good = (total < bound * count) | (count == 0)
        limit = candidates[good.sum() - 1].view(1)
    return limit.view(torch.float32)[0]


def prepare(tokens, algo, reduce):
    """Find the largest d^2 that stays, over all tokens of the update."""
    moving = tokens.mask & outward(tokens.prox, tokens.behavior, tokens.advantages)
    squares = (tokens.prox - tokens.behavior) ** 2
    return {"limit": batch_limit(squares[moving], bound=BOUND, reduce=reduce)}


def m2po(tokens, logprobs, algo, limit):
    moving = outward(tokens.prox, tokens.behavior, tokens.advantages)
    far = moving & ((tokens.prox - tokens.behavior) ** 2 > limit)
    return TokenLoss(-tokens.advantages * bounded_exp(logprobs - tokens.behavior), kept=~far)


loss = OwnLoss(m2po, prepare, zero_without_advantage=True)

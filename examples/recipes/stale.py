"""For data many steps old: decoupled PPO (arXiv 2505.24298) with M2PO's bound (arXiv 2510.01161).

    L_t = w_t max(-A_t r_t, -A_t clip(r_t, 1 - eps_low, 1 + eps_high))
    r_t = exp(lp_theta - lp_prox),  w_t = min(exp(d_t), 5),  d_t = lp_prox - lp_behav

Among the tokens that the update moves further away, A_t d_t > 0, the ones with the largest d_t^2
leave the loss, until the mean d^2 of the others is below 0.04.

    areal-lite train algo.loss=examples.recipes.stale:loss algo.eps_low=0.1 algo.eps_high=0.1 \
      algo.advantage.whiten=false buffer.max_staleness=16 model=…

Sources: conf/algo/areal.yaml and examples/recipes/m2po.py for the parts. The combination is
measured in benchmarks/results/staleness/README.md: with a small learning rate no run lost what it
had learned at a lag of 64 steps. Stale data needs a smaller trainer.lr than fresh data: a third was
right at a lag of 64, and 0.6 at 32.
"""

from areal_lite.algo.correction import behavior_weight
from areal_lite.algo.losses import clipped
from areal_lite.algo.metrics import bounded_exp
from areal_lite.algo.objective import OwnLoss, TokenLoss
from examples.recipes.m2po import outward, prepare

CAP = 5.0


def stale(tokens, logprobs, algo, limit):
    moving = outward(tokens.prox, tokens.behavior, tokens.advantages)
    far = moving & ((tokens.prox - tokens.behavior) ** 2 > limit)
    weight, kept = behavior_weight(
        tokens.prox, tokens.behavior, tokens.mask & ~far, mode="cap", cap=CAP
    )
    ratio = bounded_exp(logprobs - tokens.prox)
    losses = clipped(ratio, tokens.advantages, eps_low=algo.eps_low, eps_high=algo.eps_high)
    clip = kept & (losses > -tokens.advantages * ratio)
    return TokenLoss(weight * losses, kept, {"clip_fraction": clip})


loss = OwnLoss(stale, prepare, zero_without_advantage=True)

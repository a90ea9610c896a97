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

from areal_lite.algo.metrics import bounded_exp
from areal_lite.algo.objective import OwnLoss, TokenLoss
from areal_lite.algo.rejection import batch_limit, outward

BOUND = 0.04


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

"""Staleness without mismatch: log-ratios that leave out how servers compute differently.

Trainer and server give the same token slightly different log-probs under the same weights, most of
all in bfloat16. So d = lp_prox - lp_behav = s + m. The part s is due to the weights, which changed
since the token was sampled, and m is the mismatch. A fresh token, of staleness 0, has s = 0, so
fresh tokens show the size of m. If m is as large for older tokens, and not correlated with s, then
second moments add up:

    E[d^2 | staleness k] = E[s^2 | k] + E[m^2],    E[m^2] = E[d^2 | 0]

and the best linear estimate of s is (1 - E[m^2] / E[d^2 | k]) d, as in a Wiener filter (Wiener,
1949). It is 0 for fresh tokens, d without a mismatch, and in between otherwise. The estimate is of
no use where no token is fresh: then s = d. The loss is decoupled PPO (arXiv 2505.24298) with

    w_t = min(exp(s_t), 5)

    areal-lite train algo.loss=examples.recipes.mismatch:loss algo.advantage.whiten=false model=…

Ours. The metrics mismatch_square and stale_square of every run show both parts.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from areal_lite.algo.correction import behavior_weight
from areal_lite.algo.losses import clipped
from areal_lite.algo.metrics import bounded_exp, by_staleness
from areal_lite.algo.objective import OwnLoss, TokenLoss

CAP = 5.0
OLDEST = 16  # staler tokens count as this stale


@torch.no_grad()
def staleness_share(
    difference: Tensor,
    versions: Tensor,
    mask: Tensor,
    *,
    version: int,
    oldest: int,
    reduce: Callable[[Tensor], Tensor] = lambda partial: partial,
) -> Tensor:
    """Estimate the share of d that is staleness, by staleness: float64 [oldest + 1], 0 to 1.

    Every rank calls it. The shares are all 1 if no token is fresh.

    Args:
        difference: float [t], lp_prox - lp_behav
        versions: int [t], those that sampled the tokens
        mask: bool [t]
        version: the trainer's at the start of the step
        oldest: tokens that are staler count as this stale
        reduce: sums a tensor over ranks
    """
    total, count = by_staleness(
        difference.double() ** 2, versions, mask, version=version, oldest=oldest
    )
    total, count = reduce(torch.stack([total, count.double()]))
    moment = total / count.clamp(min=1)
    if count[0] == 0:
        return torch.ones_like(moment)
    share = torch.where(moment > moment[0], 1 - moment[0] / moment, torch.zeros_like(moment))
    return torch.where(count > 0, share, torch.ones_like(share))


def trainer_behavior(
    prox: Tensor, behavior: Tensor, versions: Tensor, share: Tensor, *, version: int
) -> Tensor:
    """Estimate what the trainer would have given for `behavior`: lp_prox - s, float [t].

    Args:
        prox, behavior: float [t], log-probs
        versions: int [t], -1 where a token was not sampled
        share: from `staleness_share`
        version: the trainer's at the start of the step
    """
    age = (version - versions).clamp(0, len(share) - 1).long()
    return prox - share.to(prox.dtype)[age] * (prox - behavior)


def prepare(tokens, algo, reduce):
    difference = tokens.prox - tokens.behavior
    where = {"version": tokens.version, "oldest": OLDEST, "reduce": reduce}
    return {"share": staleness_share(difference, tokens.versions, tokens.mask, **where)}


def mismatch(tokens, logprobs, algo, share):
    behavior = trainer_behavior(
        tokens.prox, tokens.behavior, tokens.versions, share, version=tokens.version
    )
    weight, kept = behavior_weight(tokens.prox, behavior, tokens.mask, mode="cap", cap=CAP)
    ratio = bounded_exp(logprobs - tokens.prox)
    losses = clipped(ratio, tokens.advantages, eps_low=algo.eps_low, eps_high=algo.eps_high)
    clip = kept & (losses > -tokens.advantages * ratio)
    return TokenLoss(weight * losses, kept, {"clip_fraction": clip})


loss = OwnLoss(mismatch, prepare, zero_without_advantage=True)

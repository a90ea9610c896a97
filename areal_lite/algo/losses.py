"""Policy losses of flat tokens.

Per token, with advantage A, mask m, and N the number of unmasked tokens of the minibatch over all
ranks and microbatches:

    w = behavior correction (algo/correction.py), detached
    r = exp(lp_theta - lp_prox)
    L = w * max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))    [dual clip: min(., c |A|) if A < 0]
    loss = sum(m L) / N

* A call takes the tokens of one microbatch and the global N, and returns that microbatch's share.
  Shares add up, however tokens were packed.
* Decoupled, the ratio is to the proximal policy, and w corrects for the behavior policy. Naive
  (`decoupled=False`), the ratio is to the behavior policy, and w = 1.
* Other means than that over tokens are weights (sequences.py).

With d = lp_theta - lp_ref at tokens that were sampled from the policy, these estimate
KL(theta || ref) (Schulman, "Approximating KL divergence", 2020):

    k1 = d                  unbiased, can be negative; its expected gradient as a loss is 0, so it
                            belongs in the reward only
    k2 = d^2 / 2            biased; its expected gradient on-policy is that of the KL, so it is the
                            estimate for a loss
    k3 = exp(-d) - 1 + d    unbiased, >= 0; its gradient is that of KL(ref || theta)
                            (GRPO, arXiv 2402.03300, eq. 4)
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from areal_lite.algo.correction import Correction, behavior_weight, finite_mask
from areal_lite.algo.metrics import bounded_exp, clip_counts, mismatch, ratio_sums
from areal_lite.algo.sequences import sequence_mean

ESTIMATORS = ("k1", "k2", "k3")
# Default corrections: truncation at 5, of tokens or of sequences.
TOKEN_CAP = Correction()
SEQUENCE_CAP = Correction(level="geometric")


@dataclass
class LossInputs:
    """The t flat tokens of a microbatch. Only `logprobs` carries a gradient."""

    logprobs: Tensor  # float [t], under the weights being trained
    prox: Tensor  # float [t], under the weights just before the step
    # float [t], under the weights that sampled the token; a token whose value is not finite leaves
    # loss and metrics
    behavior: Tensor
    advantages: Tensor  # float [t]
    mask: Tensor  # bool [t]
    # int [t], for losses and corrections of sequences, which must then be whole here
    sequence_ids: Tensor | None = None
    # float [t], from `reduction_weights`, used with denominator 1; default: all 1
    weights: Tensor | None = None
    # `behavior_weight(prox, behavior, mask, ...)`, if the caller has computed it
    corrected: tuple[Tensor, Tensor] | None = None


class LossOutput(NamedTuple):
    """A microbatch's share of the loss, a scalar with gradient, and its metrics.

    Metrics are detached sums over unmasked tokens; divide them by N for means.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


class _Corrected(NamedTuple):
    mask: Tensor  # of usable tokens
    log_ratio: Tensor  # 0 where masked
    weight: Tensor  # w
    kept: Tensor  # the tokens that w leaves in


def ppo_loss(
    inputs: LossInputs,
    *,
    denominator: float = 1.0,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    decoupled: bool = True,
    correction: Correction = TOKEN_CAP,
) -> LossOutput:
    """Compute the PPO loss, decoupled or naive.

    Decoupled: AReaL, arXiv 2505.24298, eq. 5 (Hilton et al., arXiv 2110.00641). Naive: clipped
    around the behavior policy (arXiv 1707.06347, eq. 7).

    Args:
        denominator: N of the module, or 1 with `inputs.weights`
        eps_low, eps_high: clip range, asymmetric as in DAPO (arXiv 2503.14476, eq. 10)
        dual_clip: c > 1 (arXiv 1912.09729, eq. 5)
    """
    tokens = _correct(inputs, decoupled, correction)
    ratio = bounded_exp(tokens.log_ratio)
    clip = {"eps_low": eps_low, "eps_high": eps_high, "dual_clip": dual_clip}
    losses = tokens.weight * clipped(ratio, inputs.advantages, **clip)
    return _output(inputs, tokens, losses, denominator, ratio, clip)


def clipped(
    ratio: Tensor,
    advantages: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Compute max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)) of each token: float [t].

    With `dual_clip` c, it is at most c |A| where A < 0.
    """
    losses = torch.maximum(
        -advantages * ratio, -advantages * ratio.clamp(1 - eps_low, 1 + eps_high)
    )
    if dual_clip is None:
        return losses
    return torch.where(advantages < 0, losses.clamp(max=dual_clip * advantages.abs()), losses)


def gspo_loss(
    inputs: LossInputs,
    *,
    denominator: float = 1.0,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    decoupled: bool = True,
    correction: Correction = SEQUENCE_CAP,
) -> LossOutput:
    """Compute the loss of group sequence policy optimization (arXiv 2507.18071).

    PPO with the ratio of the sequence, s_i = exp(mean_t(lp_theta - lp_prox)) (eq. 7):
    L_t = w max(-A s_i, -A clip(s_i, 1 - eps_low, 1 + eps_high)) for every token of sequence i. With
    sequence-mean weights this is the paper's mean over sequences (eq. 5). A clip takes the whole
    sequence. Raises ValueError without sequence_ids.
    """
    tokens = _correct(inputs, decoupled, correction)
    if inputs.sequence_ids is None:
        raise ValueError("gspo_loss needs sequence_ids")
    mean = sequence_mean(tokens.log_ratio, tokens.mask, inputs.sequence_ids)
    ratio = bounded_exp(mean[inputs.sequence_ids])
    clip = {"eps_low": eps_low, "eps_high": eps_high}
    losses = tokens.weight * clipped(ratio, inputs.advantages, **clip)
    return _output(inputs, tokens, losses, denominator, ratio, clip)


def cispo_loss(
    inputs: LossInputs,
    *,
    denominator: float = 1.0,
    eps_low: float = 1.0,
    eps_high: float = 2.0,
    decoupled: bool = True,
    correction: Correction = TOKEN_CAP,
) -> LossOutput:
    """Compute the loss of clipped importance weights (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5).

    L_t = -w sg[clip(r, 1 - eps_low, 1 + eps_high)] A lp_theta. The weight is clipped instead of the
    update, so no token loses its gradient. eps_low >= 1 means no lower bound, the paper's choice.
    """
    tokens = _correct(inputs, decoupled, correction)
    ratio = bounded_exp(tokens.log_ratio.detach())
    bounded = tokens.weight * ratio.clamp(1 - eps_low, 1 + eps_high)
    losses = -bounded * inputs.advantages * inputs.logprobs
    clip = {"eps_low": eps_low, "eps_high": eps_high}
    return _output(inputs, tokens, losses, denominator, ratio, clip)


def reinforce_loss(
    inputs: LossInputs, *, denominator: float = 1.0, correction: Correction = TOKEN_CAP
) -> LossOutput:
    """Compute the REINFORCE loss with truncated importance sampling: L_t = -sg[w] A lp_theta.

    w corrects from the behavior policy to the policy being trained, as `correction` says, for
    example w = min(exp(lp_theta - lp_behav), cap) (PipelineRL, arXiv 2509.19128, eq. 5, with a cap
    of 5). The proximal policy appears only in metrics.
    """
    current = replace(inputs, prox=inputs.logprobs.detach(), corrected=None)
    tokens = _correct(current, True, correction)
    losses = -tokens.weight * inputs.advantages * inputs.logprobs
    return _output(inputs, tokens, losses, denominator)


def kl_estimate(logprobs: Tensor, reference: Tensor, mask: Tensor, *, estimator: str) -> Tensor:
    """Estimate the divergence at each token: float [t], 0 where masked."""
    if estimator not in ESTIMATORS:
        raise ValueError(f"algo.kl.estimator={estimator}: use one of {', '.join(ESTIMATORS)}")
    difference = torch.where(mask, logprobs - reference.detach(), torch.zeros_like(logprobs))
    if estimator == "k1":
        return difference
    return difference**2 / 2 if estimator == "k2" else bounded_exp(-difference) - 1 + difference


def kl_loss(
    logprobs: Tensor,
    reference: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    estimator: str,
    importance: Tensor | None = None,
) -> Tensor:
    """Compute sum_t weight_t k_t, to be added to the policy loss times a coefficient.

    weights: float [t], from `reduction_weights`; importance: float [t], w of correction.py, for
    tokens that another policy sampled, taken as a constant.
    """
    value = weights * kl_estimate(logprobs, reference, mask, estimator=estimator)
    return (value if importance is None else importance.detach() * value).sum()


def entropy_loss(entropy: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Compute -sum_t weight_t H_t, the entropy bonus (Mnih et al., arXiv 1602.01783) as a loss.

    It is added to the policy loss times a coefficient. entropy: float [t], of the next-token
    distribution, in nats, with gradient.
    """
    return -(weights * torch.where(mask, entropy, torch.zeros_like(entropy))).sum()


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None,
    denominator: float,
) -> LossOutput:
    """Compute the critic's loss, sum_t max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2N.

    The clip bounds how far a value moves in a step, like the ratio of a policy (the clipped value
    loss of the reference implementation of PPO, arXiv 1707.06347). values, old_values: float [t], V
    with gradient, and V_old before the step; returns: float [t], R, from `gae`; clip: c, None for
    no bound; denominator: N, the unmasked tokens of the update over all ranks.
    """
    zeros = torch.zeros_like(values)
    error = (values - returns) ** 2
    stopped = torch.zeros_like(mask)
    if clip is not None:
        move = values - old_values
        bounded = (old_values + move.clamp(-clip, clip) - returns) ** 2
        stopped = mask & (move.abs() > clip) & (bounded > error)
        error = torch.maximum(error, bounded)
    loss = torch.where(mask, error, zeros).sum() / (2 * denominator)
    metrics = {
        "value": torch.where(mask, values, zeros).sum(),
        "value_clip_fraction": stopped.sum(),
        "value_error": torch.where(mask, (values - returns) ** 2, zeros).sum(),
        "return": torch.where(mask, returns, zeros).sum(),
        "return_square": torch.where(mask, returns**2, zeros).sum(),
        "trained_tokens": mask.sum(),
    }
    return LossOutput(loss, {name: value.detach().float() for name, value in metrics.items()})


def _correct(inputs: LossInputs, decoupled: bool, correction: Correction) -> _Corrected:
    mask = finite_mask(inputs.mask, inputs.behavior)
    if decoupled:
        anchor = inputs.prox
        weight, kept = inputs.corrected or behavior_weight(
            anchor, inputs.behavior, mask, sequence_ids=inputs.sequence_ids, **vars(correction)
        )
    else:
        anchor, weight, kept = inputs.behavior, mask.to(inputs.logprobs.dtype), mask
    log_ratio = torch.where(mask, inputs.logprobs - anchor.detach(), torch.zeros_like(anchor))
    return _Corrected(mask, log_ratio, weight, kept)


def _output(
    inputs: LossInputs,
    tokens: _Corrected,
    losses: Tensor,
    denominator: float,
    ratio: Tensor | None = None,
    clip: dict | None = None,
) -> LossOutput:
    """Weigh and add up the losses of the tokens that are kept; ratio, clip: for metrics."""
    if inputs.weights is not None:
        losses = inputs.weights * losses
    loss = torch.where(tokens.kept, losses, torch.zeros_like(losses)).sum() / denominator
    metrics = mismatch(inputs.prox, inputs.behavior, tokens.mask)
    metrics |= {
        "behavior_weight": tokens.weight.sum(),
        "rejected": (tokens.mask & ~tokens.kept).sum(),
    }
    if ratio is not None:
        metrics |= ratio_sums(ratio, tokens.mask)
        metrics |= clip_counts(ratio.detach(), inputs.advantages, tokens.kept, **(clip or {}))
    return LossOutput(loss, {name: value.float() for name, value in metrics.items()})

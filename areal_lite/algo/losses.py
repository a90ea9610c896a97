"""Policy losses over flat tokens.

Per token, with advantage A, mask m and N the number of unmasked tokens of the minibatch over all ranks and microbatches:

    w = behavior correction                          (algo/correction.py, detached)
    r = exp(lp_theta - lp_prox)
    L = w * max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))            [dual clip: min(., c |A|) where A < 0]
    loss = sum(m L) / N

A call gets the tokens of one microbatch and the global N and returns its share of the loss: shares add up, however tokens were packed.
Other means than that over tokens are weights (algo/reduction.py). Terms beside the policy loss are in algo/kl.py, Trajectory Balance, which
has no ratio and no advantage, in algo/trajectory_balance.py.

Every loss is there in two forms. Decoupled: the ratio is to the proximal policy, and w corrects for the behavior policy. Naive
(`decoupled=False`): the ratio is to the behavior policy itself, and there is nothing left to correct, w = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lite.algo.correction import Correction, behavior_weight, finite_mask
from areal_lite.algo.metrics import clip_counts, mismatch, ratio_sums
from areal_lite.algo.sequences import sequence_mean

TOKEN_CAP = Correction()
SEQUENCE_CAP = Correction(level="geometric")


@dataclass
class LossInputs:
    """Flat tokens of a microbatch; all float [t] but `mask` (bool [t]) and `sequence_ids` (int [t]). Only `logprobs` carries a gradient.

    logprobs: under the weights being trained; prox: just before the step; behavior: under the weights that sampled the token (a token for
    which that is not finite has no part in loss or metrics). sequence_ids: for what concerns sequences, which then must be whole here.
    weights: from `reduction_weights`, with denominator 1; without, every token counts the same.
    """

    logprobs: Tensor
    prox: Tensor
    behavior: Tensor
    advantages: Tensor
    mask: Tensor
    sequence_ids: Tensor | None = None
    weights: Tensor | None = None
    corrected: tuple[Tensor, Tensor] | None = None


@dataclass
class LossOutput:
    """`loss`: scalar with gradient, this microbatch's share. `metrics`: detached sums over unmasked tokens; divide by N for means."""

    loss: Tensor
    metrics: dict[str, Tensor]


def ppo_loss(
    inputs: LossInputs,
    *,
    denominator: float = 1.0,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    decoupled: bool = True,
    correction: str | Correction = "cap",
    correction_cap: float = 5.0,
) -> LossOutput:
    """Decoupled PPO (AReaL, arXiv 2505.24298, eq. 5; Hilton et al., arXiv 2110.00641), or with `decoupled=False` naive PPO: clipped around
    the behavior policy (arXiv 1707.06347, eq. 7).

    eps_low/eps_high: clip range, asymmetric as in DAPO (arXiv 2503.14476, eq. 10); dual_clip c > 1 (arXiv 1912.09729, eq. 5).
    correction: a mode at token level, bounded by `correction_cap`, or a `Correction`. Raises ValueError for an unknown correction.
    """
    if isinstance(correction, str):
        correction = Correction(correction, correction_cap)
    mask, log_ratio, weight, kept = _ratio_and_weight(inputs, decoupled, correction)
    return _clipped(
        inputs, mask, log_ratio.exp(), weight, kept, denominator, eps_low, eps_high, dual_clip
    )


def gspo_loss(
    inputs: LossInputs,
    *,
    denominator: float = 1.0,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    decoupled: bool = True,
    correction: Correction = SEQUENCE_CAP,
) -> LossOutput:
    """Group sequence policy optimisation (arXiv 2507.18071): PPO whose ratio is the sequence's, s_i = exp(mean_t(lp_theta - lp_prox)).

    L_t = w max(-A s_i, -A clip(s_i, 1 - eps_low, 1 + eps_high)) for every token of sequence i; with sequence-mean weights this is the
    paper's mean over sequences (eq. 5; s_i: eq. 7). The whole sequence is clipped or is not. Needs sequence_ids.
    """
    mask, log_ratio, weight, kept = _ratio_and_weight(inputs, decoupled, correction)
    if inputs.sequence_ids is None:
        raise ValueError("gspo_loss needs sequence_ids")
    ratio = sequence_mean(log_ratio, mask, inputs.sequence_ids)[inputs.sequence_ids].exp()
    return _clipped(inputs, mask, ratio, weight, kept, denominator, eps_low, eps_high, None)


def cispo_loss(
    inputs: LossInputs,
    *,
    denominator: float = 1.0,
    eps_low: float = 1.0,
    eps_high: float = 2.0,
    decoupled: bool = True,
    correction: Correction = TOKEN_CAP,
) -> LossOutput:
    """Clipped importance weights instead of clipped updates (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): no token loses its gradient.

    L_t = -w sg[clip(r, 1 - eps_low, 1 + eps_high)] A lp_theta. eps_low >= 1 is no lower bound, the paper's choice.
    """
    mask, log_ratio, weight, kept = _ratio_and_weight(inputs, decoupled, correction)
    ratio = log_ratio.detach().exp()
    token_loss = (
        -weight * ratio.clamp(1 - eps_low, 1 + eps_high) * inputs.advantages * inputs.logprobs
    )
    with torch.no_grad():
        clips = clip_counts(
            ratio, inputs.advantages, kept, eps_low=eps_low, eps_high=eps_high, dual_clip=None
        )
    return _output(
        inputs,
        token_loss,
        mask,
        kept,
        denominator,
        {**clips, **ratio_sums(ratio, mask), "behavior_weight": weight.sum()},
    )


def reinforce_loss(
    inputs: LossInputs, *, denominator: float = 1.0, correction: Correction = TOKEN_CAP
) -> LossOutput:
    """REINFORCE with truncated importance sampling: L_t = -sg[w] A lp_theta (PipelineRL, arXiv 2509.19128, eq. 5, with a cap of 5).

    Here w corrects from the behavior policy straight to the policy being trained, w = min(exp(lp_theta - lp_behav), cap) or what
    `correction` says; the proximal policy is used in metrics only.
    """
    mask = finite_mask(inputs.mask, inputs.behavior)
    weight, kept = behavior_weight(
        inputs.logprobs.detach(),
        inputs.behavior,
        mask,
        sequence_ids=inputs.sequence_ids,
        **vars(correction),
    )
    return _output(
        inputs,
        -weight * inputs.advantages * inputs.logprobs,
        mask,
        kept,
        denominator,
        {"behavior_weight": weight.sum()},
    )


def _ratio_and_weight(
    inputs: LossInputs, decoupled: bool, correction: Correction
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Usable tokens bool [t], log-ratio to the anchor (0 where masked), correction w, and the tokens that w leaves in."""
    mask = finite_mask(inputs.mask, inputs.behavior)
    if decoupled:
        anchor = inputs.prox
        weight, kept = inputs.corrected or behavior_weight(
            anchor, inputs.behavior, mask, sequence_ids=inputs.sequence_ids, **vars(correction)
        )
    else:
        anchor, weight, kept = inputs.behavior, mask.to(inputs.logprobs.dtype), mask
    return (
        mask,
        torch.where(mask, inputs.logprobs - anchor.detach(), torch.zeros_like(anchor)),
        weight,
        kept,
    )


def _clipped(
    inputs, mask, ratio, weight, kept, denominator, eps_low, eps_high, dual_clip
) -> LossOutput:
    advantages = inputs.advantages
    token_loss = torch.maximum(
        -advantages * ratio, -advantages * ratio.clamp(1 - eps_low, 1 + eps_high)
    )
    if dual_clip is not None:
        token_loss = torch.where(
            advantages < 0, torch.minimum(token_loss, dual_clip * advantages.abs()), token_loss
        )
    with torch.no_grad():
        clips = clip_counts(
            ratio, advantages, kept, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        )
    metrics = {**clips, **ratio_sums(ratio, mask), "behavior_weight": weight.sum()}
    return _output(inputs, weight * token_loss, mask, kept, denominator, metrics)


def _output(
    inputs: LossInputs,
    token_loss: Tensor,
    mask: Tensor,
    kept: Tensor,
    denominator: float,
    metrics: dict,
) -> LossOutput:
    if inputs.weights is not None:
        token_loss = inputs.weights * token_loss
    loss = torch.where(kept, token_loss, torch.zeros_like(token_loss)).sum() / denominator
    metrics = {
        **metrics,
        "rejected": (mask & ~kept).sum(),
        **mismatch(inputs.prox, inputs.behavior, mask),
    }
    return LossOutput(loss, {name: value.float() for name, value in metrics.items()})

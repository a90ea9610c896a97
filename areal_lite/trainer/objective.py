"""What the configuration `algo` asks for, made of the pure functions of areal_lite/algo: from a batch to advantages, from log-probs to a loss.

A step fills `StepTensors` in this order: log-probs and values before the step -> `set_advantages` -> one `policy_loss` (and `critic_loss`)
for each microbatch of each minibatch. Statistics of the whole batch are sums over data-parallel ranks by `reduce`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lite.algo import advantages, shaping
from areal_lite.algo.correction import Correction, behavior_weight, loglinear_prox
from areal_lite.algo.kl import entropy_loss, kl_estimate, kl_loss
from areal_lite.algo.losses import (
    LossInputs,
    LossOutput,
    cispo_loss,
    gspo_loss,
    ppo_loss,
    reinforce_loss,
)
from areal_lite.algo.metrics import entropy_sum, mismatch
from areal_lite.algo.reduction import reduction_count, reduction_weights
from areal_lite.algo.trajectory_balance import log_partition, log_ratios, trajectory_balance_loss
from areal_lite.algo.value import value_loss
from areal_lite.config import AlgoConfig, CorrectionConfig, TrainConfig
from areal_lite.megatron.packing import Microbatch
from areal_lite.trajectory import TrainBatch

Reduce = Callable[[Tensor], Tensor]  # the sum over data-parallel ranks


@dataclass
class StepTensors:
    """A rank's flat batch on its device: per token [T] (sampled, mask, behavior, versions, sequence_ids), per sequence [n] (the others).

    `mask`: tokens that count in the loss, of those that were `sampled`. What the step adds: prox, float32 [T], log-probs before the step
    (with prox=reuse and loglinear filled in by the loss), reference and values, float32 [T] or None; advantages and returns, float32 [T].
    """

    sampled: Tensor
    mask: Tensor
    behavior: Tensor
    versions: Tensor
    sequence_ids: Tensor
    rewards: Tensor
    group_ids: Tensor
    truncated: Tensor
    prox: Tensor
    reference: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None

    @classmethod
    def of(cls, batch: TrainBatch, config: TrainConfig, device: torch.device) -> StepTensors:
        def on_device(name: str) -> Tensor:
            return torch.from_numpy(getattr(batch, name)).to(device)

        behavior, versions, truncated, sequence_ids = map(
            on_device, ("behavior_logprobs", "versions", "truncated", "sequence_ids")
        )
        sampled, mask = versions >= 0, on_device("loss_mask")
        if config.algo.loss == "tb":
            mask = sampled  # about whole completions, whoever sampled them: nothing is too old, and the behavior log-prob is not used
        if config.algo.shaping.mask_truncated:
            mask = mask & ~truncated[sequence_ids]
        rewards, group_ids = on_device("rewards"), on_device("group_ids")
        return cls(
            sampled,
            mask,
            behavior,
            versions,
            sequence_ids,
            rewards,
            group_ids,
            truncated,
            torch.zeros_like(behavior),
        )


def set_advantages(tensors: StepTensors, config: TrainConfig, reduce: Reduce) -> None:
    """Shape rewards and set `advantages` and, with a critic, `returns`. Needs prox, reference and values where they are part of it."""
    t, algo = tensors, config.algo
    rewards = shaped_rewards(t, config)
    if algo.loss == "tb":
        t.rewards = rewards
        return
    divergence = (
        kl_estimate(t.prox, t.reference, t.mask, estimator=algo.kl.estimator)
        if kl_in(algo, "reward")
        else None
    )
    if algo.advantage.estimator in ("grpo", "rloo"):
        if divergence is not None:
            rewards = shaping.kl_in_reward(
                rewards,
                t.prox,
                t.reference,
                t.mask,
                t.sequence_ids,
                beta=algo.kl.coef,
                estimator=algo.kl.estimator,
            )
        t.advantages = _of_groups(rewards, t.group_ids, algo, reduce)[t.sequence_ids]
    else:
        per_token = shaping.token_rewards(
            rewards, t.mask, t.sequence_ids, divergence=divergence, beta=algo.kl.coef
        )
        gamma = algo.advantage.gamma
        if algo.advantage.estimator == "reinforce_pp":
            t.advantages = advantages.reinforce_plus_plus(
                per_token, t.mask, t.sequence_ids, gamma=gamma, reduce=reduce
            )
        else:
            t.advantages, t.returns = advantages.gae(
                per_token, t.values, t.mask, t.sequence_ids, gamma=gamma, lam=algo.advantage.lam
            )
    if algo.advantage.whiten:
        t.advantages = advantages.whiten(
            t.advantages, advantages.moments(t.advantages, t.mask, reduce=reduce), mask=t.mask
        )


def shaped_rewards(t: StepTensors, config: TrainConfig) -> Tensor:
    """float32 [n]. The length of a completion counts all of its sampled tokens, also those that are masked."""
    shape = config.algo.shaping
    rewards = shaping.scale_and_clip(t.rewards, scale=shape.scale, bias=shape.bias, clip=shape.clip)
    if not shape.overlong_margin:
        return rewards
    lengths = torch.bincount(t.sequence_ids[t.sampled], minlength=len(rewards))
    return rewards + shaping.overlong_penalty(
        lengths, max_length=config.rollout.max_new_tokens, margin=shape.overlong_margin
    )


def _of_groups(rewards: Tensor, group_ids: Tensor, algo: AlgoConfig, reduce: Reduce) -> Tensor:
    if algo.advantage.estimator == "rloo":
        return advantages.rloo(rewards, group_ids)
    of_batch = advantages.moments(rewards, reduce=reduce)
    return advantages.grpo(
        rewards,
        group_ids,
        divide_by_std=algo.advantage.std != "off",
        leave_one_out=algo.advantage.leave_one_out,
        batch_mean=of_batch if algo.advantage.mean == "batch" else None,
        batch_std=of_batch if algo.advantage.std == "batch" else None,
    )


def kl_in(algo: AlgoConfig, where: str) -> bool:
    """Is there a KL term in the `loss` or in the `reward`?"""
    return algo.kl.coef != 0 and algo.kl.into == where


def needs_reference(algo: AlgoConfig) -> bool:
    return algo.loss == "tb" or algo.kl.coef != 0


def correction(config: CorrectionConfig) -> Correction:
    return Correction(
        config.mode,
        config.cap,
        config.low,
        config.level,
        tuple(config.veto) if config.veto else None,
    )


@dataclass
class Minibatch:
    """One optimizer update: the tokens at `where` (int64) of the flat batch. `denominator`: of its reduction, over all ranks.

    log_z: float [n], Trajectory Balance's log-partition of each sequence's group.
    """

    where: Tensor
    denominator: float
    log_z: Tensor | None = None


def denominator(t: StepTensors, where: Tensor, mode: str, reduce: Reduce) -> float:
    """Tokens or sequences of a minibatch, over all ranks, as the reduction `mode` counts them; at least 1."""
    count = reduction_count(t.mask[where], t.sequence_ids[where], mode=mode)
    return max(
        1.0, float(reduce(torch.tensor(float(count), dtype=torch.float64, device=where.device)))
    )


def tb_beta(algo: AlgoConfig, version: int) -> float:
    """Trajectory Balance's beta in the step that starts from `version`."""
    end = algo.tb_beta if algo.tb_beta_end is None else algo.tb_beta_end
    return algo.tb_beta + (end - algo.tb_beta) * min(1.0, version / algo.tb_beta_steps)


def log_z(t: StepTensors, logprobs: Tensor, algo: AlgoConfig, version: int) -> Tensor:
    """Trajectory Balance's log-partition, float [n], from the current log-probs of the flat batch, float [T]."""
    ratios, present = log_ratios(logprobs, t.reference, t.mask, t.sequence_ids, num=len(t.rewards))
    return log_partition(ratios, present, t.rewards, t.group_ids, beta=tb_beta(algo, version))


def policy_loss(
    t: StepTensors,
    minibatch: Minibatch,
    logprobs: Tensor,
    entropy: Tensor,
    mb: Microbatch,
    config: TrainConfig,
    version: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The share of one microbatch in the minibatch's loss, and sums for metrics; `version`: the trainer's at the start of the step."""
    algo = config.algo
    where = minibatch.where[mb.token_index]
    mask, behavior = t.mask[where], t.behavior[where]
    if algo.prox == "reuse":
        t.prox[where] = logprobs.detach().float()
    elif algo.prox == "loglinear":
        t.prox[where] = loglinear_prox(
            behavior, logprobs.float(), t.versions[where], version=version
        )
    inputs = LossInputs(
        logprobs, t.prox[where], behavior, torch.zeros_like(behavior), mask, _sequence_ids(mb)
    )
    if algo.loss == "tb":
        output = _trajectory_balance(t, minibatch, where, inputs, mb, tb_beta(algo, version))
    else:
        length = algo.reduction_length or config.rollout.max_new_tokens
        inputs.weights = reduction_weights(
            mask,
            inputs.sequence_ids,
            mode=algo.reduction,
            denominator=minibatch.denominator,
            length=length,
        )
        inputs.advantages = t.advantages[where]
        output = _ratio_loss(inputs, algo)
        if algo.kl.coef and algo.kl.into == "loss":
            output.loss = output.loss + algo.kl.coef * _kl(inputs, t.reference[where], algo)
        if algo.entropy_coef:
            output.loss = output.loss + algo.entropy_coef * entropy_loss(
                entropy, mask, inputs.weights
            )
    with torch.no_grad():
        output.metrics |= {
            "entropy": entropy_sum(entropy, mask).float(),
            "trained_tokens": mask.sum().float(),
        }
        if t.reference is not None:
            output.metrics["reference_kl"] = (
                kl_estimate(logprobs, t.reference[where], mask, estimator="k3").sum().float()
            )
    return output.loss, output.metrics


def critic_loss(
    t: StepTensors, minibatch: Minibatch, values: Tensor, mb: Microbatch, config: TrainConfig
):
    """The share of one microbatch in the critic's loss: a mean over tokens, whatever the policy's is."""
    where = minibatch.where[mb.token_index]
    mask = t.mask[where]
    weights = mask.float() / minibatch.denominator
    output = value_loss(
        values, t.values[where], t.returns[where], mask, weights, clip=config.algo.critic.clip_value
    )
    return output.loss, output.metrics | {"trained_tokens": mask.sum().float()}


def _ratio_loss(inputs: LossInputs, algo: AlgoConfig) -> LossOutput:
    clip = {
        "eps_low": algo.eps_low,
        "eps_high": algo.eps_high,
        "decoupled": algo.decoupled,
        "correction": correction(algo.correction),
    }
    match algo.loss:
        case "ppo":
            return ppo_loss(inputs, dual_clip=algo.dual_clip, **clip)
        case "gspo":
            return gspo_loss(inputs, **clip)
        case "cispo":
            return cispo_loss(inputs, **clip)
        case "reinforce":
            return reinforce_loss(inputs, correction=correction(algo.correction))
    raise AssertionError(f"algo.loss={algo.loss} was not refused")


def _trajectory_balance(
    t: StepTensors,
    minibatch: Minibatch,
    where: Tensor,
    inputs: LossInputs,
    mb: Microbatch,
    beta: float,
) -> LossOutput:
    sequences = t.sequence_ids[where[mb.cu_seqlens[:-1].long()]]
    output = trajectory_balance_loss(
        inputs.logprobs,
        t.reference[where],
        inputs.mask,
        inputs.sequence_ids,
        t.rewards[sequences],
        t.group_ids[sequences],
        beta=beta,
        denominator=minibatch.denominator,
        log_z=minibatch.log_z[sequences],
    )
    own = {name: output.metrics[name] for name in ("log_z", "sequences")}
    return LossOutput(output.loss, {**own, **mismatch(inputs.prox, inputs.behavior, inputs.mask)})


def _kl(inputs: LossInputs, reference: Tensor, algo: AlgoConfig) -> Tensor:
    """The tokens were sampled from the behavior policy: the expectation over the policy takes the same correction as the loss."""
    weight, kept = behavior_weight(
        inputs.prox,
        inputs.behavior,
        inputs.mask,
        sequence_ids=inputs.sequence_ids,
        **vars(correction(algo.correction)),
    )
    return kl_loss(
        inputs.logprobs,
        reference,
        kept,
        inputs.weights,
        estimator=algo.kl.estimator,
        importance=weight,
    )


def _sequence_ids(mb: Microbatch) -> Tensor:
    """int64 [t]: the place in the microbatch of each token's sequence."""
    return (mb.position_ids == 0).cumsum(0) - 1

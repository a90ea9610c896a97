"""One training step: a batch of trajectories becomes M optimizer updates.

    log-probs and values before the step -> advantages -> M minibatches, each one update of the policy (and of the critic)

Every microbatch contributes its share of a mean over the whole minibatch, over all data-parallel ranks, so the result does not depend on
how sequences were packed or spread. What is computed is in areal_lite/trainer/objective.py; here is in which order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lite.algo.metrics import by_staleness, effective_sample_size
from areal_lite.config import TrainConfig
from areal_lite.megatron.critic import Critic
from areal_lite.megatron.packing import Microbatch
from areal_lite.megatron.parallel import data_parallel_sum
from areal_lite.megatron.policy import Policy
from areal_lite.megatron.reference import CachedReference, Reference
from areal_lite.megatron.trainable import TrainableModel
from areal_lite.trainer import objective
from areal_lite.trainer.objective import Minibatch, StepTensors
from areal_lite.trajectory import TrainBatch


@dataclass
class Models:
    """What a step computes with: the policy; the reference policy where there is a KL or Trajectory Balance; the critic for GAE."""

    policy: Policy
    reference: Reference | CachedReference | None = None
    critic: Critic | None = None

    @property
    def trained(self) -> dict[str, TrainableModel]:
        """What is trained, and so belongs in a checkpoint, by name."""
        return {"policy": self.policy} | ({"critic": self.critic} if self.critic else {})

    def offload(self) -> None:
        """Leave the device's memory to others until `onload`: what only updates need."""
        for model in self.trained.values():
            model.offload()

    def onload(self) -> None:
        for model in self.trained.values():
            model.onload()


@dataclass
class StepResult:
    """`metrics`: for metrics.jsonl. `prox`: float32 [T], log-probs of this rank's batch under the weights before the step."""

    metrics: dict[str, float | list[float]]
    prox: Tensor


def policy_step(models: Models, batch: TrainBatch, config: TrainConfig, version: int) -> StepResult:
    """Train on `batch`, this rank's whole groups of the step. `version`: the trainer's at the start of the step. Every rank calls it."""
    engine, algo, temperature = models.policy, config.algo, config.rollout.temperature
    tensors = StepTensors.of(batch, config, engine.device)
    microbatches = engine.microbatches(batch)
    if algo.prox == "recompute":
        tensors.prox = engine.logprobs(microbatches, temperature)
    if models.reference:
        tensors.reference = models.reference.logprobs(batch, temperature)
    if models.critic:
        tensors.values = models.critic.values(microbatches)
    objective.set_advantages(tensors, config, data_parallel_sum)
    updates, value_updates = [], []
    for number, indices in enumerate(batch.minibatches(config.trainer.minibatches)):
        microbatches = engine.microbatches(batch.select(indices))
        where = torch.from_numpy(batch.token_indices(indices)).to(engine.device)
        updates.append(
            _update_policy(models, tensors, where, microbatches, config, version, first=number == 0)
        )
        if models.critic:
            value_updates.append(
                _update_critic(models.critic, tensors, where, microbatches, config)
            )
    if algo.prox != "recompute":
        engine.from_last_stage(tensors.prox)  # where the loss has filled it in
    metrics = {
        **_policy_metrics(updates),
        **_batch_metrics(tensors, config, version),
        **_critic_metrics(value_updates),
    }
    return StepResult(metrics, tensors.prox.float().cpu())


def _update_policy(
    models: Models,
    tensors: StepTensors,
    where: Tensor,
    microbatches: list[Microbatch],
    config: TrainConfig,
    version: int,
    first: bool,
) -> dict[str, float]:
    algo, temperature = config.algo, config.rollout.temperature
    mode = "sequence" if algo.loss == "tb" else algo.reduction
    minibatch = Minibatch(where, objective.denominator(tensors, where, mode, data_parallel_sum))
    if algo.loss == "tb":
        current = tensors.prox.clone()
        if not first:  # before the first update the policy is the proximal one
            current[where] = models.policy.logprobs(microbatches, temperature)
        minibatch.log_z = objective.log_z(tensors, current, algo, version)

    def loss(logprobs: Tensor, entropy: Tensor, mb: Microbatch) -> tuple[Tensor, dict[str, Tensor]]:
        return objective.policy_loss(tensors, minibatch, logprobs, entropy, mb, config, version)

    return models.policy.update(microbatches, loss, temperature)


def _update_critic(
    critic: Critic,
    tensors: StepTensors,
    where: Tensor,
    microbatches: list[Microbatch],
    config: TrainConfig,
) -> dict[str, float]:
    minibatch = Minibatch(where, objective.denominator(tensors, where, "token", data_parallel_sum))
    return critic.update(
        microbatches,
        lambda values, mb: objective.critic_loss(tensors, minibatch, values, mb, config),
    )


def _policy_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Means over tokens (log_z: over sequences) from sums over them; maxima of maxima; means over updates of what an update reports."""
    last = updates[-1]
    total = {
        name: max(u[name] for u in updates)
        if name.endswith("_max")
        else sum(u[name] for u in updates)
        for name in last
    }
    tokens, sequences = total.pop("trained_tokens"), total.pop("sequences", 0.0)
    ess = effective_sample_size(total.pop("weight_sum"), total.pop("weight_square_sum"), tokens)
    metrics = {name: total.pop(name) / len(updates) for name in ("loss", "grad_norm")}
    metrics |= {
        "lr": last["lr"],
        "skipped": total.pop("skipped"),
        "ess": ess,
        "trained_tokens": tokens,
    }
    del total["lr"]
    if "log_z" in total:
        metrics["log_z"] = total.pop("log_z") / max(sequences, 1.0)
    return metrics | {
        name: value if name.endswith("_max") else value / max(tokens, 1.0)
        for name, value in total.items()
    }


def _batch_metrics(
    t: StepTensors, config: TrainConfig, version: int
) -> dict[str, float | list[float]]:
    """How many tokens of which staleness, and how far theirs is from the proximal policy; how many sampled ones are not trained on, and why."""
    oldest = config.buffer.max_staleness
    masked = t.sampled & ~t.mask
    truncated = masked & t.truncated[t.sequence_ids] & config.algo.shaping.mask_truncated
    overdue = masked & ~truncated & (version - t.versions > oldest)
    why = {
        "masked_truncated": truncated,
        "masked_overdue": overdue,
        "masked_nonfinite": masked & ~truncated & ~overdue,
    }
    difference, tokens = by_staleness(
        (t.prox - t.behavior).abs(), t.versions, t.mask, version=version, oldest=oldest
    )
    totals = data_parallel_sum(
        torch.cat([torch.stack([m.sum() for m in why.values()]), tokens, difference]).double()
    ).tolist()
    tokens, difference = totals[len(why) : len(why) + oldest + 1], totals[len(why) + oldest + 1 :]
    by_age = {
        "tokens_by_staleness": tokens,
        "behave_abs_by_staleness": [d / max(n, 1.0) for d, n in zip(difference, tokens)],
    }
    return {**dict(zip(why, totals)), **by_age}


def _critic_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    if not updates:
        return {}
    tokens = max(sum(u["trained_tokens"] for u in updates), 1.0)
    means = {
        f"critic_{name}": sum(u[name] for u in updates) / len(updates)
        for name in ("loss", "grad_norm")
    }
    sums = {
        name: sum(u[name] for u in updates) / tokens
        for name in ("value", "value_error", "value_clip_fraction")
    }
    return {
        **means,
        **sums,
        "critic_lr": updates[-1]["lr"],
        "critic_skipped": sum(u["skipped"] for u in updates),
    }

"""One training step: a batch of trajectories becomes M optimizer updates (docs/training.md).

    forward passes -> targets (advantages) -> M updates of the policy, and of the critic

* An update takes whole groups. A microbatch contributes its share of a mean over the whole update,
  on all data-parallel ranks, so the result does not depend on packing or on the number of ranks.
* The model does not run on sequences that have no gradient, but they count in means and metrics.
* Every rank calls every function, in the same order: forward passes and updates are collective.

The objective (areal_lite/algo/objective.py) decides what is computed, and this module the order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from areal_lite.algo.losses import LossOutput, value_loss
from areal_lite.algo.metrics import combined, effective_sample_size
from areal_lite.algo.objective import FlatBatch, Objective, batch_metrics, denominator
from areal_lite.config import LoraConfig, TrainConfig, reference_folders
from areal_lite.megatron.experts import changed_share
from areal_lite.megatron.lora import added_share
from areal_lite.megatron.packing import Microbatch
from areal_lite.megatron.parallel import data_parallel_sum
from areal_lite.megatron.policy import Critic, ParallelModel, Policy, TrainableModel
from areal_lite.megatron.reference import (
    BaseReference,
    CachedReference,
    Reference,
    SourceReferences,
)
from areal_lite.train_batch import TrainBatch

_VALUE_CLIP = 0.2  # the largest change of a value in a training step: that of the policy's ratio


@dataclass
class Models:
    """The policy, and the models that its objective needs."""

    policy: Policy
    reference: SourceReferences | CachedReference | None = None
    critic: Critic | None = None
    # Gradients and optimizer state wait in host memory between steps; servers use the device.
    offload: bool = False

    @property
    def trained(self) -> dict[str, TrainableModel]:
        """Return the models that a checkpoint holds, by name."""
        models: dict[str, TrainableModel] = {"policy": self.policy}
        if self.critic:
            models["critic"] = self.critic
        return models

    def leave_device(self) -> None:
        """Move gradient buffers and optimizer state to host memory, if `offload`."""
        if self.offload:
            for model in self.trained.values():
                model.offload()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep gradient buffers and optimizer state on the device inside the block."""
        if self.offload:
            for model in self.trained.values():
                model.onload()
        yield
        self.leave_device()


def build_models(config: TrainConfig, objective: Objective) -> Models:
    """Load the models that `objective` needs; the critic starts from the policy's weights."""
    trainer, algo = config.trainer, config.algo
    model = Path(config.model)
    policy = Policy(trainer, model, config.seed, routing_replay=algo.routing_replay)
    models = Models(policy, offload=trainer.offload)
    if objective.needs_reference:
        models.reference = _references(config, policy)
        if config.buffer.replay.capacity:
            models.reference = CachedReference(models.reference)
    if objective.needs_critic:
        lr, least = algo.critic.lr, trainer.min_lr * algo.critic.lr / trainer.lr
        models.critic = Critic(replace(trainer, lr=lr, min_lr=least), model, config.seed)
    return models


def _references(config: TrainConfig, policy: Policy) -> SourceReferences:
    """Load the reference policy of each data source. A folder is loaded once."""
    folders = reference_folders(config)
    loaded: dict[str, Reference | BaseReference] = {}
    for folder in folders.values():
        # Validation refuses an objective that needs a reference and has none.
        assert folder is not None
        if folder not in loaded:
            loaded[folder] = (
                BaseReference(policy)
                if config.is_base(folder)
                else Reference(replace(config.trainer, lora=LoraConfig()), folder)
            )
    return SourceReferences({name: loaded[str(folder)] for name, folder in folders.items()})


@dataclass
class StepResult:
    """The outcome of a step."""

    metrics: dict[str, float | list[float]]  # for metrics.jsonl
    prox: Tensor  # float32 [T] in CPU memory, log-probs of sampled tokens before the step
    skipped: float  # updates, of policy and critic, that were not finite
    operations: float  # floating-point operations, on all ranks


@dataclass(kw_only=True)
class _Update:
    """The tokens of one optimizer update; all token indices point into the batch of the step."""

    microbatches: list[Microbatch]  # of `runs_on`
    token_index: Tensor  # int64, on the device: all tokens of the update
    idle_index: Tensor  # int64, on the device: tokens of the sequences without a gradient
    runs_on: np.ndarray  # int64, the sequences with a gradient, or the first one without any
    first: bool


def policy_step(
    models: Models, objective: Objective, batch: TrainBatch, config: TrainConfig, version: int
) -> StepResult:
    """Train on `batch`, this rank's whole groups of the step that starts from `version`."""
    before = ParallelModel.operations
    flat = flat_batch(batch, version, models.policy.device)
    flat.mask = objective.mask(flat)
    _forward_passes(models, objective, batch, flat, config.rollout.temperature)
    objective.set_targets(flat, data_parallel_sum)
    updates = _updates(models.policy, batch, objective.trains_on(flat), config.trainer.minibatches)
    if objective.prox_pass == "rest":
        rest = np.setdiff1d(np.arange(batch.num_sequences), updates[0].runs_on)
        _proximal_pass(models.policy, batch, flat, rest, config.rollout.temperature)
    reported = [_run_update(models, objective, batch, flat, update, config) for update in updates]
    if objective.prox_pass != "all":
        models.policy.from_last_stage(flat.prox)  # the updates have filled it in there
    metrics = {
        **policy_metrics([policy for policy, _ in reported]),
        **critic_metrics([critic for _, critic in reported if critic]),
        **batch_metrics(
            flat,
            oldest=config.buffer.max_staleness,
            mask_truncated=config.algo.shaping.mask_truncated,
            reduce=data_parallel_sum,
        ),
    }
    if objective.prox_pass == "none":  # fresh tokens then have the behavior log-prob as their own
        metrics = {k: v for k, v in metrics.items() if k not in ("mismatch_square", "stale_square")}
    metrics["computed_share"] = _computed_share(batch, updates, models.policy.device)
    if models.policy.replays_routes:
        metrics["routes_changed"] = changed_share(models.policy.chunks)
    if models.policy.adapters:
        metrics["adapter_share"] = added_share(models.policy.chunks)
    skipped = metrics["skipped"] + metrics.get("critic_skipped", 0.0)
    done = torch.tensor(ParallelModel.operations - before, dtype=torch.float64)
    operations = float(data_parallel_sum(done.to(models.policy.device)))
    return StepResult(metrics, flat.prox.float().cpu(), skipped, operations)


def flat_batch(batch: TrainBatch, version: int, device: torch.device) -> FlatBatch:
    """Move `batch` to `device`. The mask leaves out tokens that are overdue or lack a log-prob."""

    def on_device(array) -> Tensor:
        return torch.from_numpy(array).to(device)

    same = ("sampled", "versions", "sequence_ids", "rewards", "group_ids", "episode_ids")
    same += ("trace_indices", "truncated")
    behavior = on_device(batch.behavior_logprobs)
    return FlatBatch(
        version=version,
        mask=on_device(batch.loss_mask),
        behavior=behavior,
        prox=torch.zeros_like(behavior),
        entropy=torch.zeros_like(behavior),
        earned=None if batch.turn_rewards is None else on_device(batch.turn_rewards),
        **{name: on_device(getattr(batch, name)) for name in same},
    )


def _forward_passes(
    models: Models, objective: Objective, batch: TrainBatch, flat: FlatBatch, temperature: float
) -> None:
    """Set the log-probs and values before the step that the objective's targets need."""
    if objective.prox_pass == "all":
        _proximal_pass(models.policy, batch, flat, np.arange(batch.num_sequences), temperature)
    if models.reference:
        # The reference policy chooses its own experts.
        flat.reference = models.reference.logprobs(replace(batch, routes=None), temperature)
    if models.critic:
        flat.values = models.critic.values(models.critic.microbatches(batch))


def _proximal_pass(
    policy: Policy, batch: TrainBatch, flat: FlatBatch, sequences: np.ndarray, temperature: float
) -> None:
    """Compute the log-probs and entropies before the step, at the tokens of `sequences`.

    A rank without such sequences takes part if another one has some.
    """
    if not data_parallel_sum(torch.tensor(len(sequences), device=policy.device)):
        return
    if not len(sequences):
        sequences = np.arange(1)
    index = torch.from_numpy(batch.token_indices(sequences)).to(policy.device)
    chosen = batch.select(sequences)
    microbatches = policy.microbatches(chosen, chosen.sampled)
    prox, entropy = policy.logprobs_and_entropies(microbatches, temperature)
    flat.prox[index], flat.entropy[index] = prox, entropy


def _updates(policy: Policy, batch: TrainBatch, trains_on: Tensor, num: int) -> list[_Update]:
    """Make `num` updates of equally many whole groups each; trains_on: bool [n]."""
    active, updates = trains_on.cpu().numpy(), []
    for number, sequences in enumerate(batch.minibatches(num)):
        idle = sequences[~active[sequences]]
        chosen = sequences[active[sequences]]
        if not len(chosen):
            chosen = sequences[:1]  # every rank takes part in an update
        updates.append(
            _Update(
                microbatches=_microbatches(policy, batch, chosen, batch.sampled),
                token_index=torch.from_numpy(batch.token_indices(sequences)).to(policy.device),
                idle_index=torch.from_numpy(batch.token_indices(idle)).to(policy.device),
                runs_on=chosen,
                first=number == 0,
            )
        )
    return updates


def _computed_share(batch: TrainBatch, updates: list[_Update], device: torch.device) -> float:
    """Return the tokens that the updates compute as a share of the batch's, over all ranks."""
    nodes = sum(len(m.trie.token) for update in updates for m in update.microbatches)
    counts = torch.tensor([nodes, len(batch.tokens)], dtype=torch.float64, device=device)
    computed, tokens = data_parallel_sum(counts).tolist()
    return computed / tokens


def _microbatches(
    model: TrainableModel, batch: TrainBatch, sequences: np.ndarray, scored: np.ndarray | None
) -> list[Microbatch]:
    """Pack `sequences`; token indices point into the tokens of the whole batch."""
    index = batch.token_indices(sequences)
    part = None if scored is None else scored[index]
    return [
        replace(microbatch, token_index=torch.from_numpy(index)[microbatch.token_index])
        for microbatch in model.microbatches(batch.select(sequences), part)
    ]


def _run_update(
    models: Models,
    objective: Objective,
    batch: TrainBatch,
    flat: FlatBatch,
    update: _Update,
    config: TrainConfig,
) -> tuple[dict[str, float], dict[str, float] | None]:
    """Update the policy, then the critic if there is one; return what each reports."""
    policy, critic, temperature = models.policy, models.critic, config.rollout.temperature

    def current_logprobs() -> Tensor:
        # Before the first update the policy is the proximal one.
        return flat.prox if update.first else policy.logprobs(update.microbatches, temperature)

    minibatch = objective.minibatch(flat, update.token_index, current_logprobs, data_parallel_sum)

    idle = [update.idle_index] if len(update.idle_index) else []
    fills_prox = update.first and objective.prox_pass == "rest"

    def policy_loss(logprobs: Tensor, entropy: Tensor, microbatch: Microbatch) -> LossOutput:
        if fills_prox:
            flat.prox[microbatch.token_index] = logprobs.detach().float()
            flat.entropy[microbatch.token_index] = entropy.detach().float()
        output = objective.loss(flat, minibatch, microbatch.token_index, logprobs, entropy)
        if not idle:
            return output
        # The first microbatch reports the metrics of the idle tokens.
        index = idle.pop()
        before = flat.prox[index], flat.entropy[index]
        metrics = objective.loss(flat, minibatch, index, *before).metrics
        if len(index) == len(update.token_index):  # the sequence that ran is one of them
            return LossOutput(0.0 * output.loss, metrics)
        return LossOutput(output.loss, combined(output.metrics, metrics))

    reported = policy.update(update.microbatches, policy_loss, temperature, minibatch.lr_factor)
    return reported, _update_critic(critic, batch, flat, update) if critic else None


def _update_critic(
    critic: Critic, batch: TrainBatch, flat: FlatBatch, update: _Update
) -> dict[str, float]:
    count = denominator(flat, update.token_index, mode="token", reduce=data_parallel_sum)

    def loss(values: Tensor, microbatch: Microbatch) -> LossOutput:
        tokens = flat.at(microbatch.token_index)
        return value_loss(
            values, tokens.values, tokens.returns, tokens.mask, clip=_VALUE_CLIP, denominator=count
        )

    return critic.update(_microbatches(critic, batch, update.runs_on, None), loss)


def policy_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Combine what the policy's updates report: means over updates, sequences or tokens.

    `*_max` are maxima, and `skipped` is a sum.
    """
    last = updates[-1]
    total = {
        name: (max if name.endswith("_max") else sum)(update[name] for update in updates)
        for name in last
    }
    tokens, sequences = total.pop("trained_tokens"), total.pop("sequences", 0.0)
    ess = effective_sample_size(total.pop("weight_sum"), total.pop("weight_square_sum"), tokens)
    del total["lr"]
    metrics = {name: total.pop(name) / len(updates) for name in ("loss", "grad_norm")}
    metrics |= {
        "lr": last["lr"],
        "skipped": total.pop("skipped"),
        "ess": ess,
        "trained_tokens": tokens,
    }
    if "log_z" in total:
        metrics["log_z"] = total.pop("log_z") / max(sequences, 1.0)
    return metrics | {
        name: value if name.endswith("_max") else value / max(tokens, 1.0)
        for name, value in total.items()
    }


def critic_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Combine what the critic's updates report; empty without a critic."""
    if not updates:
        return {}
    total = {name: sum(u[name] for u in updates) for name in updates[-1]}
    tokens = max(total["trained_tokens"], 1.0)
    metrics = {
        **{f"critic_{name}": total[name] / len(updates) for name in ("loss", "grad_norm")},
        **{name: total[name] / tokens for name in ("value", "value_error", "value_clip_fraction")},
        "critic_lr": updates[-1]["lr"],
        "critic_skipped": total["skipped"],
    }
    return_mean = total["return"] / tokens
    variance = total["return_square"] / tokens - return_mean**2
    # Equal returns have no variance to explain: what is left is rounding.
    if variance > 1e-6 * return_mean**2:
        unexplained = metrics["value_error"] - (return_mean - metrics["value"]) ** 2
        metrics["value_explained"] = 1.0 - unexplained / variance
    return metrics

"""One training step: a batch of trajectories becomes M optimizer updates.

    advantages -> proximal log-probs (weights just before the step) -> M minibatches -> decoupled PPO loss -> update

The loss is a token mean over the whole minibatch, over all data-parallel ranks and micro-batches: every micro-batch contributes
sum(m L) / N with the global N, so the result does not depend on how sequences were packed or spread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from areal_lite.algo.advantages import grpo
from areal_lite.algo.correction import loglinear_prox
from areal_lite.algo.losses import LossInputs, ppo_loss
from areal_lite.config import AlgoConfig, TrainConfig
from areal_lite.trainer.engine import MegatronEngine
from areal_lite.trainer.packing import make_microbatches
from areal_lite.trajectory import TrainBatch


@dataclass
class StepResult:
    """`metrics`: floats for metrics.jsonl. `prox`: float32 [T], log-probs of this rank's batch under the weights before the step."""

    metrics: dict[str, float]
    prox: torch.Tensor


def policy_step(engine: MegatronEngine, batch: TrainBatch, config: TrainConfig, version: int) -> StepResult:
    """Train on `batch`, this rank's whole groups of the step. `version`: the trainer's at the start of the step. Every rank calls it."""
    temperature, algo, device = config.rollout.temperature, config.algo, engine.device
    advantages = grpo(torch.from_numpy(batch.rewards), torch.from_numpy(batch.group_ids), divide_by_std=algo.advantage_std)
    tokens = _Tokens(batch, advantages, device)
    if algo.prox == "recompute" or not algo.decoupled:
        tokens.prox = engine.logprobs(make_microbatches(batch, config.trainer.tokens_per_microbatch), temperature)
    totals: dict[str, float] = {}
    count = 0.0
    for indices in minibatches(batch.group_ids, config.trainer.minibatches):
        part = batch.select(indices)
        where = torch.from_numpy(token_indices(batch, indices)).to(device)
        denominator = data_parallel_sum(float(tokens.mask[where].sum()))
        result = engine.update(
            make_microbatches(part, config.trainer.tokens_per_microbatch),
            lambda logprobs, entropy, mb: _loss(tokens, where[mb.where], logprobs, entropy, denominator, algo, version),
            temperature,
        )
        for name, value in result.items():
            totals[name] = value if name == "lr" else totals.get(name, 0.0) + value
        count += denominator
    return StepResult(_metrics(totals, count, config.trainer.minibatches), tokens.prox.float().cpu())


class _Tokens:
    """Per-token tensors of the flat batch on the device. `prox` is filled before the update, or by the update itself (`reuse`, `loglinear`)."""

    def __init__(self, batch: TrainBatch, advantages: torch.Tensor, device: torch.device):
        self.mask = torch.from_numpy(batch.loss_mask).to(device)
        self.behavior = torch.from_numpy(batch.behavior_logprobs).to(device)
        self.versions = torch.from_numpy(batch.versions).to(device)
        self.advantages = advantages[torch.from_numpy(batch.sequence_ids)].to(device)
        self.prox = torch.zeros_like(self.behavior)


def _loss(tokens: _Tokens, where: torch.Tensor, logprobs, entropy, denominator: float, algo: AlgoConfig, version: int):
    """The share of one micro-batch, whose tokens stand at `where` in the flat batch. An empty minibatch has loss 0."""
    behavior, mask = tokens.behavior[where], tokens.mask[where]
    if algo.decoupled and algo.prox == "reuse":
        tokens.prox[where] = logprobs.detach().float()
    elif algo.decoupled and algo.prox == "loglinear":
        tokens.prox[where] = loglinear_prox(behavior, logprobs.float(), tokens.versions[where], version=version)
    output = ppo_loss(
        LossInputs(logprobs, tokens.prox[where], behavior, tokens.advantages[where], mask),
        denominator=max(denominator, 1.0),
        eps_low=algo.eps_low,
        eps_high=algo.eps_high,
        dual_clip=algo.dual_clip,
        decoupled=algo.decoupled,
        correction=algo.behavior_weight,
        correction_cap=algo.behavior_cap,
    )
    with torch.no_grad():
        output.metrics["entropy"] = torch.where(mask, entropy, torch.zeros_like(entropy)).sum().float()
    return output.loss, output.metrics


def minibatches(group_ids: np.ndarray, num: int) -> list[np.ndarray]:
    """Sequence indices of `num` minibatches: whole groups, in the order in which they first appear, equally many each."""
    _, first, inverse = np.unique(group_ids, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))[inverse]
    groups = len(first)
    if groups % num:
        raise ValueError(f"{groups} groups cannot be split into {num} minibatches")
    return [np.flatnonzero(rank // (groups // num) == m) for m in range(num)]


def token_indices(batch: TrainBatch, sequences: np.ndarray) -> np.ndarray:
    """int64: where the tokens of `batch.select(sequences)` stand in `batch`."""
    return np.concatenate([np.arange(batch.cu_seqlens[i], batch.cu_seqlens[i + 1]) for i in sequences])


def data_parallel_sum(value: float) -> float:
    """Sum over data-parallel ranks, in float64."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return float(total)


def _metrics(totals: dict[str, float], count: float, num_minibatches: int) -> dict[str, float]:
    """Means over tokens from sums over tokens. Empty batches have zeros."""
    count = max(count, 1.0)
    per_step = {name: totals.pop(name) for name in ("lr", "skipped")}
    per_update = {name: totals.pop(name) / num_minibatches for name in ("loss", "grad_norm")}
    weight_sum, weight_square_sum = totals.pop("weight_sum"), totals.pop("weight_square_sum")
    ess = weight_sum**2 / (count * weight_square_sum) if weight_square_sum else 0.0
    return {**per_step, **per_update, **{name: value / count for name, value in totals.items()}, "ess": ess}

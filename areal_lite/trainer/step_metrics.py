"""Metrics of one step, from the sums that its updates report and from its batch.

Names are those of metrics.jsonl. All values are over the data-parallel ranks together.
"""

import torch

from areal_lite.algo.metrics import by_staleness, effective_sample_size
from areal_lite.algo.objectives.base import FlatBatch
from areal_lite.config import TrainConfig
from areal_lite.megatron.parallel import data_parallel_sum


def policy_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Combine what the policy's updates report.

    `loss` and `grad_norm` are means over updates, `*_max` are maxima, `skipped` is a sum, `log_z`
    is a mean over sequences. The other sums become means over tokens.
    """
    last = updates[-1]
    total = {
        name: max(u[name] for u in updates)
        if name.endswith("_max")
        else sum(u[name] for u in updates)
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


def batch_metrics(flat: FlatBatch, config: TrainConfig) -> dict[str, float | list[float]]:
    """Count tokens by staleness and masked tokens by reason. Every rank calls it.

    `behave_abs_by_staleness` is the mean |prox - behavior| of each staleness, in nats.
    """
    oldest = config.buffer.max_staleness
    masked = flat.sampled & ~flat.mask
    truncated = masked & flat.truncated[flat.sequence_ids] & config.algo.shaping.mask_truncated
    overdue = masked & ~truncated & (flat.version - flat.versions > oldest)
    reasons = {
        "masked_truncated": truncated,
        "masked_overdue": overdue,
        "masked_nonfinite": masked & ~truncated & ~overdue,
    }
    difference, tokens = by_staleness(
        (flat.prox - flat.behavior).abs(),
        flat.versions,
        flat.mask,
        version=flat.version,
        oldest=oldest,
    )
    counts = torch.stack([reason.sum() for reason in reasons.values()])
    # One collective for all three.
    total = data_parallel_sum(torch.cat([counts, tokens, difference]).double())
    counts, tokens, difference = (
        part.tolist() for part in total.split([len(counts), len(tokens), len(difference)])
    )
    return {
        **dict(zip(reasons, counts)),
        "tokens_by_staleness": tokens,
        "behave_abs_by_staleness": [d / max(n, 1.0) for d, n in zip(difference, tokens)],
    }


def critic_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Combine what the critic's updates report; empty without a critic."""
    if not updates:
        return {}
    total = {name: sum(u[name] for u in updates) for name in updates[-1]}
    tokens = max(total["trained_tokens"], 1.0)
    return {
        **{f"critic_{name}": total[name] / len(updates) for name in ("loss", "grad_norm")},
        **{name: total[name] / tokens for name in ("value", "value_error", "value_clip_fraction")},
        "critic_lr": updates[-1]["lr"],
        "critic_skipped": total["skipped"],
    }

"""Metrics of one step, from the sums over data-parallel ranks that its updates report.

Names are those of metrics.jsonl.
"""

from areal_lite.algo.metrics import effective_sample_size


def policy_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Combine what the policy's updates report.

    `loss` and `grad_norm` are means over updates, `*_max` are maxima, `skipped` is a sum, and
    `log_z` is a mean over sequences. The other sums become means over tokens.
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

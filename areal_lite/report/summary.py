"""The summary of a run, counted from its records.

A value is None when the run did not get that far, because it was killed or evaluates nothing.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_lite.config import TrainConfig
from areal_lite.report.run_data import RunData, load_run
from areal_lite.report.text import off_policy_label
from areal_lite.run_dir.paths import REPORT_FILE


def build_summary(
    run_dir: Path, config: TrainConfig, started_at: float, finished_at: float
) -> dict[str, Any]:
    """Count the results of a run: times in seconds, staleness in training steps.

    Rates count the trajectories that were trained on, per second between the start of the first
    trajectory and the end of the last step. Raises ValueError when `run_dir` is not a directory.

    Args:
        run_dir: the run directory.
        config: the run's configuration.
        started_at: wall-clock seconds at which the command started.
        finished_at: wall-clock seconds at which the command ended.
    """
    run = load_run(run_dir)
    used = run.used
    seconds = run.training_s
    tokens = sum(t["sampled"] for t in used)
    return {
        "run_dir": str(run_dir),
        "report": str(Path(run_dir) / REPORT_FILE),
        "steps": len(run.metrics),
        "steps_planned": config.trainer.steps,
        "wall_s": finished_at - started_at,
        "training_s": seconds,
        **_accuracies(run.evals),
        "reward_first": run.metrics[0]["reward_mean"] if run.metrics else None,
        "reward_last": run.metrics[-1]["reward_mean"] if run.metrics else None,
        "tokens": tokens,
        "trajectories": len(used),
        "tokens_per_s": tokens / seconds if seconds else None,
        "trajectories_per_s": len(used) / seconds if seconds else None,
        "staleness_mean": _mean(run.series("staleness_mean")),
        "max_staleness": max(run.series("staleness_max"), default=None),
        "staleness_bound": config.buffer.max_staleness,
        "multi_segment_share": _mean([interrupted(t) for t in used]),
        "off_policy_label": off_policy_label(config.algo),
        "clip_fraction_mean": _mean(run.series("clip_fraction")),
        "behavior_weight_max": max(_known(run.series("weight_max")), default=None),
        **_pushes(run),
        "trajectories_lost": run.totals["trajectories_lost"] if run.totals else run.missing,
        "groups": run.groups,
        "controller": run.totals,
    }


def interrupted(trajectory: dict[str, Any]) -> bool:
    """Return whether more than one weight version sampled the trajectory."""
    oldest = trajectory["min_version"]
    return oldest is not None and oldest < trajectory["max_version"]


def _accuracies(evals: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the first evaluation (before training) with the last one (after training).

    `accuracy_before` is sampled, at the temperature of training. `accuracy_after` is the worse of
    greedy and sampled, so that no choice of decoding flatters the result.
    """
    before = evals[0] if evals else {}
    after = evals[-1] if len(evals) > 1 else {}
    both_after = [after[name] for name in ("greedy", "sampled") if after.get(name) is not None]
    return {
        "accuracy_before": before.get("sampled"),
        "accuracy_after": min(both_after, default=None),
        "sampled_before": before.get("sampled"),
        "sampled_after": after.get("sampled"),
        "greedy_before": before.get("greedy"),
        "greedy_after": after.get("greedy"),
        "eval_problems": before.get("problems"),
    }


def _pushes(run: RunData) -> dict[str, Any]:
    pauses = [pause_s for _, pause_s in run.pushes.values()]
    logged = sum(m.get("drained") or 0 for m in run.metrics)
    return {
        "pushes": len(pauses),
        "pause_s_mean": _mean(pauses),
        "pause_s_max": max(pauses, default=None),
        "requests_drained": run.totals["drained"] if run.totals else logged,
    }


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean of the values that are not NaN; None without any."""
    known = _known(values)
    return sum(known) / len(known) if known else None


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]

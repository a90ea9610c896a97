"""The summary of a run, counted from what it wrote down. What a run did not get to (it was killed, or evaluates nothing) is None."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from areal_lite.config import TrainConfig
from areal_lite.report.run_data import RunData, load_run


def build_summary(
    run_dir: Path, config: TrainConfig, started_at: float, finished_at: float
) -> dict[str, Any]:
    """`started_at`, `finished_at`: wall-clock seconds of the whole command. In the result times are seconds, staleness is in versions.

    Rates are of what was trained on (tickets `used`), per second from the first trajectory's start to the last step's end.
    """
    run = load_run(run_dir)
    used, seconds = run.used, run.training_s
    return {
        "run_dir": str(run_dir),
        "report": str(Path(run_dir) / "report.png"),
        "steps": len(run.metrics),
        "steps_planned": config.trainer.steps,
        "wall_s": finished_at - started_at,
        "training_s": seconds,
        **_accuracies(run.evals),
        "reward_first": run.metrics[0]["reward_mean"] if run.metrics else None,
        "reward_last": run.metrics[-1]["reward_mean"] if run.metrics else None,
        "tokens": sum(t["sampled"] for t in used),
        "trajectories": len(used),
        "tokens_per_s": sum(t["sampled"] for t in used) / seconds if seconds else None,
        "trajectories_per_s": len(used) / seconds if seconds else None,
        "staleness_mean": _mean(run.series("staleness_mean")),
        "max_staleness": max(run.series("staleness_max"), default=None),
        "staleness_bound": config.buffer.max_staleness,
        "multi_segment_share": _mean([interrupted(t) for t in used]),
        **_pushes(run),
        "trajectories_lost": run.totals["trajectories_lost"] if run.totals else run.missing,
        "tickets": run.tickets,
        "controller": run.totals,
    }


def interrupted(trajectory: dict[str, Any]) -> bool:
    """Did tokens of more than one weight version go into it?"""
    return (
        trajectory["min_version"] is not None
        and trajectory["min_version"] < trajectory["max_version"]
    )


def _accuracies(evals: list[dict[str, Any]]) -> dict[str, Any]:
    """The first evaluation is before training, the last one after. `accuracy_before` is sampled (temperature as in training),
    `accuracy_after` the worse of greedy and sampled: no choice of decoding flatters the result."""
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
    drained = (
        run.totals["drained"] if run.totals else sum(m.get("drained") or 0 for m in run.metrics)
    )
    return {
        "pushes": len(pauses),
        "pause_s_mean": _mean(pauses),
        "pause_s_max": max(pauses, default=None),
        "requests_drained": drained,
    }


def _mean(values: list[float]) -> float | None:
    """The mean of what is known; NaN is not."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else None

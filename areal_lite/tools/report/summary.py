"""The summary of a run, counted from its records.

A value is None when the run did not get that far, because it was killed or evaluates nothing.
"""

from pathlib import Path
from typing import Any

from areal_lite.config import TrainConfig
from areal_lite.run_dir.paths import REPORT_FILE, STORE_FILE, TOTALS_FILE
from areal_lite.run_dir.store import Store
from areal_lite.system.files import read_json
from areal_lite.tools.report.facts import known_values, mean_of
from areal_lite.tools.report.run_data import RunData, load_run
from areal_lite.tools.report.text import off_policy_label


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
    facts = run.facts()
    seconds = run.training_s
    return {
        "run_dir": str(run_dir),
        "report": str(Path(run_dir) / REPORT_FILE),
        "steps": len(run.metrics),
        "steps_planned": config.trainer.steps,
        "wall_s": finished_at - started_at,
        "training_s": seconds,
        **_accuracies(facts, run.evals),
        "reward_first": run.metrics[0]["reward_mean"] if run.metrics else None,
        "reward_last": run.metrics[-1]["reward_mean"] if run.metrics else None,
        "tokens": facts["tokens"],
        "trajectories": facts["trajectories"],
        "tokens_per_s": facts["tokens"] / seconds if seconds else None,
        "trajectories_per_s": facts["trajectories"] / seconds if seconds else None,
        "staleness_mean": facts["staleness_mean"],
        "max_staleness": facts["staleness_max"],
        "staleness_bound": config.buffer.max_staleness,
        "multi_segment_share": facts["interrupted"],
        "off_policy_label": off_policy_label(config.algo),
        "clip_fraction_mean": mean_of(run.metrics, "clip_fraction"),
        "behavior_weight_max": max(known_values(run.metrics, "weight_max"), default=None),
        "pushes": facts["pushes"],
        "pause_s_mean": facts["pause_mean"],
        "pause_s_max": facts["pause_max"],
        **_counts(run),
    }


def _counts(run: RunData) -> dict[str, Any]:
    """Return the counts of the store and of the controller, which writes its own when it ends."""
    totals = read_json(run.run_dir / TOTALS_FILE)
    drained = sum(known_values(run.metrics, "drained"))
    groups, missing = _count_groups(run.run_dir / STORE_FILE)
    return {
        "requests_drained": totals["drained"] if totals else drained,
        "trajectories_lost": totals["trajectories_lost"] if totals else missing,
        "groups": groups,
        "controller": totals or None,
    }


def _count_groups(path: Path) -> tuple[dict[str, int], int]:
    """Return the groups by state, and the number of trajectories that the store lacks."""
    if not path.exists():
        return {}, 0
    store = Store(path, read_only=True)
    try:
        return store.counts(), store.missing_trajectories()
    finally:
        store.close()


def _accuracies(facts: dict[str, Any], evals: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the first evaluation (before training) with the last one (after training).

    `accuracy_before` is sampled, at the temperature of training. `accuracy_after` is the worse of
    greedy and sampled, so that no choice of decoding flatters the result.
    """
    keys = ("sampled_before", "sampled_after", "greedy_before", "greedy_after")
    shares = {key: facts[key] for key in keys}
    after = [shares[key] for key in ("sampled_after", "greedy_after") if shares[key] is not None]
    return {
        "accuracy_before": shares["sampled_before"],
        "accuracy_after": min(after, default=None),
        **shares,
        "eval_problems": evals[0].get("problems") if evals else None,
    }

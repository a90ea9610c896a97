"""The final numbers of a run: at the top of its page, in summary.json, in the terminal.

A value is None when the run did not get that far, because it was killed or evaluates nothing.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from areal_lite.config import AlgoConfig, BufferConfig, TrainConfig
from areal_lite.run_dir.paths import REPORT_FILE, STORE_FILE, TOTALS_FILE
from areal_lite.system.files import read_json
from areal_lite.tools.formatting import duration, pause, short
from areal_lite.tools.report.run_data import Metrics, RunData, read_run
from areal_lite.tools.report.timeline import downtime_s, pushes_of, trainer_spans
from areal_lite.tools.store_columns import open_columns

_count = "{:,.0f}".format
_percent = "{:.1%}".format


FACTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "steps": ("training steps", _count),
    "sampled_before": ("accuracy before training, sampled", _percent),
    "sampled_after": ("accuracy of the last evaluation, sampled", _percent),
    "greedy_before": ("accuracy before training, greedy", _percent),
    "greedy_after": ("accuracy of the last evaluation, greedy", _percent),
    "reward_start": ("mean reward of the first five steps", short),
    "reward_end": ("mean reward of the last five steps", short),
    "training_s": ("time, first trajectory to last step", duration),
    "trajectories": ("trajectories trained on", _count),
    "tokens": ("tokens trained on", _count),
    "tokens_per_s": ("tokens trained on per second", short),
    "wait_share": ("share of the time that the trainer waited", _percent),
    "staleness_mean": ("mean staleness, steps", short),
    "max_staleness": ("largest staleness, steps", short),
    "multi_segment_share": ("trajectories of more than one weight version", _percent),
    "behave_kl": ("mean KL of behavior and proximal, nats per token", short),
    "ess": ("mean effective sample size", "{:.4f}".format),
    "pushes": ("weight pushes", _count),
    "pause_s_mean": ("mean pause per push", pause),
    "pause_s_max": ("longest pause", pause),
    "length_mean": ("mean response, tokens", short),
    "truncated": ("responses cut off at the token budget", _percent),
    "clip_fraction_mean": ("mean share of clipped tokens", "{:.2%}".format),
    "behavior_weight_max": ("largest behavior weight", short),
}
"""Key of a number of a run -> its name with the unit, and the function that writes it."""
# The rows of the table in the terminal, with the values of a summary.
_SUMMARY = {
    "held-out accuracy, greedy": "{greedy_before} → {greedy_after}",
    "held-out accuracy, sampled": "{sampled_before} → {sampled_after}",
    "held-out problems": "{eval_problems}",
    "training steps": "{steps} of {steps_planned}",
    "trained on": "{tokens_per_s} tokens/s, {trajectories_per_s} trajectories/s",
    "staleness": "mean {staleness_mean}, largest {max_staleness}, bound {staleness_bound}",
    "trajectories of more than one version": "{multi_segment_share}",
    "{off_policy_label}": "{clip_fraction_mean} of tokens clipped, "
    "behavior weights up to {behavior_weight_max}",
    "weight pushes": "{pushes}",
    "pause per push": "mean {pause_s_mean}, longest {pause_s_max}",
    "requests drained for a push": "{requests_drained}",
    "trajectories lost": "{trajectories_lost}",
    "wall time of this start": "{wall_s}",
}


def count_facts(run: RunData) -> dict[str, Any]:
    """Count the numbers of FACTS; None where the run did not get that far."""
    metrics, evals, columns = run.metrics, run.evals, run.trained
    used = columns.step >= 0
    pauses = [seconds for _, seconds in pushes_of(metrics).values()]
    seconds = training_s(run) or None
    tokens = int(columns.sampled[used].sum())
    main = [e for e in evals if e.get("name") == evals[0].get("name")]
    before = next((e for e in main if not e["version"]), {})
    after = next((e for e in reversed(main) if e["version"]), {})
    rewards = known_values(metrics, "reward_mean")
    return {
        "steps": len(metrics),
        "sampled_before": before.get("sampled"),
        "sampled_after": after.get("sampled"),
        "greedy_before": before.get("greedy"),
        "greedy_after": after.get("greedy"),
        "reward_start": _mean(rewards[:5]),
        "reward_end": _mean(rewards[-5:]),
        "training_s": seconds,
        "trajectories": int(used.sum()),
        "tokens": tokens,
        "tokens_per_s": tokens / seconds if seconds and tokens else None,
        "wait_share": _waited_s(run) / seconds if seconds and len(columns) else None,
        "staleness_mean": _mean(known_values(metrics, "staleness_mean")),
        "max_staleness": max((m.get("staleness_max") or 0 for m in metrics), default=None),
        "multi_segment_share": _mean((columns.newest > columns.oldest)[used]),
        "behave_kl": _mean(known_values(metrics, "behave_kl")),
        "ess": _mean(known_values(metrics, "ess")),
        "pushes": len(pauses),
        "pause_s_mean": _mean(pauses),
        "pause_s_max": max(pauses, default=None),
        "length_mean": _mean(columns.sampled[used]),
        "truncated": _mean(columns.truncated[used]),
        "clip_fraction_mean": _mean(known_values(metrics, "clip_fraction")),
        "behavior_weight_max": max(known_values(metrics, "weight_max"), default=None),
    }


def training_s(run: RunData) -> float:
    """Return the seconds from the first trajectory to the end of the last step; 0 without one.

    Without trajectories they count from the start of the first step. The time between an end and a
    resumed start is left out.
    """
    if not run.metrics:
        return 0.0
    first = run.metrics[0]
    started = first["logged_at"] - (first["time_s"] or 0.0)
    if len(run.columns):
        started = float(run.columns.started.min())
    return run.metrics[-1]["logged_at"] - started - downtime_s(run.metrics)


def _waited_s(run: RunData) -> float:
    """Return the seconds that the trainer waited after the first trajectory had started."""
    starts, ends = trainer_spans(run.metrics)["waits for a batch"]
    return float(np.maximum(ends - np.maximum(starts, run.columns.started.min()), 0.0).sum())


def fact_rows(*runs: Mapping[str, Any]) -> list[list[str]]:
    """Return the name of each fact and its text in each run, a dash for what is unknown."""
    return [[name, *(_shown(run[k], form) for run in runs)] for k, (name, form) in FACTS.items()]


def headline(facts: Mapping[str, Any], planned: int | None, ended: bool) -> str:
    """Say in a few sentences how the run went."""
    of = f" of {planned}" if planned and planned != facts["steps"] else ""
    took = f" in {duration(facts['training_s'])}" if facts["training_s"] else ""
    steps = f"{facts['steps']}{of} training steps"
    parts = [f"{steps} on {facts['trajectories']:,} trajectories{took}."]
    if facts["sampled_after"] is not None and facts["sampled_before"] is not None:
        change = f"from {facts['sampled_before']:.0%} to {facts['sampled_after']:.0%}"
        parts.append(f"Held-out accuracy went {change} (sampled).")
    elif facts["reward_end"] is not None:
        change = f"from {short(facts['reward_start'])} to {short(facts['reward_end'])}"
        parts.append(f"Mean reward went {change}.")
    if (share := facts["multi_segment_share"]) is not None:
        parts.append(f"{share:.0%} of the trajectories have tokens of more than one version.")
    if not ended:
        parts.append("The run has not ended: it is still going, or it was killed.")
    return " ".join(parts)


def _shown(value: Any, form: Callable[[Any], str]) -> str:
    return "–" if value is None else form(value)


def known_values(metrics: Metrics, key: str) -> list[float]:
    """Return `key` of the training steps that have it."""
    return [m[key] for m in metrics if m.get(key) is not None]


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None


def build_summary(
    run_dir: Path, config: TrainConfig, started_at: float, finished_at: float
) -> dict[str, Any]:
    """Count the results of a run: its facts, times in seconds, staleness in training steps.

    Rates count the trajectories that were trained on, per second between the start of the first
    trajectory and the end of the last step. `accuracy_before` is sampled, at the temperature of
    training. `accuracy_after` is the worse of greedy and sampled, so that no choice of decoding
    flatters the result. The command began at `started_at`, and ended at `finished_at`. Raises
    ValueError if `run_dir` has no run.
    """
    run = read_run(run_dir)
    facts = count_facts(run)
    seconds, after = facts["training_s"], (facts["sampled_after"], facts["greedy_after"])
    return {
        "run_dir": str(run_dir),
        "report": str(Path(run_dir) / REPORT_FILE),
        "steps_planned": config.trainer.steps,
        "wall_s": finished_at - started_at,
        **facts,
        "accuracy_before": facts["sampled_before"],
        "accuracy_after": min((share for share in after if share is not None), default=None),
        "eval_problems": run.evals[0].get("problems") if run.evals else None,
        "reward_first": run.metrics[0]["reward_mean"] if run.metrics else None,
        "reward_last": run.metrics[-1]["reward_mean"] if run.metrics else None,
        "trajectories_per_s": facts["trajectories"] / seconds if seconds else None,
        "staleness_bound": run.staleness_bound,
        "off_policy_label": off_policy_label(config.algo),
        **_counts(run),
    }


def _counts(run: RunData) -> dict[str, Any]:
    """Return the counts of the store and of the controller, which writes its own when it ends."""
    totals = read_json(run.run_dir / TOTALS_FILE)
    drained = sum(known_values(run.metrics, "drained"))
    with open_columns(run.run_dir / STORE_FILE) as store:
        groups, missing = (store.counts(), store.missing_trajectories()) if store else ({}, 0)
    return {
        "requests_drained": totals["drained"] if totals else drained,
        "trajectories_lost": totals["trajectories_lost"] if totals else missing,
        "groups": groups,
        "controller": totals or None,
    }


def summary_table(summary: dict[str, Any]) -> Table:
    """Lay out the result of `build_summary`. Unknown values are shown as a dash."""
    forms = {key: form for key, (_, form) in FACTS.items()}
    forms |= {"trajectories_per_s": short, "wall_s": duration}
    texts = {key: _shown(value, forms.get(key, str)) for key, value in summary.items()}
    table = Table(title="Summary of the run", show_header=False, title_justify="left")
    table.add_column(style="bold")
    if missing := summary.get("no_signal"):
        table.add_row("what went wrong", Text(missing))  # answers of a model could be markup
    for name, text in _SUMMARY.items():
        table.add_row(name.format_map(texts), text.format_map(texts))
    return table


def age_label(buffer: BufferConfig) -> str:
    """Say how old tokens may be when they are trained on."""
    return "of any age" if buffer.replay.capacity else f"staleness up to {buffer.max_staleness}"


def off_policy_label(algo: AlgoConfig) -> str:
    """Return the heading of the numbers about clips and behavior weights."""
    return "decoupled PPO" if algo.loss == "ppo" and algo.decoupled else "off-policy data"

"""The final numbers of a run: what a page says at its top, and what `compare` subtracts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from areal_lite.tools.report.columns import Columns
from areal_lite.tools.report.measures import downtime_s, trainer_spans
from areal_lite.tools.report.text import duration, pause, short
from areal_lite.tools.report.windows import pushes_of


class Fact(NamedTuple):
    """A number of a run: its key, its name and unit, and its text."""

    key: str
    name: str
    text: Callable[[Any], str]


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


FACTS = (
    Fact("steps", "training steps", _count),
    Fact("sampled_before", "accuracy before training, sampled", _percent),
    Fact("sampled_after", "accuracy of the last evaluation, sampled", _percent),
    Fact("greedy_before", "accuracy before training, greedy", _percent),
    Fact("greedy_after", "accuracy of the last evaluation, greedy", _percent),
    Fact("reward_first", "mean reward of the first five steps", short),
    Fact("reward_last", "mean reward of the last five steps", short),
    Fact("seconds", "time, first trajectory to last step", duration),
    Fact("trajectories", "trajectories trained on", _count),
    Fact("tokens", "tokens trained on", _count),
    Fact("tokens_per_s", "tokens trained on per second", short),
    Fact("wait_share", "share of the time that the trainer waited", _percent),
    Fact("staleness_mean", "mean staleness, steps", short),
    Fact("staleness_max", "largest staleness, steps", short),
    Fact("interrupted", "trajectories of more than one weight version", _percent),
    Fact("behave_kl", "mean KL of behavior and proximal, nats per token", short),
    Fact("ess", "mean effective sample size", "{:.4f}".format),
    Fact("pushes", "weight pushes", _count),
    Fact("pause_mean", "mean pause per push", pause),
    Fact("pause_max", "longest pause", pause),
    Fact("length_mean", "mean response, tokens", short),
    Fact("truncated", "responses cut off at the token budget", _percent),
)


def count_facts(
    metrics: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]], columns: Columns
) -> dict[str, float | None]:
    """Count the numbers of FACTS; None where the run did not get that far."""
    used = columns.step >= 0
    first_version, last_version = versions_of(columns)
    pauses = [seconds for _, seconds in pushes_of(metrics).values()]
    seconds = training_s(metrics, columns) if metrics and len(columns) else None
    tokens = int(columns.sampled[used].sum())
    main = [e for e in evals if e.get("name") == evals[0].get("name")]
    before, after = main[0] if main else {}, main[-1] if len(main) > 1 else {}
    rewards = known_values(metrics, "reward_mean")
    return {
        "steps": len(metrics),
        "sampled_before": before.get("sampled"),
        "sampled_after": after.get("sampled"),
        "greedy_before": before.get("greedy"),
        "greedy_after": after.get("greedy"),
        "reward_first": _mean(rewards[:5]),
        "reward_last": _mean(rewards[-5:]),
        "seconds": seconds,
        "trajectories": int(used.sum()),
        "tokens": tokens,
        "tokens_per_s": tokens / seconds if seconds else None,
        "wait_share": _waited(metrics, columns) / seconds if seconds else None,
        "staleness_mean": mean_of(metrics, "staleness_mean"),
        "staleness_max": max((m.get("staleness_max") or 0 for m in metrics), default=None),
        "interrupted": _mean((last_version > first_version)[used]),
        "behave_kl": mean_of(metrics, "behave_kl"),
        "ess": mean_of(metrics, "ess"),
        "pushes": len(pauses),
        "pause_mean": _mean(pauses),
        "pause_max": max(pauses, default=None),
        "length_mean": _mean(columns.sampled[used]),
        "truncated": _mean(columns.truncated[used]),
    }


def first_started(metrics: Sequence[Mapping[str, Any]], columns: Columns) -> float | None:
    """Return the wall-clock seconds at which the first trajectory started; None before it.

    Server start-up is earlier. Without trajectories it is the start of the first step.
    """
    if len(columns):
        return float(columns.started.min())
    return metrics[0]["logged_at"] - (metrics[0]["time_s"] or 0.0) if metrics else None


def training_s(metrics: Sequence[Mapping[str, Any]], columns: Columns) -> float:
    """Return the seconds from `first_started` to the end of the last step; 0 without one.

    The time between an end and a resumed start is left out.
    """
    started = first_started(metrics, columns)
    if not metrics or started is None:
        return 0.0
    return metrics[-1]["logged_at"] - started - downtime_s(metrics)


def versions_of(columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last weight version of each trajectory, -1 without any."""
    index = np.arange(len(columns))
    first = np.searchsorted(columns.owner, index)
    last = np.searchsorted(columns.owner, index, "right") - 1
    versions = np.append(columns.version, -1)
    some = last >= first
    return np.where(some, versions[first], -1), np.where(some, versions[last], -1)


def _waited(metrics: Sequence[Mapping[str, Any]], columns: Columns) -> float:
    """Return the seconds that the trainer waited after the first trajectory had started."""
    starts, ends = trainer_spans(metrics)["waits for a batch"]
    return float(np.maximum(ends - np.maximum(starts, columns.started.min()), 0.0).sum())


def fact_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return name and text of each fact, a dash for what is unknown."""
    return [(fact.name, _text(fact, facts[fact.key])) for fact in FACTS]


def difference_rows(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return, for each fact, its name, its text in each run, and the differences to the first."""
    rows = []
    for fact in FACTS:
        values = [run[fact.key] for run in runs]
        cells = [_text(fact, values[0])]
        for value in values[1:]:
            cells.append(_text(fact, value))
            base = values[0]
            delta = None if value is None or base is None else value - base
            sign = "" if not delta else "+" if delta > 0 else "−"
            cells.append(sign + _text(fact, None if delta is None else abs(delta)))
        rows.append([fact.name, *cells])
    return rows


def headline(facts: Mapping[str, Any], planned: int | None, ended: bool) -> str:
    """Say in a few sentences how the run went."""
    of = f" of {planned}" if planned and planned != facts["steps"] else ""
    parts = [
        f"{facts['steps']}{of} training steps on {facts['trajectories']:,} trajectories"
        + (f" in {duration(facts['seconds'])}." if facts["seconds"] else ".")
    ]
    if facts["sampled_after"] is not None and facts["sampled_before"] is not None:
        change = f"from {facts['sampled_before']:.0%} to {facts['sampled_after']:.0%}"
        parts.append(f"Held-out accuracy went {change} (sampled).")
    elif facts["reward_last"] is not None:
        change = f"from {short(facts['reward_first'])} to {short(facts['reward_last'])}"
        parts.append(f"Mean reward went {change}.")
    if facts["interrupted"] is not None:
        parts.append(
            f"{facts['interrupted']:.0%} of the trajectories have tokens of more than one version."
        )
    if not ended:
        parts.append("The run has not ended: it is still going, or it was killed.")
    return " ".join(parts)


def _text(fact: Fact, value: float | None) -> str:
    return "–" if value is None else fact.text(value)


def known_values(metrics: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return `key` of the training steps that have it."""
    return [m[key] for m in metrics if m.get(key) is not None]


def mean_of(metrics: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Return the mean of `key` over the training steps that have it; None without any."""
    return _mean(known_values(metrics, key))


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None

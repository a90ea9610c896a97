"""One page about several runs: charts overlaid, numbers, and the settings that differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_lite.tools.report.charts import LINES, length_chart, line_chart, staleness_chart
from areal_lite.tools.report.facts import difference_rows, headline
from areal_lite.tools.report.page_build import render
from areal_lite.tools.report.run_data import RunData, read_run

_REWARD_NOTE = "The running mean of the mean reward of each step. It should rise."
# Chosen for each run, because its folder has them or because they say nothing.
_OWN_KEYS = ("run_dir", "model")


def compare_page(run_dirs: Sequence[Path]) -> str:
    """Return the page of several runs; the first is the one that others are compared with.

    Raises ValueError for fewer than two, and for a directory that has no run.
    """
    if len(run_dirs) < 2:
        raise ValueError(f"runs={list(map(str, run_dirs))}: name at least two run directories")
    runs = [read_run(run_dir) for run_dir in run_dirs]
    names = run_names(run_dirs)
    facts = [run.facts() for run in runs]
    charts = overlaid_charts(runs, names)
    changes = config_differences([run.config for run in runs])
    head = ["", names[0]]
    for name in names[1:]:
        head += [name, f"{name} − {names[0]}"]
    return render(
        {"charts": {chart["id"]: chart for chart in charts}, "lanes": None, "windows": []},
        [],
        kind="areal_lite comparison",
        title=" and ".join(names),
        headline=f"{len(runs)} runs, {len(changes)} settings that differ.",
        runs=[
            {"name": name, "headline": headline(fact, run.steps_planned, run.ended)}
            for name, fact, run in zip(names, facts, runs)
        ],
        sections=[{"id": "charts", "title": "Charts", "charts": charts}],
        tables=[
            _table("final", "Final numbers", head, difference_rows(facts)),
            _table("configuration", "Settings that differ", ["", *names], changes),
        ],
    )


def run_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell them apart; equal paths get numbers."""
    parts = [path.resolve().parts for path in run_dirs]
    for size in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-size:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({number})" for number, path in enumerate(run_dirs, 1)]


def overlaid_charts(runs: Sequence[RunData], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return each chart with the first series of every run, in the run's color."""
    charts = []
    for line in LINES:
        own = [line_chart(line._replace(keys=line.keys[:1]), run.metrics) for run in runs]
        series = [
            {**chart["series"][-1], "name": name, "color": index}
            for index, (chart, name) in enumerate(zip(own, names))
            if chart["series"]
        ]
        if line.optional and not series:
            continue
        several = f": {line.keys[0][1]}" if len(line.keys) > 1 else ""
        charts.append({**own[0], "title": f"{line.title}{several}", "series": series})
    charts[0] |= {"title": "Reward", "y": "reward", "note": _REWARD_NOTE}
    for make in (lambda run: staleness_chart(run.columns, None), lambda r: length_chart(r.columns)):
        charts.append(_overlaid_histogram([make(run) for run in runs], names))
    return charts


def _overlaid_histogram(charts: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return bars of several runs as one chart of lines over the left edges of the bars."""
    series = [
        {
            "name": name,
            "style": "line",
            "color": index,
            "x": [float(label.partition("–")[0]) for label in chart["labels"]],
            "y": chart["values"],
        }
        for index, (chart, name) in enumerate(zip(charts, names))
    ]
    kept = {key: charts[0][key] for key in ("id", "title", "note", "x", "y")}
    return {**kept, "kind": "line", "series": series}


def config_differences(configs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return dotted key and the value in each run, of the settings that are not equal in all."""
    flat = [dict(_flat(config)) for config in configs]
    keys = dict.fromkeys(key for values in flat for key in values)
    rows = []
    for key in keys:
        texts = [json.dumps(values[key]) if key in values else "–" for values in flat]
        if len(set(texts)) > 1 and key not in _OWN_KEYS:
            rows.append([key, *texts])
    return rows


def _flat(node: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs = []
    for key, value in node.items():
        inner = isinstance(value, Mapping) and value
        pairs += _flat(value, f"{prefix}{key}.") if inner else [(f"{prefix}{key}", value)]
    return pairs


def _table(
    id: str, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> dict[str, Any]:
    return {"id": id, "title": title, "head": head, "rows": rows, "folded": False}

"""One HTML file about a run, or about several runs, from the template and scripts in assets/.

Model output is hostile. It enters the page in two ways only: escaped by the template, or as JSON in
blocks that browsers do not run and from which assets/dom.js writes text nodes. The content security
policy allows the page's own style and script, by their hashes, and no address.

The store is read once; time and memory grow linearly with the number of trajectories, and the size
of the page does not: charts have at most a fixed number of points, and rollouts are a sample.
"""

import base64
import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from areal_lite.config.files import flat
from areal_lite.run_dir.paths import PAGE_FILE
from areal_lite.run_dir.store_format import NOT_KEPT
from areal_lite.system.files import to_plain, write_atomically
from areal_lite.tools.formatting import short
from areal_lite.tools.report.charts import LINES, charts_of, line_chart
from areal_lite.tools.report.rollouts import CHOICE, sample_groups
from areal_lite.tools.report.run_data import RunData, read_run
from areal_lite.tools.report.summary import FACTS, count_facts, fact_rows, headline
from areal_lite.tools.report.timeline import build_windows
from areal_lite.trajectory import GroupState

_FOLDER = Path(__file__).with_name("assets")
_SCRIPTS = ("dom.js", "charts.js", "timeline.js", "rollouts.js", "page.js")
# Steps that the table of steps has, at most, and their metrics.
_TABLE_STEPS = 200
_COLUMNS = ("step", "reward_mean", "staleness_mean", "staleness_max", "behave_kl", "ess")
_COLUMNS += ("clip_fraction", "entropy", "reference_kl", "value_explained", "length_mean")
_COLUMNS += ("grad_norm", "wait_s", "train_s", "pause_s")
# Facts at the top of a page.
_FIGURES = {"sampled_after", "reward_end", "tokens_per_s", "staleness_mean"}
_FIGURES |= {"wait_share", "pause_s_mean"}
# By the id of a section, its heading and the ids of its charts. All others are about learning.
_SECTIONS = {
    "staleness": (
        "Off-policy data and the update",
        {"staleness", "staleness_histogram", "behave_kl", "ess", "clip", "grad_norm"},
    ),
    "speed": ("Speed", {"throughput", "in_flight", "step_time", "queue"}),
}
# Variables of page.html.j2 that a page may leave out.
_OPTIONAL = ("follow", "runs", "figures", "timeline", "rollouts", "config")
_REWARD_NOTE = "The running mean of the mean reward of each step. It should rise."
# Chosen for each run, because its folder has them or because they say nothing.
_OWN_KEYS = ("run_dir", "model")


def write_page(run_dir: Path) -> Path:
    """Write `<run_dir>/report.html` and return its path. Raises ValueError if there is no run."""
    path = Path(run_dir) / PAGE_FILE
    write_atomically(path, run_page(run_dir))
    return path


def run_page(run_dir: Path, follow: bool = False) -> str:
    """Return the page of a run; with `follow` it asks its server for news."""
    run = read_run(run_dir)
    facts = count_facts(run)
    charts = charts_of(run)
    windows = build_windows(run.columns, run.metrics)
    rows = fact_rows(facts)
    figures = {key for key in _FIGURES if facts[key] is not None}
    groups = list(sample_groups(run))
    used = run.columns.groups.are(GroupState.USED)
    removed = int((used & (run.columns.groups.kept <= 0)).sum())
    rollouts = f"{len(groups)} of the {used.sum():,} groups that were trained on. {CHOICE}"
    rollouts += f" {NOT_KEPT.capitalize()}: {removed:,} groups." if removed else ""
    config = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True) if run.config else ""
    return render(
        {"charts": charts, "windows": windows},
        groups,
        kind="areal_lite run",
        title=run.name,
        headline=headline(facts, run.steps_planned, run.ended),
        figures=[row for key, row in zip(FACTS, rows) if key in figures],
        sections=_sections(charts),
        timeline=bool(windows),
        rollouts=rollouts if len(run.columns) else "",
        tables=[_table("final", "Final numbers", rows), _step_table(run)],
        config=config,
        follow="1" if follow else "",
    )


def render(data: Mapping[str, Any], heavy: Sequence[Any], **context: Any) -> str:
    """Fill in the template with `context`.

    `data` is what the scripts draw, and `heavy` what the rollout browser shows, compressed.
    """
    style = "".join(_file("page.css"))
    script = "(() => {\n" + "".join(map(_file, _SCRIPTS)) + "})();"
    packed = base64.b64encode(zlib.compress(_json(heavy).encode(), 9)).decode() if heavy else ""
    light = _json(data)
    connect = "'self'" if context.get("follow") else "'none'"
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    size = (len(style) + len(script) + len(packed) + len(light)) / 1e3
    footer = (
        f"Written by areal_lite. {size:,.0f} kB; a page has at most about 5 MB, however long its "
        "run. It loads nothing from a network."
    )
    return _template().render(
        **dict.fromkeys(_OPTIONAL, "") | context,
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        data=Markup(light),
        heavy=packed,
        footer=footer,
    )


def _sections(charts: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the charts under headings, without headings that have none."""
    others = charts.keys() - set().union(*(ids for _, ids in _SECTIONS.values()))
    sections = [
        {"id": id, "title": title, "charts": [charts[key] for key in charts if key in ids]}
        for id, (title, ids) in {"learning": ("Learning", others), **_SECTIONS}.items()
    ]
    return [section for section in sections if section["charts"]]


def _table(id: str, title: str, rows: Any, head: Any = (), folded: bool = False) -> dict[str, Any]:
    return {"id": id, "title": title, "rows": rows, "head": head, "folded": folded}


def _step_table(run: RunData) -> dict[str, Any]:
    """Return the table of the last steps, without columns that the run lacks."""
    shown = run.metrics[-_TABLE_STEPS:]
    keys = [key for key in _COLUMNS if any(m.get(key) is not None for m in shown)]
    rows = [["–" if m.get(key) is None else short(m[key]) for key in keys] for m in shown]
    title = f"Training steps: the last {len(shown)} of {len(run.metrics)}"
    return _table("steps", title, rows, keys, folded=True)


def _json(value: Any) -> str:
    """Encode for a script block: no `<`, so that nothing in it can end the block."""
    return json.dumps(to_plain(value), separators=(",", ":")).replace("<", "\\u003c")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _file(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


@cache
def _template() -> Any:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(_file("page.html.j2"))


def compare_page(run_dirs: Sequence[Path]) -> str:
    """Return the page of several runs, side by side.

    Raises ValueError for a directory that has no run.
    """
    runs = [read_run(run_dir) for run_dir in run_dirs]
    names = run_names(run_dirs)
    facts = [count_facts(run) for run in runs]
    charts = overlaid_charts(runs, names)
    changes = config_differences([run.config for run in runs])
    return render(
        {"charts": {chart["id"]: chart for chart in charts}, "windows": []},
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
            _table("final", "Final numbers", fact_rows(*facts), ["", *names]),
            _table("configuration", "Settings that differ", changes, ["", *names]),
        ],
    )


def run_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return the paths of runs from the folder that has all of them."""
    paths = [path.resolve() for path in run_dirs]
    common = os.path.commonpath(paths)
    return [os.path.relpath(path, common) for path in paths]


def overlaid_charts(runs: Sequence[RunData], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return each chart with the first series of every run that has one, in the run's color."""
    charts = []
    for line in LINES:
        own = [line_chart(line._replace(keys=line.keys[:1]), run.metrics) for run in runs]
        series = [
            {**chart["series"][-1], "name": name, "color": index}
            for index, (chart, name) in enumerate(zip(own, names))
            if chart["series"]
        ]
        several = f": {line.keys[0][1]}" if len(line.keys) > 1 else ""
        charts.append({**own[0], "title": f"{line.title}{several}", "series": series})
    charts[0] |= {"title": "Reward", "y": "reward", "note": _REWARD_NOTE}
    return [chart for chart in charts if chart["series"]]


def config_differences(configs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return dotted key and the value in each run, of the settings that are not equal in all."""
    settings = [flat(config) if config else {} for config in configs]
    rows = []
    for key in dict.fromkeys(key for values in settings for key in values):
        known = [json.dumps(of[key], ensure_ascii=False) if key in of else "–" for of in settings]
        if len(set(known)) > 1 and key not in _OWN_KEYS:
            rows.append([key, *known])
    return rows

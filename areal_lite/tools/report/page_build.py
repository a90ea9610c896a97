"""The page itself: one HTML file without a network, from the template and scripts in page/.

Model output is hostile. It enters the page in two ways only: escaped by the template, or as JSON in
blocks that browsers do not run and from which page/dom.js writes text nodes. The content security
policy allows the page's own style and script, by their hashes, and no address.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from omegaconf import OmegaConf

from areal_lite.run_dir.paths import PAGE_FILE
from areal_lite.run_dir.store_schema import NOT_KEPT
from areal_lite.system.files import to_plain, write_atomically
from areal_lite.tools.report.charts import learning_charts, speed_charts
from areal_lite.tools.report.facts import FACTS, fact_rows, headline
from areal_lite.tools.report.lanes import time_edges
from areal_lite.tools.report.page_data import lane_data, rollout_sample
from areal_lite.tools.report.run_data import RunData, read_run
from areal_lite.tools.report.samples import CHOICE
from areal_lite.tools.report.text import duration, short
from areal_lite.tools.report.windows import build_windows

_FOLDER = Path(__file__).with_name("page")
_SCRIPTS = ("dom.js", "charts.js", "lanes.js", "timeline.js", "rollouts.js", "page.js")
# Steps that the table of steps has, at most.
_TABLE_STEPS = 200
_COLUMNS = {
    "step": "step",
    "reward_mean": "reward",
    "staleness_mean": "staleness, mean",
    "staleness_max": "largest",
    "behave_kl": "KL, nats",
    "ess": "ESS",
    "clip_fraction": "clipped",
    "entropy": "entropy, nats",
    "reference_kl": "KL to reference",
    "value_explained": "critic explains",
    "length_mean": "response, tokens",
    "grad_norm": "gradient norm",
    "wait_s": "waited, s",
    "train_s": "trained, s",
    "pause_s": "pause, s",
}
_FIGURES = {
    "sampled_after": "accuracy, sampled",
    "reward_last": "reward, last steps",
    "tokens_per_s": "tokens/s trained on",
    "staleness_mean": "mean staleness",
    "wait_share": "trainer waited",
    "pause_mean": "pause per push",
}


def write_page(run_dir: Path) -> Path:
    """Write `<run_dir>/report.html` and return its path. Raises ValueError if that is no run."""
    path = Path(run_dir) / PAGE_FILE
    write_atomically(path, run_page(run_dir))
    return path


def run_page(run_dir: Path, follow: bool = False) -> str:
    """Return the page of a run; with `follow` it asks its server for news."""
    run = read_run(run_dir)
    facts = run.facts()
    edges = time_edges(run.columns, run.metrics)
    charts = learning_charts(run.metrics, run.evals, run.staleness_bound, run.columns)
    sections = _sections(charts)
    lanes = None
    if edges is not None:
        speed = speed_charts(run.columns, run.metrics, edges)
        sections.append({"id": "speed", "title": "Speed", "charts": speed})
        charts += speed
        lanes = lane_data(run, edges)
    windows = build_windows(run.columns, run.metrics)
    groups = rollout_sample(run)
    used = run.columns.groups["state"] == "used"
    removed = int((used & ~run.columns.groups["kept"]).sum())
    rollouts = f"{len(groups)} of the {int(used.sum()):,} groups that were trained on. {CHOICE}" + (
        f" {NOT_KEPT.capitalize()}: {removed:,} groups." if removed else ""
    )
    return render(
        {"charts": {chart["id"]: chart for chart in charts}, "lanes": lanes, "windows": windows},
        groups,
        kind="areal_lite run",
        title=run.name,
        headline=headline(facts, run.steps_planned, run.ended),
        figures=_figures(facts),
        sections=sections,
        lanes=lanes and {"totals": lanes["totals"], "bin": _seconds(lanes)},
        timeline=bool(windows),
        rollouts=rollouts if len(run.columns) else "",
        tables=[_table("final", "Final numbers", fact_rows(facts)), _step_table(run)],
        config=OmegaConf.to_yaml(OmegaConf.create(run.config)) if run.config else "",
        follow="1" if follow else "",
    )


def render(data: Mapping[str, Any], heavy: Sequence[Any], **context: Any) -> str:
    """Fill in the template.

    Args:
        data: what the scripts draw.
        heavy: what the rollout browser shows, stored compressed.
        context: the variables of page.html.j2 that have no default here.
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
    defaults = {
        "follow": "",
        "runs": [],
        "figures": [],
        "lanes": None,
        "timeline": False,
        "rollouts": "",
        "config": "",
    }
    size = (len(style) + len(script) + len(packed) + len(light)) / 1e3
    footer = (
        f"Written by areal_lite. {size:,.0f} kB; a page has at most about 5 MB, however long its "
        "run. It loads nothing from a network."
    )
    return _template().render(
        **{**defaults, **context},
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        data=Markup(light),
        heavy=packed,
        footer=footer,
    )


def _sections(charts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the charts over steps under two headings."""
    off_policy = ("staleness", "staleness_histogram", "behave_kl", "ess", "clip", "grad_norm")
    return [
        {
            "id": "learning",
            "title": "Learning",
            "charts": [chart for chart in charts if chart["id"] not in off_policy],
        },
        {
            "id": "staleness",
            "title": "Off-policy data and the update",
            "charts": [chart for chart in charts if chart["id"] in off_policy],
        },
    ]


def _figures(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    texts = {fact.key: text for fact, (_, text) in zip(FACTS, fact_rows(facts))}
    return [(name, texts[key]) for key, name in _FIGURES.items() if facts[key] is not None]


def _table(
    id: str,
    title: str,
    rows: Sequence[Sequence[str]],
    head: Sequence[str] = (),
    folded: bool = False,
) -> dict[str, Any]:
    return {"id": id, "title": title, "rows": rows, "head": head, "folded": folded}


def _step_table(run: RunData) -> dict[str, Any]:
    """Return the table of the last steps, without columns that the run lacks."""
    shown = run.metrics[-_TABLE_STEPS:]
    keys = [key for key in _COLUMNS if any(m.get(key) is not None for m in shown)]
    rows = [["–" if m.get(key) is None else short(m[key]) for key in keys] for m in shown]
    title = f"Training steps: the last {len(shown)} of {len(run.metrics)}"
    return _table("steps", title, rows, [_COLUMNS[key] for key in keys], folded=True)


def _seconds(lanes: Mapping[str, Any]) -> str:
    width = lanes["seconds"] / lanes["bins"]
    return f"{width:.2g} seconds" if width < 100 else f"{duration(width)} minutes"


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

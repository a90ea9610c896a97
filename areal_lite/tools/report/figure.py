"""The report of a run as one picture, `<run_dir>/report.png`, as far as the run got.

It answers four questions: Does the run learn? How stale is its training data? How fast is it? How
did weight pushes meet single trajectories? README.md shows one.
"""

import io
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from areal_lite.run_dir.paths import REPORT_FILE
from areal_lite.system.files import write_atomically
from areal_lite.tools.report.charts import charts_of
from areal_lite.tools.report.run_data import RunData, read_run
from areal_lite.tools.report.summary import count_facts, headline
from areal_lite.tools.report.timeline import build_windows

_GREY = "#718096"
# Neighbors are far apart in hue, so that a change of version is visible.
_COLORS = ("#2b6cb0", "#dd7a1f", "#2f855a", "#c9366f", "#3f9fd0", "#a07010", "#7a52cc", "#62a83c")
_STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 12.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "text.parse_math": False,  # a name may have two dollars
}
# As many characters of 12.5 points fit on the page.
_HEADLINE_CHARACTERS = 165
_THROUGHPUT_BINS = 60
_TIMELINE_ROWS = 100
# Shares of the width that a label in the strip needs: "version 25", "v25".
_LONG_LABEL = 0.06
_SHORT_LABEL = 0.025


def write_report(run_dir: Path) -> Path:
    """Draw the run as far as it got, 1600 x 1200 pixels, and return the picture's path.

    Raises ValueError if `run_dir` has no run.
    """
    run = read_run(run_dir)
    picture = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(16, 12), dpi=100)
        _draw_page(figure, run)
        figure.savefig(picture)
    path = run_dir / REPORT_FILE
    write_atomically(path, picture.getvalue())
    return path


def _draw_page(figure: Figure, run: RunData) -> None:
    """Draw the title, the headline, three charts in a row, and the timeline below."""
    figure.text(0.05, 0.955, run.name, fontsize=18, fontweight="bold")
    text = headline(count_facts(run), run.steps_planned, run.ended)
    size = 12.5 * min(1.0, _HEADLINE_CHARACTERS / len(text))
    figure.text(0.05, 0.925, text, fontsize=size, color=_GREY)
    edges = {"left": 0.05, "right": 0.985, "top": 0.875, "bottom": 0.05}
    grid = figure.add_gridspec(2, 3, height_ratios=(1, 2.1), hspace=0.27, wspace=0.17, **edges)
    charts = charts_of(run, _THROUGHPUT_BINS)
    shown = [charts[id] for id in ("reward", "staleness", "throughput") if id in charts]
    for place, chart in enumerate(shown):
        draw_chart(figure.add_subplot(grid[0, place]), chart)
    _draw_timeline(figure.add_subplot(grid[1, :]), run)


def draw_chart(axes: Axes, chart: Mapping[str, Any]) -> None:
    """Draw a chart of lines (charts.py). A faint line has the color of the line after it."""
    axes.set(title=chart["title"], xlabel=chart["x"], ylabel=chart["y"])
    colors, faint, color = itertools.cycle(_COLORS), False, ""
    for one in chart["series"]:
        color = color if faint else next(colors)
        faint = one["style"] == "faint"
        style: dict[str, Any] = {"color": color, "label": one["name"], "linewidth": 2}
        if faint:
            style |= {"alpha": 0.3, "linewidth": 1, "label": None}
        elif one["style"] == "bound":
            style |= {"color": "#c53030", "linestyle": "--", "linewidth": 1.5}
        elif one["style"] == "points":
            style |= {"marker": "o", "linestyle": "", "markersize": 8}
            place = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center"}
            for x, y in zip(one["x"], one["y"]):
                axes.annotate(f"{y:.0%}", (x, y), color=color, fontsize=10, **place)
        elif len(one["x"]) < 4:
            style["marker"] = "o"  # a line through a single point is invisible
        axes.plot(one["x"], one["y"], **style)
    low = min([0.0, *(np.nanmin(one["y"]) for one in chart["series"] if len(one["y"]))])
    top = axes.get_ylim()[1]
    axes.set_ylim(low, top + 0.15 * (top - low))  # the legend is above the data
    axes.grid(axis="y", color="#e2e8f0")
    axes.set_axisbelow(True)
    corner = {"loc": "upper right", "bbox_to_anchor": (1.0, 1.01), "borderaxespad": 0}
    axes.legend(ncols=3, columnspacing=1.2, handlelength=1.5, **corner)


def _draw_timeline(axes: Axes, run: RunData) -> None:
    """Draw trajectories from the middle, and the pushes that interrupted them."""
    windows = build_windows(run.columns, run.metrics)
    title = "Trajectories, one bar each, colored by the weight version that sampled them"
    axes.set_title(title, pad=30)
    note = "black line and gap: a weight push pauses generation"
    axes.set_title(note, loc="right", pad=30, fontsize=11, fontweight="normal", color=_GREY)
    axes.spines["left"].set_visible(False)
    if not windows:
        axes.text(0.5, 0.5, "nothing yet", color=_GREY, transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
        return
    window = windows[len(windows) // 2]
    bars = window["bars"][:: 1 + len(window["bars"]) // _TIMELINE_ROWS]
    axes.set(xlabel=f"{window['name']}, seconds since the first trajectory", yticks=[])
    axes.set_xlim(window["start"], window["end"])
    axes.set_ylim(len(bars), -0.5)
    for row, bar in enumerate(bars):
        for version, start, end in bar["spans"]:
            span = [(start, end - start)]
            axes.broken_barh(span, (row + 0.1, 0.8), color=_color(version), linewidth=0)
    for _, start, end in window["pushes"]:
        # Cover the bars where no server samples. The line marks a pause shorter than a pixel, too.
        axes.axvspan(start, end, facecolor="#edf2f7", zorder=2.5)
        axes.axvline(start, color="black", linewidth=0.9, zorder=3)
    _label_versions(axes, window)


def _label_versions(axes: Axes, window: Mapping[str, Any]) -> None:
    """Draw a strip above the bars: the version that the servers have, in its color."""
    pushes, seconds = window["pushes"], window["end"] - window["start"]
    if not pushes:
        return
    starts = [(window["version"], window["start"]), *((v, end) for v, _, end in pushes)]
    ends = [*(start for _, start, _ in pushes), window["end"]]
    transform = axes.get_xaxis_transform()
    strip = {"transform": transform, "clip_on": False}
    style = {"ha": "center", "va": "center", "fontsize": 9, "color": "white", "weight": "bold"}
    for (version, start), end in zip(starts, ends, strict=True):
        width = end - start
        axes.broken_barh([(start, width)], (1.008, 0.026), color=_color(version), **strip)
        if width > _SHORT_LABEL * seconds:
            name = "version " if width > _LONG_LABEL * seconds else "v"
            axes.text((start + end) / 2, 1.02, f"{name}{version}", transform=transform, **style)


def _color(version: int) -> str:
    return _COLORS[version % len(_COLORS)]

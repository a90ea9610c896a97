"""The report of a run: one picture, `<run_dir>/report.png`.

The picture answers four questions: Does the run learn? How stale is its training data? How fast is
it? How did weight pushes meet single trajectories (timeline.py)? A run that is still going or was
killed can be drawn as well.
"""

import io
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from areal_lite.run_dir.paths import REPORT_FILE
from areal_lite.system.files import write_atomically
from areal_lite.tools.report.facts import known_values
from areal_lite.tools.report.lanes import tokens_per_s
from areal_lite.tools.report.measures import course, smooth, source_names
from areal_lite.tools.report.run_data import RunData, load_run
from areal_lite.tools.report.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    STYLE,
    add_grid_and_legend,
    show_empty,
)
from areal_lite.tools.report.text import duration, pause
from areal_lite.tools.report.timeline import draw_timeline

# As many characters of 12.5 points fit on the page.
_HEADLINE_CHARACTERS = 165
# Lines of data sources. More of them would hide each other.
_DASHES = ("--", ":", "-.")


def write_report(run_dir: Path) -> Path:
    """Draw the run as far as it got, 1600 x 1200 pixels, and return the picture's path.

    Raises ValueError when `run_dir` is not a directory.
    """
    run = load_run(run_dir)
    picture = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(16, 12), dpi=100)
        _draw_page(figure, run)
        figure.savefig(picture)
    path = run.run_dir / REPORT_FILE
    write_atomically(path, picture.getvalue())
    return path


def _draw_page(figure: Figure, run: RunData) -> None:
    """Draw the title, the headline, three plots in a row, and the timeline below."""
    figure.text(0.05, 0.955, run.name, fontsize=18, fontweight="bold")
    headline = _headline(run)
    size = 12.5 * min(1.0, _HEADLINE_CHARACTERS / len(headline))
    figure.text(0.05, 0.925, headline, fontsize=size, color=GREY)
    edges = {"left": 0.05, "right": 0.985, "top": 0.875, "bottom": 0.05}
    grid = figure.add_gridspec(2, 3, height_ratios=(1, 2.1), hspace=0.27, wspace=0.17, **edges)
    _draw_reward(figure.add_subplot(grid[0, 0]), run)
    _draw_staleness(figure.add_subplot(grid[0, 1]), run)
    _draw_throughput(figure.add_subplot(grid[0, 2]), run)
    draw_timeline(figure.add_subplot(grid[1, :]), run)


def _headline(run: RunData) -> str:
    facts = run.facts()
    parts = [
        f"{facts['steps']} training steps",
        f"{facts['trajectories']:,} trajectories trained on",
    ]
    if run.training_s > 0:
        parts.append(f"in {duration(run.training_s)}")
    if facts["interrupted"] is not None:
        parts.append(f"{facts['interrupted']:.0%} sampled from more than one weight version")
    if correct := known_values(run.metrics, "replay_distinct_correct"):
        parts.append(f"{correct[-1]:.1f} distinct correct completions per prompt in replay")
    if facts["pushes"]:
        mean, longest = pause(facts["pause_mean"]), pause(facts["pause_max"])
        parts.append(f"pause per weight push {mean} (longest {longest})")
    return "   ·   ".join(parts)


def _draw_reward(axes: Axes, run: RunData) -> None:
    """Plot the training reward and its running mean, and the held-out accuracies as points.

    The first data sources of several have a line each.
    """
    axes.set(title="Reward and held-out accuracy", xlabel="training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    steps = run.series("step")
    reward = run.series("reward_mean")
    axes.plot(steps, reward, color=BLUE, alpha=0.3, linewidth=1)
    trend = {"color": BLUE, "linewidth": 2, "marker": _marker(steps)}
    axes.plot(steps, smooth(reward), label="reward", **trend)
    for name, dashes in zip(source_names(run.metrics), _DASHES):
        x, y = course(run.metrics, f"reward_mean/{name}")
        axes.plot(x, smooth(y), color=BLUE, linestyle=dashes, linewidth=1.2, label=name)
    _draw_accuracy(axes, run.evals, "greedy", "sampled", marker="D", color=GREEN)
    _draw_accuracy(axes, run.evals, "sampled", "greedy", marker="o", color=ORANGE)
    axes.set_ylim(bottom=min([0.0, *reward]))
    if run.metrics or run.evals:
        add_grid_and_legend(axes)
    else:
        show_empty(axes)


def _draw_accuracy(
    axes: Axes, evals: list[dict[str, Any]], name: str, other: str, *, marker: str, color: str
) -> None:
    """Plot the accuracy `name` of each evaluation. The higher of the two has its label on top."""
    points = [e for e in evals if e.get(name) is not None]
    for point in points:
        y = point[name]
        y_other = point.get(other) or 0.0
        above = y > y_other or (y == y_other and name == "greedy")
        place = {"xytext": (0, 8 if above else -16), "textcoords": "offset points", "ha": "center"}
        font = {"color": color, "weight": "bold", "fontsize": 10}
        axes.annotate(f"{y:.0%}", (point["version"], y), **place, **font)
    if points:
        style = {"color": color, "markersize": 8, "markeredgecolor": "white"}
        xs = [point["version"] for point in points]
        ys = [point[name] for point in points]
        axes.plot(xs, ys, marker, label=name, clip_on=False, zorder=3, **style)


def _draw_staleness(axes: Axes, run: RunData) -> None:
    """Plot the mean and largest staleness of each step's tokens, and its bound, in steps."""
    axes.set(title="Staleness of the tokens trained on", xlabel="training step", ylabel="steps")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    steps = run.series("step")
    mean = run.series("staleness_mean")
    largest = run.series("staleness_max")
    axes.fill_between(steps, largest, step="mid", color=BLUE, alpha=0.13, linewidth=0)
    axes.step(steps, largest, where="mid", color=BLUE, alpha=0.55, linewidth=1.2, label="largest")
    axes.plot(steps, mean, color=BLUE, linewidth=2, marker=_marker(steps), label="mean")
    bound = run.staleness_bound
    if bound is not None:
        axes.axhline(bound, color=RED, linestyle="--", linewidth=1.5, label=f"bound ({bound})")
    axes.set_ylim(0, max([bound or 0, 1, *largest]) * 1.05)
    if run.metrics:
        add_grid_and_legend(axes)
    else:
        show_empty(axes)


def _draw_throughput(axes: Axes, run: RunData) -> None:
    """Plot the tokens per second that were generated, and those that were trained on."""
    axes.set(
        title="Throughput", xlabel="seconds since the first trajectory", ylabel="tokens per second"
    )
    origin = run.started_at
    if origin is None:
        show_empty(axes)
        return
    columns = run.columns
    last = float(columns.finished.max()) if len(columns) else origin + 1.0
    edges = np.linspace(origin, last, 61)
    generated = tokens_per_s(columns, edges)
    axes.stairs(generated, edges - origin, color=GREEN, linewidth=2, label="generated")
    if run.metrics:
        tokens = run.series("tokens")
        ends = run.series("logged_at") - origin
        took = np.diff(ends, prepend=0.0)
        per_step = tokens / np.maximum(took, 1e-3)
        axes.stairs(per_step, np.append(0.0, ends), color=BLUE, alpha=0.35)
        rate = smooth(tokens) / np.maximum(smooth(took), 1e-3)
        axes.plot(ends, rate, color=BLUE, linewidth=2, marker=_marker(ends), label="trained on")
    axes.set_ylim(bottom=0)
    add_grid_and_legend(axes)


def _marker(points: np.ndarray) -> str:
    """Mark the points of a short line: a line through a single point is invisible."""
    return "o" if len(points) < 4 else ""

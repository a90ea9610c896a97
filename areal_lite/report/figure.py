"""The report of a run: one picture, `<run_dir>/report.png`, and a table for the console.

The picture answers: does it learn, how stale is what it learns from, how fast is it, and what became of single trajectories while
weights were pushed under them. It can be drawn of a run that is still going or was killed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from areal_lite.report.progress import duration, short
from areal_lite.report.run_data import RunData, load_run
from areal_lite.report.summary import interrupted

_BLUE, _ORANGE, _RED, _GREEN, _GREY = "#2b6cb0", "#dd8a1f", "#c53030", "#2f855a", "#718096"
# Neighbours in this order are far apart in hue, so that a change of version is seen; every eighth version has the same colour.
_VERSION_COLOURS = (
    "#2b6cb0",
    "#dd7a1f",
    "#2f855a",
    "#c9366f",
    "#3f9fd0",
    "#a07010",
    "#7a52cc",
    "#62a83c",
)
_TIMELINE_ROWS = 90
_STYLE = {
    "font.size": 11,
    "axes.titlesize": 12.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "legend.frameon": False,
    "legend.fontsize": 10,
}

_HEADLINE_CHARACTERS = 165  # of 12.5 points fit on the page


def write_report(run_dir: Path) -> Path:
    """Draw the run as far as it got, 1600 x 1200 pixels. Raises ValueError when there is no such directory."""
    run = load_run(run_dir)
    path = run.run_dir / "report.png"
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(16, 12), dpi=100)
        grid = figure.add_gridspec(
            2,
            3,
            height_ratios=(1, 2.1),
            left=0.05,
            right=0.985,
            top=0.875,
            bottom=0.05,
            hspace=0.27,
            wspace=0.17,
        )
        figure.text(0.05, 0.955, run.run_dir.resolve().name, fontsize=18, fontweight="bold")
        headline = _headline(run)
        figure.text(
            0.05,
            0.925,
            headline,
            fontsize=12.5 * min(1.0, _HEADLINE_CHARACTERS / len(headline)),
            color=_GREY,
        )
        _draw_reward(figure.add_subplot(grid[0, 0]), run)
        _draw_staleness(figure.add_subplot(grid[0, 1]), run)
        _draw_throughput(figure.add_subplot(grid[0, 2]), run)
        _draw_timeline(figure.add_subplot(grid[1, :]), run)
        temporary = path.with_name(f".report.{os.getpid()}.png")
        figure.savefig(temporary)
    os.replace(temporary, path)
    return path


def _headline(run: RunData) -> str:
    parts = [f"{len(run.metrics)} training steps", f"{len(run.used):,} trajectories trained on"]
    if run.training_s > 0:
        parts.append(f"in {duration(run.training_s)}")
    if run.used:
        parts.append(
            f"{np.mean([interrupted(t) for t in run.used]):.0%} sampled from more than one weight version"
        )
    if correct := [
        m["replay_distinct_correct"] for m in run.metrics if "replay_distinct_correct" in m
    ]:
        parts.append(f"{correct[-1]:.1f} distinct correct completions per prompt in replay")
    if pauses := [pause_s for _, pause_s in run.pushes.values()]:
        parts.append(
            f"pause per weight push {_seconds(np.mean(pauses))} (longest {_seconds(max(pauses))})"
        )
    return "   ·   ".join(parts)


def _draw_reward(axes: Axes, run: RunData) -> None:
    axes.set(title="Reward and held-out accuracy", xlabel="training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    steps, reward = run.series("version"), run.series("reward_mean")
    axes.plot(steps, reward, color=_BLUE, alpha=0.3, linewidth=1)
    axes.plot(
        steps, _smooth(reward), color=_BLUE, linewidth=2, marker=_marker(steps), label="reward"
    )
    for name, marker, colour, other in (
        ("greedy", "D", _GREEN, "sampled"),
        ("sampled", "o", _ORANGE, "greedy"),
    ):
        points = [
            (e["version"], e[name], e.get(other) or 0.0)
            for e in run.evals
            if e.get(name) is not None
        ]
        for x, y, y_other in points:
            above = y > y_other or (y == y_other and name == "greedy")
            place = {
                "xytext": (0, 8 if above else -16),
                "textcoords": "offset points",
                "ha": "center",
            }
            axes.annotate(f"{y:.0%}", (x, y), **place, color=colour, weight="bold", fontsize=10)
        if points:
            xs, ys, _ = zip(*points)
            axes.plot(
                xs,
                ys,
                marker,
                color=colour,
                markersize=8,
                markeredgecolor="white",
                label=name,
                clip_on=False,
                zorder=3,
            )
    axes.set_ylim(bottom=min(0.0, *reward) if reward else 0.0)
    _finish(axes, bool(reward or run.evals))


def _draw_staleness(axes: Axes, run: RunData) -> None:
    axes.set(title="Staleness of the tokens trained on", xlabel="training step", ylabel="versions")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    steps, mean, largest = (
        run.series("version"),
        run.series("staleness_mean"),
        run.series("staleness_max"),
    )
    axes.fill_between(steps, largest, step="mid", color=_BLUE, alpha=0.13, linewidth=0)
    axes.step(steps, largest, where="mid", color=_BLUE, alpha=0.55, linewidth=1.2, label="largest")
    axes.plot(steps, mean, color=_BLUE, linewidth=2, marker=_marker(steps), label="mean")
    if run.staleness_bound is not None:
        axes.axhline(
            run.staleness_bound,
            color=_RED,
            linestyle="--",
            linewidth=1.5,
            label=f"bound ({run.staleness_bound})",
        )
    axes.set_ylim(0, max([run.staleness_bound or 0, 1, *largest]) * 1.05)
    _finish(axes, bool(steps))


def _draw_throughput(axes: Axes, run: RunData) -> None:
    axes.set(
        title="Throughput", xlabel="seconds since the first trajectory", ylabel="tokens per second"
    )
    origin = run.training_started_at
    if origin is not None:
        edges, generated = generation_rate(run.trajectories, origin)
        axes.stairs(generated, edges, color=_GREEN, linewidth=2, label="generated")
    if run.metrics:
        ends = np.array(run.series("logged_at")) - origin
        took = np.diff(ends, prepend=0.0)
        axes.stairs(
            np.array(run.series("tokens")) / np.maximum(took, 1e-3),
            np.append(0.0, ends),
            color=_BLUE,
            alpha=0.35,
        )
        rate = _smooth(run.series("tokens")) / np.maximum(_smooth(took), 1e-3)
        axes.plot(ends, rate, color=_BLUE, linewidth=2, marker=_marker(ends), label="trained on")
    axes.set_ylim(bottom=0)
    _finish(axes, origin is not None)


def generation_rate(
    trajectories: Sequence[dict[str, Any]], origin: float
) -> tuple[np.ndarray, np.ndarray]:
    """Edges (seconds after `origin`) of equal bins over the whole run, and the tokens per second sampled in each.

    A trajectory's tokens are spread evenly over its life, so the sum of rate x width over the bins is the number of tokens."""
    starts = np.array([t["started_at"] for t in trajectories]) - origin
    ends = np.array([t["finished_at"] for t in trajectories]) - origin
    sampled = np.array([t["sampled"] for t in trajectories], np.float64)
    edges = np.linspace(0.0, max(ends, default=1.0), 61)
    life = np.maximum(ends - starts, 1e-6)
    done = np.array([(sampled * np.clip((edge - starts) / life, 0, 1)).sum() for edge in edges])
    return edges, np.diff(done) / np.diff(edges)


def _draw_timeline(axes: Axes, run: RunData) -> None:
    axes.set(xlabel="seconds since the first trajectory", yticks=[])
    chosen = middle(run, _TIMELINE_ROWS)
    title = f"{len(chosen)} trajectories from the middle of the run: one bar each, coloured by the weight version that sampled it"
    note = "black line and gap: a weight push pauses generation"
    axes.set_title(title, pad=30)
    axes.set_title(note, loc="right", pad=30, fontsize=11, fontweight="normal", color=_GREY)
    axes.spines["left"].set_visible(False)
    if not chosen:
        _finish(axes, False)
        return
    origin = run.training_started_at
    left, right = (
        chosen[0]["started_at"] - origin,
        np.quantile([t["finished_at"] for t in chosen], 0.97) - origin,
    )
    margin = 0.01 * (right - left)
    axes.set_xlim(left - margin, right + margin)
    axes.set_ylim(len(chosen), -0.5)
    for row, trajectory in enumerate(chosen):
        for version, start, end in segment_spans(trajectory, run.pushes):
            axes.broken_barh(
                [(start - origin, end - start)],
                (row + 0.1, 0.8),
                color=_colour(version),
                linewidth=0,
            )
    pushes = {
        version: (at - origin, at - origin + pause_s)
        for version, (at, pause_s) in run.pushes.items()
    }
    shown = {
        version: span
        for version, span in pushes.items()
        if left - margin <= span[0] <= right + margin
    }
    for start, end in shown.values():
        # White over the bars: nobody samples here. The line stays visible where the pause is too short for a pixel.
        axes.axvspan(start, end, facecolor="#edf2f7", zorder=2.5)
        axes.axvline(start, color="black", linewidth=0.9, zorder=3)
    _label_versions(axes, shown, left - margin, right + margin)


def _label_versions(
    axes: Axes, shown: dict[int, tuple[float, float]], left: float, right: float
) -> None:
    """A strip above the bars: which version the servers have when, in its colour."""
    if not shown:
        return
    versions = sorted(shown)
    edges = [(versions[0] - 1, left)] + [(v, shown[v][1]) for v in versions]
    ends = [shown[v][0] for v in versions] + [right]
    transform = axes.get_xaxis_transform()
    for (version, start), end in zip(edges, ends):
        axes.broken_barh(
            [(start, end - start)],
            (1.008, 0.026),
            color=_colour(version),
            transform=transform,
            clip_on=False,
        )
        if end - start > 0.025 * (right - left):
            label = f"version {version}" if end - start > 0.06 * (right - left) else f"v{version}"
            style = {
                "ha": "center",
                "va": "center",
                "fontsize": 9,
                "color": "white",
                "weight": "bold",
            }
            axes.text((start + end) / 2, 1.02, label, transform=transform, **style)


def middle(run: RunData, count: int) -> list[dict[str, Any]]:
    """`count` trajectories from the middle of the run, in the order of their beginning: evenly spaced among those of four pushes if these
    are more, else all that began one after the other."""
    ordered = sorted(
        run.trajectories, key=lambda t: (t["started_at"], t["group_id"], t["sample_index"])
    )
    span = min(len(ordered), max(count, 4 * len(ordered) // max(1, len(run.pushes))))
    first = (len(ordered) - span) // 2
    return [ordered[first + i * span // count] for i in range(count)] if span >= count else ordered


def segment_spans(
    trajectory: dict[str, Any], pushes: dict[int, tuple[float, float]]
) -> list[tuple[int, float, float]]:
    """(version, start, end) in wall-clock seconds, one for each weight version of the trajectory, contiguous over its life.

    Version v begins when the pause of its push begins; if that push is unknown, where its share of the sampled tokens puts it.
    """
    first, last = trajectory["started_at"], trajectory["finished_at"]
    tokens: dict[int, int] = {}
    for version, start, end in trajectory["segments"]:
        tokens[version] = tokens.get(version, 0) + end - start
    spans, before, begin = [], 0, first
    for index, version in enumerate(tokens):
        if index:
            at = (
                pushes[version][0]
                if version in pushes
                else first + (last - first) * before / trajectory["sampled"]
            )
            at = min(max(at, begin), last)
            spans[-1] = (spans[-1][0], spans[-1][1], at)
            begin = at
        spans.append((version, begin, last))
        before += tokens[version]
    return spans


def _colour(version: int) -> str:
    return _VERSION_COLOURS[version % len(_VERSION_COLOURS)]


def _marker(points: Sequence[float]) -> str:
    """A line through one point cannot be seen."""
    return "o" if len(points) < 4 else ""


def _smooth(values: Sequence[float], window: int = 7) -> np.ndarray:
    """Centred running mean that ignores NaN."""
    values, half = np.asarray(values, np.float64), window // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return np.array([w[~np.isnan(w)].mean() if (~np.isnan(w)).any() else np.nan for w in windows])


def _finish(axes: Axes, has_data: bool) -> None:
    if not has_data:
        axes.text(
            0.5,
            0.5,
            "nothing yet",
            transform=axes.transAxes,
            ha="center",
            va="center",
            color=_GREY,
            fontsize=14,
        )
        axes.set(xticks=[], yticks=[])
        return
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + 0.15 * (top - bottom))  # room for the legend
    axes.grid(axis="y", color="#e2e8f0")
    axes.set_axisbelow(True)
    axes.legend(
        loc="upper right",
        ncols=3,
        bbox_to_anchor=(1.0, 1.01),
        borderaxespad=0,
        columnspacing=1.2,
        handlelength=1.5,
    )


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def summary_table(summary: dict[str, Any]) -> Table:
    """What a person wants to know at the end of a run. Unknown values are shown as a dash."""

    def show(key: str, form: Callable[[Any], str] = str) -> str:
        return "–" if summary.get(key) is None else form(summary[key])

    percent = "{:.1%}".format
    rows = [
        (
            "held-out accuracy, greedy",
            f"{show('greedy_before', percent)} → {show('greedy_after', percent)}",
        ),
        (
            "held-out accuracy, sampled",
            f"{show('sampled_before', percent)} → {show('sampled_after', percent)}",
        ),
        ("held-out problems", show("eval_problems")),
        ("training steps", f"{show('steps')} of {show('steps_planned')}"),
        (
            "trained on",
            f"{show('tokens_per_s', short)} tokens/s, {show('trajectories_per_s', short)} trajectories/s",
        ),
        (
            "staleness",
            f"mean {show('staleness_mean', short)}, largest {show('max_staleness', short)}, bound {show('staleness_bound')}",
        ),
        ("trajectories of more than one version", show("multi_segment_share", percent)),
        ("weight pushes", show("pushes")),
        (
            "pause per push",
            f"mean {show('pause_s_mean', _seconds)}, longest {show('pause_s_max', _seconds)}",
        ),
        ("requests drained for a push", show("requests_drained")),
        ("trajectories lost", show("trajectories_lost")),
        ("wall time", show("wall_s", duration)),
    ]
    table = Table(title="Summary of the run", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table

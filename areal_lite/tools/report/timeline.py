"""The timeline of the report: one bar per trajectory, colored by weight version.

| version 25 | version 26   | version 27 |    strip: the version that the servers have
████████████ ░░░░░░░                         a trajectory that one push interrupted
             ░░░░░░░░░░░░░░ ▒▒▒▒▒
"""

import numpy as np
from matplotlib.axes import Axes

from areal_lite.tools.report.columns import Columns
from areal_lite.tools.report.run_data import RunData
from areal_lite.tools.report.style import GREY, show_empty
from areal_lite.tools.report.windows import Pauses, segment_spans

_ROWS = 90
# Neighbors are far apart in hue, so that a change of version is visible. The cycle is eight long.
_VERSION_COLORS = (
    "#2b6cb0",
    "#dd7a1f",
    "#2f855a",
    "#c9366f",
    "#3f9fd0",
    "#a07010",
    "#7a52cc",
    "#62a83c",
)
# Shares of the width that a label in the strip needs: "version 25", "v25".
_LONG_LABEL = 0.06
_SHORT_LABEL = 0.025


def draw_timeline(axes: Axes, run: RunData) -> None:
    """Draw trajectories from the middle of the run, and the pushes that interrupted them."""
    columns, origin, paused = run.columns, run.started_at, run.pushes
    chosen = middle_trajectories(columns, len(paused), _ROWS)
    axes.set(xlabel="seconds since the first trajectory", yticks=[])
    title = (
        f"{len(chosen)} trajectories from the middle of the run: "
        "one bar each, colored by the weight version that sampled it"
    )
    note = "black line and gap: a weight push pauses generation"
    axes.set_title(title, pad=30)
    axes.set_title(note, loc="right", pad=30, fontsize=11, fontweight="normal", color=GREY)
    axes.spines["left"].set_visible(False)
    if not len(chosen) or origin is None:
        show_empty(axes)
        return
    first = float(columns.started[chosen[0]]) - origin
    # A few long trajectories would squeeze all others.
    last = float(np.quantile(columns.finished[chosen], 0.97)) - origin
    margin = 0.01 * (last - first)
    left = first - margin
    right = last + margin
    axes.set_xlim(left, right)
    axes.set_ylim(len(chosen), -0.5)
    for row, index in enumerate(chosen.tolist()):
        started, finished = float(columns.started[index]), float(columns.finished[index])
        for version, start, end in segment_spans(
            started, finished, columns.segments(index), paused
        ):
            bar = [(start - origin, end - start)]
            axes.broken_barh(bar, (row + 0.1, 0.8), color=_color(version), linewidth=0)
    pauses = {v: (at - origin, at - origin + pause_s) for v, (at, pause_s) in paused.items()}
    visible = {v: span for v, span in pauses.items() if left <= span[0] <= right}
    _draw_pauses(axes, visible)
    before = max((v for v, span in pauses.items() if span[0] < left), default=0)
    _label_versions(axes, visible, before, left, right)


def _draw_pauses(axes: Axes, pauses: Pauses) -> None:
    """Cover the bars where no server samples. The line marks pauses shorter than a pixel, too."""
    for start, end in pauses.values():
        axes.axvspan(start, end, facecolor="#edf2f7", zorder=2.5)
        axes.axvline(start, color="black", linewidth=0.9, zorder=3)


def _label_versions(axes: Axes, pauses: Pauses, before: int, left: float, right: float) -> None:
    """Draw a strip above the bars: the version that the servers have, in its color.

    `before` is the version before the first of `pauses`.
    """
    if not pauses:
        return
    versions = sorted(pauses)
    starts = [(before, left), *((v, pauses[v][1]) for v in versions)]
    ends = [*(pauses[v][0] for v in versions), right]
    transform = axes.get_xaxis_transform()
    strip = {"transform": transform, "clip_on": False}
    style = {"ha": "center", "va": "center", "fontsize": 9, "color": "white", "weight": "bold"}
    for (version, start), end in zip(starts, ends, strict=True):
        width = end - start
        axes.broken_barh([(start, width)], (1.008, 0.026), color=_color(version), **strip)
        if width > _SHORT_LABEL * (right - left):
            name = "version " if width > _LONG_LABEL * (right - left) else "v"
            axes.text((start + end) / 2, 1.02, f"{name}{version}", transform=transform, **style)


def middle_trajectories(columns: Columns, pushes: int, count: int) -> np.ndarray:
    """Choose up to `count` trajectories from the middle of a run with so many pushes: int64.

    They are ordered by their start. If more than `count` trajectories started during four pushes,
    the choice is evenly spaced among those. Otherwise it is `count` trajectories that started one
    after the other.
    """
    ordered = np.argsort(columns.started, kind="stable")
    span = min(len(ordered), max(count, 4 * len(ordered) // max(1, pushes)))
    first = (len(ordered) - span) // 2
    return ordered[first + np.arange(count) * span // count] if span >= count else ordered


def _color(version: int) -> str:
    return _VERSION_COLORS[version % len(_VERSION_COLORS)]

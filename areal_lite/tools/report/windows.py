"""The timeline: requests as bars on the lanes of their servers, in a few windows of the run."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_lite.tools.report.columns import Columns
from areal_lite.tools.report.measures import trainer_spans
from areal_lite.trajectory import trace_name

Pauses = dict[int, tuple[float, float]]
"""By version, the wall-clock start of the pause of its push, and its seconds."""

# Bars and pushes of a window, at most.
BARS = 160
_PUSHES = 4


def build_windows(columns: Columns, metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return windows at the start, the middle and the end of the run, each of a few pushes.

    A short run is one window. Times are seconds since the first trajectory.
    """
    if not len(columns):
        return []
    origin = float(columns.started.min())
    paused = pushes_of(metrics)
    return [
        {
            "name": name,
            "start": start - origin,
            "end": end - origin,
            "pushes": [
                [version, at - origin, at + pause - origin]
                for version, (at, pause) in paused.items()
                if start <= at <= end
            ],
            "steps": _steps(metrics, start, end, origin),
            **_bars(columns, paused, start, end, origin),
        }
        for name, start, end in _spans(columns, sorted(paused.values()))
    ]


def pushes_of(metrics: Sequence[Mapping[str, Any]]) -> Pauses:
    """Return the pauses of the pushes whose end was logged."""
    lines = [m for m in metrics if m.get("paused_at") and m.get("pause_s") is not None]
    return {m["version"]: (m["paused_at"], m["pause_s"]) for m in lines}


def _spans(columns: Columns, paused: list[tuple[float, float]]) -> list[tuple[str, float, float]]:
    """Return name, start and end of each window."""
    first, last = float(columns.started.min()), float(columns.finished.max())
    times = [at for at, _ in paused if first < at < last]
    if len(times) <= 2 * _PUSHES:
        return [("the whole run", first, last)]
    middle = (len(times) - _PUSHES) // 2
    # A window reaches half a step beyond its outer pushes.
    half = (times[middle + _PUSHES - 1] - times[middle]) / (_PUSHES - 1) / 2
    return [
        ("the start", first, times[_PUSHES - 1] + half),
        ("the middle", times[middle] - half, times[middle + _PUSHES - 1] + half),
        ("the end", times[-_PUSHES] - half, last),
    ]


def _steps(
    metrics: Sequence[Mapping[str, Any]], start: float, end: float, origin: float
) -> list[list[Any]]:
    """Return [step, start, end] of the training of each step that the window shows."""
    spans = zip(metrics, *trainer_spans(metrics)["trains"]) if metrics else ()
    return [
        [m["step"], float(begin) - origin, float(stop) - origin]
        for m, begin, stop in spans
        if begin < end and stop > start
    ]


def _bars(
    columns: Columns, paused: Pauses, start: float, end: float, origin: float
) -> dict[str, Any]:
    """Return the bars of a window, evenly thinned to BARS, and the number there would be."""
    inside = np.flatnonzero((columns.started < end) & (columns.finished > start))
    inside = inside[np.argsort(columns.started[inside], kind="stable")]
    chosen = inside[np.linspace(0, len(inside) - 1, min(BARS, len(inside))).astype(int)]
    rows = pack(
        columns.server[chosen].tolist(),
        columns.started[chosen].tolist(),
        columns.finished[chosen].tolist(),
    )
    bars = []
    for index, row in zip(chosen.tolist(), rows):
        started, finished = float(columns.started[index]), float(columns.finished[index])
        spans = segment_spans(started, finished, columns.segments(index), paused)
        bars.append(
            {
                "server": columns.servers[columns.server[index]] or "servers",
                "row": row,
                "group": int(columns.group[index]),
                "sample": trace_name(int(columns.sample[index]), int(columns.trace[index])),
                "reward": float(columns.reward[index]),
                "tokens": int(columns.sampled[index]),
                "step": int(columns.step[index]) + 1,
                "spans": [[v, s - origin, e - origin] for v, s, e in spans],
            }
        )
    return {"bars": bars, "total": len(inside)}


def segment_spans(
    started: float, finished: float, segments: Sequence[tuple[int, int]], pushes: Pauses
) -> list[tuple[int, float, float]]:
    """Return (version, start, end) for each weight version of a trajectory.

    The spans cover the time from `started` to `finished` without a gap. Version v starts with the
    pause of its push. If that push is unknown, it starts where the version's share of the sampled
    tokens puts it. Times are wall-clock seconds.

    Args:
        started, finished: the start and the end of the trajectory.
        segments: (version, tokens) of each segment.
        pushes: the known pauses.
    """
    tokens: Counter[int] = Counter()
    for version, count in segments:
        tokens[version] += count
    spans: list[tuple[int, float, float]] = []
    earlier_tokens = 0
    begin = started
    for version, count in tokens.items():
        if spans:
            share = earlier_tokens / tokens.total()
            at = pushes[version][0] if version in pushes else started + (finished - started) * share
            at = min(max(at, begin), finished)
            spans[-1] = (*spans[-1][:2], at)
            begin = at
        spans.append((version, begin, finished))
        earlier_tokens += count
    return spans


def pack(lanes: Sequence[Any], starts: Sequence[float], ends: Sequence[float]) -> list[int]:
    """Give each span the lowest row of its lane that is free; spans come in order of start."""
    free: dict[Any, list[int]] = {}
    busy: dict[Any, list[tuple[float, int]]] = {}
    rows = []
    for lane, start, end in zip(lanes, starts, ends):
        spare, taken = free.setdefault(lane, []), busy.setdefault(lane, [])
        while taken and taken[0][0] <= start:
            heapq.heappush(spare, heapq.heappop(taken)[1])
        row = heapq.heappop(spare) if spare else len(taken)
        heapq.heappush(taken, (end, row))
        rows.append(row)
    return rows

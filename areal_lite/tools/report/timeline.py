"""When each part of a run did what: spans of time, rates, windows of requests.

Pure functions of the trajectories and of the lines of metrics.jsonl. Times are wall-clock seconds
unless a docstring says otherwise.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from areal_lite.tools.report.run_data import Columns, Metrics

Spans = tuple[np.ndarray, np.ndarray]
"""Starts and ends of spans of time, float64 [k] each."""

Pauses = dict[int, tuple[float, float]]
"""By version, the start of the pause of its push, and its seconds."""

# Bars and pushes of a window, at most.
BARS = 160
_PUSHES = 4


def mean_open(
    starts: np.ndarray, ends: np.ndarray, edges: np.ndarray, weights: Any = 1.0
) -> np.ndarray:
    """Return the mean weight of the spans that are open in each bin, float64 [len(edges) - 1].

    It is the difference, over the bin, of the weighted seconds that spans have lasted.
    """
    weights = np.broadcast_to(np.asarray(weights, np.float64), starts.shape)
    at = edges - edges[0]  # small numbers keep the sums exact
    times = np.concatenate((edges[:1], starts, ends)) - edges[0]
    order = np.argsort(times, kind="stable")
    open_weight = np.cumsum(np.concatenate(([0.0], weights, -weights))[order])
    lasted = np.concatenate(([0.0], np.cumsum(open_weight[:-1] * np.diff(times[order]))))
    return np.diff(np.interp(at, times[order], lasted)) / np.diff(edges)


def pushes_of(metrics: Metrics) -> Pauses:
    """Return the pauses of the pushes whose end was logged."""
    lines = [m for m in metrics if m.get("paused_at") and m.get("pause_s") is not None]
    return {m["version"]: (m["paused_at"], m["pause_s"]) for m in lines}


def trainer_spans(metrics: Metrics) -> dict[str, Spans]:
    """Return when the trainer waited for a batch, trained and pushed, from the ends of its steps.

    A step that lacks one of its times counts as zero seconds of it.
    """
    end = np.array([m["logged_at"] for m in metrics], np.float64)
    spans: dict[str, Spans] = {}
    parts = {"pushes weights": "push_s", "trains": "train_s", "waits for a batch": "wait_s"}
    for name, key in parts.items():
        start = end - np.array([m.get(key) or 0.0 for m in metrics], np.float64)
        spans[name] = (start, end)
        end = start
    return dict(reversed(spans.items()))


def downtime_s(metrics: Metrics) -> float:
    """Return the seconds between the starts of a run that was resumed.

    They belong to no step: a step is logged its own seconds after the one before it.
    """
    pairs = itertools.pairwise(metrics)
    gaps = (b["logged_at"] - a["logged_at"] - (b.get("time_s") or 0.0) for a, b in pairs)
    return sum(max(gap, 0.0) for gap in gaps)


def time_edges(columns: Columns, metrics: Metrics, bins: int) -> np.ndarray | None:
    """Return the edges of equal bins over the run; None before it."""
    if len(columns):
        begin, end = float(columns.started.min()), float(columns.finished.max())
    elif metrics:
        begin = end = float(trainer_spans(metrics)["waits for a batch"][0][0])
    else:
        return None
    if metrics:
        end = max(end, metrics[-1]["logged_at"])
    return np.linspace(begin, end, bins + 1) if end > begin else None


def requests_open(columns: Columns, edges: np.ndarray) -> dict[str, np.ndarray]:
    """Return the mean number of trajectories in flight on each server, float64 [bins]."""
    starts, ends = columns.started, columns.finished
    servers = ((name, columns.server == i) for i, name in enumerate(columns.servers))
    return {name: mean_open(starts[own], ends[own], edges) for name, own in servers}


def tokens_per_s(columns: Columns, edges: np.ndarray) -> np.ndarray:
    """Return the tokens per second that were sampled in each bin, float64 [len(edges) - 1].

    A trajectory's tokens are spread evenly over its life, so the sum of rate x width over bins that
    cover the run is the number of tokens.
    """
    life = np.maximum(columns.finished - columns.started, 1e-6)
    return mean_open(columns.started, columns.started + life, edges, columns.sampled / life)


def build_windows(columns: Columns, metrics: Metrics) -> list[dict[str, Any]]:
    """Return windows at the start, the middle and the end of the run, each of a few pushes.

    A short run is one window. Times are seconds since the first trajectory.
    """
    if not len(columns):
        return []
    origin = float(columns.started.min())
    columns = replace(columns, started=columns.started - origin, finished=columns.finished - origin)
    paused = {v: (at - origin, s) for v, (at, s) in pushes_of(metrics).items()}
    spans = ((times - origin).tolist() for times in trainer_spans(metrics)["trains"])
    steps = list(zip((line["step"] for line in metrics), *spans))
    return [
        {
            "name": name,
            "start": start,
            "end": end,
            "version": max((v for v, (at, _) in paused.items() if at <= start), default=0),
            "pushes": [[v, at, at + s] for v, (at, s) in paused.items() if start < at < end],
            "steps": [[n, begin, stop] for n, begin, stop in steps if begin < end and stop > start],
            **_bars(columns, paused, start, end),
        }
        for name, start, end in _window_spans(columns, paused)
    ]


def _window_spans(columns: Columns, paused: Pauses) -> list[tuple[str, float, float]]:
    """Return name, start and end of each window."""
    first, last = float(columns.started.min()), float(columns.finished.max())
    times = sorted(at for at, _ in paused.values() if first < at < last)
    if len(times) <= 2 * _PUSHES:
        return [("the whole run", first, last)]
    edges, end = [first, *times, last], len(times) - _PUSHES
    # A window reaches to the pushes before and after its own.
    places = ("the start", 0), ("the middle", end // 2), ("the end", end)
    return [(name, edges[push], edges[push + _PUSHES + 1]) for name, push in places]


def _bars(columns: Columns, paused: Pauses, start: float, end: float) -> dict[str, Any]:
    """Return the bars of a window, evenly thinned to BARS, and the number there would be."""
    inside = np.flatnonzero((columns.started < end) & (columns.finished > start))
    inside = inside[np.argsort(columns.started[inside], kind="stable")]
    chosen = inside[np.linspace(0, len(inside) - 1, min(BARS, len(inside))).astype(int)]
    begins, stops = columns.started[chosen].tolist(), columns.finished[chosen].tolist()
    rows = pack(columns.server[chosen].tolist(), begins, stops)
    bars = [
        {
            "server": columns.servers[columns.server[index]],
            "row": row,
            "group": int(columns.group[index]),
            "sample": columns.name(index),
            "reward": float(columns.reward[index]),
            "tokens": int(columns.sampled[index]),
            "step": int(columns.step[index]) + 1,
            "spans": segment_spans(started, finished, columns.segments(index), paused),
        }
        for index, row, started, finished in zip(chosen.tolist(), rows, begins, stops)
    ]
    return {"bars": bars, "total": len(inside)}


def segment_spans(
    started: float, finished: float, segments: Sequence[tuple[int, int]], pushes: Pauses
) -> list[tuple[int, float, float]]:
    """Return (version, start, end) for each weight version of a trajectory.

    The spans cover the time from `started` to `finished` without a gap. Version v starts with the
    pause of its push. If that push is unknown, it starts where the version's share of the sampled
    tokens puts it. `segments` are (version, tokens).
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
            begin = min(max(at, begin), finished)
            spans[-1] = (*spans[-1][:2], begin)
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

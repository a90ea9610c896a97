"""Counts and times of a run as arrays: what its charts show. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_lite.tools.report.columns import Columns

Spans = tuple[np.ndarray, np.ndarray]
"""Starts and ends of spans of time, float64 [k] each, in wall-clock seconds."""


def staleness_tokens(columns: Columns) -> np.ndarray:
    """Count the sampled tokens in used trajectories by staleness: int64, index is versions."""
    step = columns.step[columns.owner]
    used = step >= 0
    staleness = np.maximum(step - columns.version, 0)[used]
    return np.bincount(staleness, columns.length[used]).astype(np.int64)


def histogram(values: np.ndarray, bins: int = 30) -> tuple[np.ndarray, np.ndarray]:
    """Return int64 edges [b + 1] of equal width and counts [b] of whole numbers, b <= `bins`.

    A bin holds the values from its edge to just before the next one.
    """
    if not len(values):
        return np.array([0, 1]), np.array([0])
    low, high = int(values.min()), int(values.max())
    width = -(-(high - low + 1) // bins)
    count = -(-(high - low + 1) // width)
    edges = low + width * np.arange(count + 1)
    return edges, np.bincount((values - low) // width, minlength=count)


def smooth(values: Sequence[float] | np.ndarray, window: int = 7) -> np.ndarray:
    """Return the centered running mean, float64 of the same length.

    The ends have fewer values. NaN is ignored, and is the mean where nothing else is.
    """
    series = np.asarray(values, np.float64)
    known = ~np.isnan(series)
    total = np.concatenate(([0.0], np.cumsum(np.where(known, series, 0.0))))
    count = np.concatenate(([0], np.cumsum(known)))
    index, half = np.arange(len(series)), window // 2
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(series))
    with np.errstate(invalid="ignore"):
        return (total[high] - total[low]) / (count[high] - count[low])


def course(metrics: Sequence[Mapping[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps that know the metric `key`, and its values there: float64 [n] each."""
    known = [(row["step"], row[key]) for row in metrics if row.get(key) is not None]
    steps, values = np.array(known, np.float64).reshape(-1, 2).T
    return steps, values


def source_names(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the data sources; none if a run has a single one."""
    prefix = "reward_mean/"
    keys = dict.fromkeys(key for row in metrics for key in row if key.startswith(prefix))
    return [key.removeprefix(prefix) for key in keys]


def exposure(starts: np.ndarray, ends: np.ndarray, weights: Any, at: np.ndarray) -> np.ndarray:
    """Return the weighted seconds that spans have lasted before each time in `at`, float64.

    The difference over two times, divided by the seconds between them, is the mean number of spans
    that are open (weights 1), or a rate (weights per second).
    """
    weights = np.broadcast_to(np.asarray(weights, np.float64), starts.shape)

    def ramps(corners: np.ndarray) -> np.ndarray:
        """Sum weight x seconds since the corner, over the corners that have passed."""
        order = np.argsort(corners, kind="stable")
        corners, w = corners[order], weights[order]
        passed = np.searchsorted(corners, at)
        total = np.concatenate(([0.0], np.cumsum(w)))
        moment = np.concatenate(([0.0], np.cumsum(w * corners)))
        return at * total[passed] - moment[passed]

    return ramps(starts) - ramps(ends)


def mean_open(
    starts: np.ndarray, ends: np.ndarray, edges: np.ndarray, weights: Any = 1.0
) -> np.ndarray:
    """Return the mean weight of the spans that are open in each bin, float64 [len(edges) - 1]."""
    origin = edges[0]  # small numbers keep the sums exact
    seconds = exposure(starts - origin, ends - origin, weights, edges - origin)
    return np.diff(seconds) / np.diff(edges)


def merge(starts: np.ndarray, ends: np.ndarray) -> Spans:
    """Return the union of spans as disjoint spans in order, without empty ones."""
    some = ends > starts
    starts, ends = starts[some], ends[some]
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    opens = np.concatenate(([True], starts[1:] > reach[:-1]))
    closes = np.concatenate((opens[1:], [True]))
    return starts[opens], reach[closes]


def covered(spans: Spans, edges: np.ndarray) -> np.ndarray:
    """Return the share of each bin that disjoint spans cover, float64 [len(edges) - 1]."""
    return mean_open(*spans, edges) if len(spans[0]) else np.zeros(len(edges) - 1)


def pauses(metrics: Sequence[Mapping[str, Any]]) -> Spans:
    """Return the spans in which a push paused generation."""
    found = [(m["paused_at"], m["pause_s"]) for m in metrics if m.get("paused_at")]
    known = [(at, at + pause) for at, pause in found if pause is not None]
    starts, ends = np.array(known, np.float64).reshape(-1, 2).T
    return starts, ends


def trainer_spans(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Spans]:
    """Return when the trainer waited for a batch, trained and pushed, from the ends of its steps.

    A step that lacks one of its times counts as zero seconds of it.
    """
    end = np.array([m["logged_at"] for m in metrics], np.float64)
    spans: dict[str, Spans] = {}
    for name, key in (
        ("pushes weights", "push_s"),
        ("trains", "train_s"),
        ("waits for a batch", "wait_s"),
    ):
        start = end - np.array([m.get(key) or 0.0 for m in metrics], np.float64)
        spans[name] = (start, end)
        end = start
    return dict(reversed(spans.items()))


def downtime_s(metrics: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds between the starts of a run that was resumed.

    They belong to no step: a step is logged its own seconds after the one before it.
    """
    pairs = itertools.pairwise(metrics)
    gaps = (b["logged_at"] - a["logged_at"] - (b.get("time_s") or 0.0) for a, b in pairs)
    return sum(max(gap, 0.0) for gap in gaps)


def batch_times(metrics: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return the time at which each step, from 0, got its batch."""
    starts = trainer_spans(metrics)["trains"][0]
    return {m["step"] - 1: float(at) for m, at in zip(metrics, starts)}


def queue_spans(
    columns: Columns, metrics: Sequence[Mapping[str, Any]], batch: int, end: float
) -> dict[str, Spans]:
    """Return when a whole batch was queued, and when the controller lacked groups for one.

    A group is queued from its end until the trainer takes its batch, or until `end`.

    Args:
        columns: the store.
        metrics: the training steps.
        batch: groups of a batch.
        end: wall-clock seconds.
    """
    groups = columns.groups
    taken = batch_times(metrics)
    queued = (groups["state"] == "used") | (groups["state"] == "finished")
    joins = groups["finished"][queued]
    leaves = np.array([taken.get(step, end) for step in groups["step"][queued].tolist()])
    # A clock of another process may say that a group left before it came.
    times = np.concatenate((joins, np.maximum(joins, leaves)))
    order = np.argsort(times, kind="stable")
    depth = np.cumsum(np.repeat([1, -1], [len(joins), len(joins)])[order])
    times = times[order]
    ready = depth >= batch
    until = np.append(times[1:], end)
    begin = float(groups["admitted"].min()) if len(groups["admitted"]) else end
    lacks = np.concatenate(([begin], times[~ready])), np.concatenate((times[:1], until[~ready]))
    if not len(times):
        lacks = (np.array([begin]), np.array([end]))
    return {
        "a batch waits for the trainer": merge(times[ready], until[ready]),
        "waits for trajectories": merge(*lacks),
    }

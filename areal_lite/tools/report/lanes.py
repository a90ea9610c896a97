"""The activity of trainer, controller and each server, as shares of equal bins of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_lite.tools.report.columns import Columns
from areal_lite.tools.report.measures import (
    Spans,
    covered,
    mean_open,
    merge,
    pauses,
    queue_spans,
    trainer_spans,
)

BINS = 240


def time_edges(columns: Columns, metrics: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
    """Return the edges of BINS equal bins over the run, wall-clock seconds; None before it."""
    if len(columns):
        begin, end = float(columns.started.min()), float(columns.finished.max())
    elif metrics:
        begin = end = float(trainer_spans(metrics)["waits for a batch"][0][0])
    else:
        return None
    if metrics:
        end = max(end, metrics[-1]["logged_at"])
    return np.linspace(begin, end, BINS + 1) if end > begin else None


def build_lanes(
    columns: Columns, metrics: Sequence[Mapping[str, Any]], batch: int, edges: np.ndarray
) -> list[dict[str, Any]]:
    """Return the lanes: name, and by state the share of each bin, float64 [BINS].

    Shares of a lane sum to 1. `batch` is the number of groups of a batch.
    """
    trainer = {name: covered(spans, edges) for name, spans in trainer_spans(metrics).items()}
    queue = queue_spans(columns, metrics, batch, float(edges[-1]))
    controller = {name: covered(spans, edges) for name, spans in queue.items()}
    lanes = [_lane("trainer", trainer, "does something else")]
    lanes += [
        _lane(name or "servers", _server(columns, index, pauses(metrics), edges), "waits for work")
        for index, name in enumerate(columns.servers)
    ]
    return [*lanes, _lane("controller", controller, "has not started")]


def requests_open(columns: Columns, edges: np.ndarray) -> dict[str, np.ndarray]:
    """Return the mean number of trajectories in flight on each server, float64 [BINS]."""
    return {
        name or "servers": mean_open(
            columns.started[columns.server == index],
            columns.finished[columns.server == index],
            edges,
        )
        for index, name in enumerate(columns.servers)
    }


def tokens_per_s(columns: Columns, edges: np.ndarray) -> np.ndarray:
    """Return the tokens per second that were sampled in each bin, float64 [len(edges) - 1].

    A trajectory's tokens are spread evenly over its life, so the sum of rate x width over bins that
    cover the run is the number of tokens.
    """
    life = np.maximum(columns.finished - columns.started, 1e-6)
    return mean_open(columns.started, columns.started + life, edges, columns.sampled / life)


def _server(
    columns: Columns, index: int, paused: Spans, edges: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the shares of a server that generated, and that a push paused."""
    own = columns.server == index
    busy = merge(columns.started[own], columns.finished[own])
    either = merge(np.concatenate((busy[0], paused[0])), np.concatenate((busy[1], paused[1])))
    pause = covered(merge(*paused), edges)
    return {"generates": covered(either, edges) - pause, "is paused for a push": pause}


def _lane(name: str, states: dict[str, np.ndarray], rest: str) -> dict[str, Any]:
    shares = {state: np.clip(share, 0.0, 1.0) for state, share in states.items()}
    total = np.sum(list(shares.values()), axis=0)
    return {"name": name, "shares": {**shares, rest: np.clip(1.0 - total, 0.0, 1.0)}}

"""The charts of a page as data: titles, axes with units, how to read them, and their points.

A chart is a dict that assets/charts.js draws: {id, kind, title, note, x, y, series}. A line's
series is {name, style, x, y} with style `line`, `faint`, `points` or `bound`; a chart of bars has
`labels` and one list of `values`.

The script is ours, as a page has 200 kB. Libraries whose wheels have their script inside add 1.3 MB
(bokeh) or 4.8 MB (plotly), and would replace 180 of its lines: timeline and rollouts stay.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from areal_lite.tools.report.run_data import Columns, Metrics, RunData, source_names
from areal_lite.tools.report.timeline import requests_open, time_edges, tokens_per_s

# Points of a line, at most, and bins of time.
POINTS = 400
BINS = 240
_STEP = "training step"
_SECONDS = "seconds since the first trajectory"


class Line(NamedTuple):
    """A chart over the training steps: `keys` are (key of metrics.jsonl, name in the legend)."""

    id: str
    title: str
    y: str
    keys: tuple[tuple[str, str], ...]
    note: str


LINES = (
    Line(
        "reward",
        "Reward and held-out accuracy",
        "reward; share of problems solved",
        (("reward_mean", "reward"),),
        "The line is the running mean of each step's mean reward, which is the faint line. Points "
        "are evaluations on problems that are not trained on. Both should rise.",
    ),
    Line(
        "staleness",
        "Staleness of the tokens trained on",
        "training steps",
        (("staleness_mean", "mean"), ("staleness_max", "largest")),
        "How many training steps lie between the weights that sampled a token and the weights "
        "that train on it. The largest must stay at or below the bound.",
    ),
    Line(
        "behave_kl",
        "Distance of behavior and proximal policy",
        "KL, nats per token",
        (("behave_kl", "KL(behavior ‖ proximal)"),),
        "How far the weights that sampled are from the weights before the step. It grows with "
        "staleness; a steady rise is a warning.",
    ),
    Line(
        "ess",
        "Effective sample size",
        "share of the tokens",
        (("ess", "effective share"),),
        "The share of tokens that the importance weights leave effective. 1 means that all weights "
        "are equal; a low value means that few tokens decide the update.",
    ),
    Line(
        "clip",
        "Clipped tokens",
        "share of the trained tokens",
        (("clip_fraction_high", "above the range"), ("clip_fraction_low", "below the range")),
        "The share of tokens whose probability ratio left the trust region. They have no gradient.",
    ),
    Line(
        "entropy",
        "Entropy of the policy",
        "nats per token",
        (("entropy", "entropy"),),
        "How undecided the policy is at each token. A fall to zero means that it stops exploring.",
    ),
    Line(
        "reference_kl",
        "Distance from the reference policy",
        "KL, nats per token",
        (("reference_kl", "reference policy"),),
        "How far the policy in training is from the policy of the KL term. It falls towards a "
        "teacher, and rises from the initial policy; a steep rise is a warning.",
    ),
    Line(
        "value_error",
        "Error of the critic",
        "squared reward",
        (("value_error", "mean squared error"),),
        "How far the critic's values are from the returns that they predict. It should fall.",
    ),
    Line(
        "value_explained",
        "Variance that the critic explains",
        "share of the returns' variance",
        (("value_explained", "explained variance"),),
        "A perfect critic has 1; knowing the mean alone gives 0. A critic below 0 is worse than "
        "that: its values then add noise to the advantages.",
    ),
    Line(
        "length",
        "Response length",
        "sampled tokens",
        (("length_mean", "mean"), ("length_max", "longest")),
        "Tokens that the policy sampled per trajectory. A response as long as the token budget was "
        "cut off.",
    ),
    Line(
        "grad_norm",
        "Gradient norm before clipping",
        "norm",
        (("grad_norm", "gradient norm"),),
        "The size of the update. Single peaks are clipped; a steady rise is a warning.",
    ),
    Line(
        "step_time",
        "What the trainer does in a step",
        "seconds",
        (("wait_s", "waits for a batch"), ("train_s", "trains"), ("push_s", "pushes weights")),
        "A trainer that waits long has too few or too slow servers. One that never waits holds the "
        "servers back, unless few groups are in the queue. The first step, which waits for the "
        "first answers, is left out.",
    ),
    Line(
        "queue",
        "Groups in the queue",
        "groups",
        (("queue_depth", "left after a batch was taken"),),
        "Finished groups that wait for the trainer. Their tokens get staler meanwhile. At 0 each "
        "batch waits for its last group.",
    ),
)


def line_chart(line: Line, metrics: Metrics) -> dict[str, Any]:
    """Return the chart of `line`. Keys that no step has are left out."""
    series = []
    for key, name in line.keys:
        x, y = course(metrics, key)
        if line.id == "step_time":
            x, y = x[1:], y[1:]
        if len(x):
            if key == "reward_mean":
                series.append(_series(f"{name} of each step", x, y, "faint"))
                y = smooth(y)
            series.append(_series(name, x, y))
    return {**_frame(line.id, "line", line.title, line.note, _STEP, line.y), "series": series}


def charts_of(run: RunData, bins: int = BINS) -> dict[str, dict[str, Any]]:
    """Return the charts of a run by their ids, without empty ones over the training steps.

    Charts over time have as many `bins`.
    """
    metrics, columns, bound = run.metrics, run.columns, run.staleness_bound
    charts = {line.id: line_chart(line, metrics) for line in LINES}
    reward, staleness = charts["reward"]["series"], charts["staleness"]["series"]
    for name in source_names(metrics):
        x, y = course(metrics, f"reward_mean/{name}")
        reward += [_series(f"reward, {name}", x, smooth(y))] * bool(len(x))
    reward += _accuracies(run.evals)
    if bound is not None and staleness:
        ends = [min(staleness[0]["x"]), max(staleness[0]["x"])]
        bounds = {"name": f"bound ({bound})", "style": "bound", "x": ends, "y": [bound] * 2}
        staleness.append(bounds)
    more = [staleness_chart(run.trained, bound), length_chart(columns)]
    if (edges := time_edges(columns, metrics, bins)) is not None:
        more += speed_charts(columns, metrics, edges)
    shown = {id: chart for id, chart in charts.items() if chart["series"]}
    return shown | {chart["id"]: chart for chart in more}


def staleness_chart(columns: Columns, bound: int | None) -> dict[str, Any]:
    """Return the histogram of trained tokens by staleness."""
    tokens = staleness_tokens(columns)
    late = bound is not None and len(tokens) > bound + 1
    masked = f" Tokens staler than the bound ({bound}) are masked." if late else ""
    frame = _frame(
        "staleness_histogram",
        "bars",
        "Tokens by staleness",
        "The share of the tokens in the batches, by their staleness. 0 is on-policy." + masked,
        "staleness, training steps",
        "share of the tokens",
    )
    return frame | _bars([str(versions) for versions in range(len(tokens))], tokens, "tokens")


def length_chart(columns: Columns) -> dict[str, Any]:
    """Return the histogram of response lengths, of all trajectories."""
    edges, counts = histogram(columns.sampled)
    pairs = zip(edges.tolist(), edges[1:].tolist())
    labels = [f"{low}" if high - low == 1 else f"{low}–{high - 1}" for low, high in pairs]
    frame = _frame(
        "length_histogram",
        "bars",
        "Trajectories by response length",
        "A long tail on the right is what makes synchronous generation wait.",
        "sampled tokens",
        "share of the trajectories",
    )
    return frame | _bars(labels, counts, "trajectories")


def _bars(labels: list[str], counts: np.ndarray, unit: str) -> dict[str, Any]:
    shares = counts / max(1, counts.sum())
    return {"labels": labels, "values": shares.tolist(), "counts": counts.tolist(), "unit": unit}


def speed_charts(columns: Columns, metrics: Metrics, edges: np.ndarray) -> list[dict[str, Any]]:
    """Return throughput and requests in flight over time; `edges` are wall-clock seconds."""
    middle = (edges[:-1] + edges[1:]) / 2 - edges[0]
    generated = _series("generated", middle, tokens_per_s(columns, edges))
    ends = np.array([m["logged_at"] for m in metrics]) - edges[0]
    tokens = np.array([m["tokens"] or 0 for m in metrics], np.float64)
    trained = smooth(tokens) / np.maximum(smooth(np.diff(ends, prepend=0.0)), 1e-3)
    flights = requests_open(columns, edges).items()
    speed = _frame(
        "throughput",
        "line",
        "Throughput",
        "Tokens per second that the servers sampled, and that training steps used. When the two "
        "agree, neither waits for the other.",
        _SECONDS,
        "tokens per second",
    )
    flight = _frame(
        "in_flight",
        "line",
        "Trajectories in flight",
        "How many trajectories each server worked on. A fall to zero before each step is what "
        "asynchronous generation avoids.",
        _SECONDS,
        "trajectories",
    )
    return [
        {**speed, "series": [generated, _series("trained on", ends, trained)]},
        {**flight, "series": [_series(name, middle, own) for name, own in flights]},
    ]


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return at most POINTS points: each is the mean of equally many neighbors."""
    size = -(-len(x) // POINTS) or 1
    starts = np.arange(0, len(x), size)
    counts = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts


def _series(name: str, x: np.ndarray, y: np.ndarray, style: str = "line") -> dict[str, Any]:
    numbers = [[float(f"{v:.6g}") for v in values.tolist()] for values in thinned(x, y)]
    return {"name": name, "style": style, "x": numbers[0], "y": numbers[1]}


def _accuracies(evals: Metrics) -> list[dict[str, Any]]:
    """Return the accuracies of the held-out problems, and the greedy one of each set, as points."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for line in evals:
        scored = {(line.get("name", ""), kind): line.get(kind) for kind in ("greedy", "sampled")}
        scored |= {(name, "greedy"): of.get("greedy") for name, of in line.get("sets", {}).items()}
        for key, value in scored.items():
            if value is not None and math.isfinite(value):
                points.setdefault(key, []).append((line["version"], value))
    several = len({name for name, _ in points}) > 1
    series = []
    for (name, kind), values in points.items():
        x, y = zip(*values)
        label = f"accuracy, {kind}" + (f" ({name})" if several else "")
        series.append({"name": label, "style": "points", "x": list(x), "y": list(y)})
    return series


def _frame(id: str, kind: str, title: str, note: str, x: str, y: str) -> dict[str, Any]:
    return {"id": id, "kind": kind, "title": title, "note": note, "x": x, "y": y}


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


def course(metrics: Metrics, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps that know the metric `key`, and its values there: float64 [n] each."""
    known = [(row["step"], row[key]) for row in metrics if row.get(key) is not None]
    steps, values = np.array(known, np.float64).reshape(-1, 2).T
    return steps, values

"""Pictures of the studies, from their records."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ARMS = {
    "decoupled": ("#0072b2", "decoupled, weighted"),
    "behavior": ("#d55e00", "clip around the behavior policy"),
    "unweighted": ("#6a3d9a", "decoupled, no weight"),
    "ess": ("#009e73", "learning rate follows the ESS"),
    "moment": ("#e69f00", "second moment below 0.04"),
    "decay": ("#a6761d", "second moment below 0.04, learning rate falls to zero"),
    "variation": ("#56b4e9", "total variation below 0.2"),
    "range": ("#cc79a7", "ratios from 0.5 to 2"),
    "sequence": ("#999933", "one weight per trajectory, optimal baseline"),
    "product": ("#882255", "one weight per trajectory, up to 2"),
    "settled": ("#44aa99", "the same, learning rate falls at the end"),
    "averaged": ("#117733", "clip around the averaged policy"),
    "penalty": ("#222222", "penalty on the divergence"),
    "decoupled_sgd": ("#0072b2", "decoupled, weighted, without Adam"),
    "behavior_sgd": ("#d55e00", "clip around the behavior policy, without Adam"),
}
"""The color and the label of each arm, also of arms whose settings are gone."""
_MARKERS = {2: "v", 4: "P", 8: "o", 16: "s", 32: "D", 64: "^"}


def draw(study: str, records: list[dict], path: Path) -> None:
    """Draw the picture of a study. Without records there is none."""
    if records:
        (_speed if study in ("speed", "limit") else _grid)(records, path)


def draw_drift(records: list[dict], path: Path) -> None:
    """Draw how a run on stale data ends against how far the policy moved from its data."""
    figure, ((axes,),) = _axes(1, 1)
    figure.set_size_inches(6.4, 4.0)
    for record in (r for r in records if r["lag"]):
        color, label = ARMS[record["arm"]]
        axes.plot(
            record["behave_kl"],
            record["accuracy"],
            _MARKERS[record["lag"]],
            color=color,
            label=label,
        )
    for lag in sorted({r["lag"] for r in records} - {0}):
        axes.plot([], [], _MARKERS[lag], color="#888888", label=f"lag {lag}")
    axes.set(xscale="log", ylim=(0, 1), ylabel="accuracy at the end")
    axes.set_xlabel("divergence from the behavior policy, nats a token")
    _legend(figure)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _grid(records: list[dict], path: Path) -> None:
    """Draw the reward over the steps: a row per lag, a column per learning rate."""
    lags = sorted({r["lag"] for r in records})
    lrs = sorted({r["lr"] for r in records})
    figure, rows = _axes(len(lags), len(lrs))
    for row, lag in zip(rows, lags):
        for axes, lr in zip(row, lrs):
            if not (own := [r for r in records if r["lag"] == lag and r["lr"] == lr]):
                axes.set_axis_off()
                continue
            _curves(axes, own)
            axes.set(title=f"lag {lag}, learning rate {lr:g}", ylim=(0, 1), xlabel="step")
        first = next(axes for axes in row if axes.axison)
        first.set_ylabel("reward")
        first.tick_params(labelleft=True)
    _legend(figure)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _speed(records: list[dict], path: Path) -> None:
    """Draw reward (top) and log-prob of the carry (bottom) over the steps, a column per lag.

    The dotted line grows by ln(1 + eps) / (lag + 1) a step, the bound of the clip around the
    behavior policy for a token that every step raises.
    """
    eps = min(r["eps"] for r in records)
    lags = sorted({r["lag"] for r in records})
    figure, (top, bottom) = _axes(2, len(lags))
    for above, below, lag in zip(top, bottom, lags):
        own = [r for r in records if r["lag"] == lag and r["eps"] == eps]
        _curves(above, own)
        above.set(title=f"lag {lag}, eps {eps:g}", ylim=(0, 1))
        _curves(below, own, "carry")
        starts = [r["carry"][0] for r in own]
        steps = np.arange(len(own[0]["rewards"]))
        bound = np.mean(starts) + steps * np.log1p(eps) / (lag + 1)
        below.plot(steps, np.minimum(bound, 0), ":", color="#555555", label="speed limit")
        below.set(xlabel="step", ylim=(-3, 0.1))
    top[0].set_ylabel("reward")
    bottom[0].set_ylabel("log-prob of a due carry, nats")
    _legend(figure)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _axes(rows: int, columns: int) -> tuple[Figure, np.ndarray]:
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(3.2 * columns, 2.8 * rows),
        layout="constrained",
        sharey="row",
        squeeze=False,
    )
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", alpha=0.3)
    return figure, axes


def _curves(axes: Axes, records: list[dict], key: str = "rewards") -> None:
    """Draw a thin line per seed and a thick one for their mean, arm by arm."""
    for arm, (color, label) in ARMS.items():
        values = [r[key] for r in records if r["arm"] == arm]
        if not values:
            continue
        length = min(map(len, values))
        table = np.array([v[:length] for v in values], np.float64)
        first = 0
        if key == "rewards":  # means of five steps, so that the lines can be told apart
            table = np.array([np.convolve(row, np.full(5, 0.2), "valid") for row in table])
            first = 4
        steps = np.arange(first, length)
        axes.plot(steps, table.T, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(
            steps,
            np.ma.masked_invalid(table).mean(0),
            color=color,
            linewidth=1.8,
            label=label,
        )


def _legend(figure: Figure) -> None:
    """Name every line once, above all axes."""
    named = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles))
    columns = 2 if figure.get_figwidth() > 5 else 1
    where = "outside upper center"
    figure.legend(named.values(), named.keys(), loc=where, ncols=columns, frameon=False, fontsize=8)

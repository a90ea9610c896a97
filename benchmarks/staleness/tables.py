"""Tables of the studies, from their records: what each arm reached, and paired differences."""

import math
from collections.abc import Callable, Iterable
from itertools import groupby

import numpy as np

from benchmarks.staleness.paired import best_mean, difference, last_mean, steps_to

THRESHOLDS = (0.6, 0.75)
_WHERE = ("lag", "lr", "eps", "minibatches", "steps")
_WITHOUT_RATE = ("lag", "eps", "minibatches", "steps")
_PLACE = ["lag", "learning rate", "clip range", "updates"]


def page(study: str, records: list[dict]) -> str:
    """Return a page of Markdown with the tables. Tables of pairs are left out without pairs."""
    parts = [
        f"# All numbers of the study `{study}`",
        "Values are means over seeds, with the lowest and the highest. Steps are listed by seed. "
        "The divergence is that of the proximal from the behavior policy, in nats a token.",
        _reached(records),
    ]
    if paired := _paired(records):
        parts += [
            "Decoupled PPO minus another arm, seed by seed, with 95 % intervals (Student's t):",
            paired,
        ]
    if best := _paired_at_own_best(records):
        parts += [
            "The same with each arm at its own best learning rate: the one with the highest reward "
            "of the last ten steps, in the seeds that have them all:",
            best,
        ]
    if shares := _shares_of_fresh(records):
        parts += [
            "Accuracy as a share of that with fresh data after as many steps, seed by seed, with "
            "95 % intervals. Fresh data has the learning rate that most seeds have.",
            shares,
        ]
    return "\n\n".join(parts) + "\n"


def _reached(records: list[dict]) -> str:
    """Return a row per arm and place: means over seeds, with the lowest and the highest."""
    head = [*_PLACE, "arm", "seeds", "accuracy", "reward, last 10 steps", "best 10 steps"]
    head += [*(f"steps to {t:g}" for t in THRESHOLDS), "clipped", "divergence"]
    rows = []
    for (*place, arm), runs in _grouped(records, (*_WHERE, "arm")):
        curves = [run["rewards"] for run in runs]
        reached = [[steps_to(curve, t) for curve in curves] for t in THRESHOLDS]
        rows.append(
            [
                *_place(*place),
                arm,
                str(len(runs)),
                _range([run["accuracy"] for run in runs]),
                _range([last_mean(curve) for curve in curves]),
                _range([best_mean(curve) for curve in curves]),
                *map(_steps, reached),
                f"{np.mean([run['clip_fraction'] for run in runs]):.2%}",
                f"{abs(np.mean([run['behave_kl'] for run in runs])):.4f}",
            ]
        )
    return _markdown(head, rows)


_PAIRED = [
    "decoupled against",
    "pairs",
    "accuracy",
    "reward, last 10 steps",
    *(f"share of the steps to {t:g}" for t in THRESHOLDS),
]


def _paired(records: list[dict]) -> str:
    """Return decoupled PPO minus each other arm at the same learning rate."""
    rows = []
    for place, runs in _grouped(records, _WHERE):
        arms = {arm: own for (arm,), own in _grouped(runs, ("arm",))}
        base = arms.pop("decoupled", [])
        for arm, other in arms.items():
            if cells := _differences(base, other):
                rows.append([*_place(*place), arm, *cells])
    return _markdown([*_PLACE, *_PAIRED], rows) if rows else ""


def _paired_at_own_best(records: list[dict]) -> str:
    """Return decoupled PPO minus each other arm, each at the best of its learning rates."""
    rows = []
    for (lag, *place), runs in _grouped(records, _WITHOUT_RATE):
        arms = {arm: own for (arm,), own in _grouped(runs, ("arm",))}
        best = {arm: lr for arm, own in arms.items() if (lr := best_rate(own)) is not None}
        if "decoupled" not in best:
            continue
        chosen = {arm: [run for run in arms[arm] if run["lr"] == lr] for arm, lr in best.items()}
        for arm in best.keys() - {"decoupled"}:
            if cells := _differences(chosen["decoupled"], chosen[arm]):
                rates = f"{best['decoupled']:g}, {best[arm]:g}"
                rows.append([*_place(lag, rates, *place), arm, *cells])
    return _markdown([*_PLACE, *_PAIRED], sorted(rows)) if rows else ""


def _shares_of_fresh(records: list[dict]) -> str:
    """Return the accuracy on stale data over that on fresh data, with the lowest share."""
    rows = []
    for steps in sorted({run["steps"] for run in records}):
        own = [run for run in records if run["steps"] == steps]
        rates = _grouped([r for r in own if (r["arm"], r["lag"]) == ("decoupled", 0)], ("lr",))
        if not rates:
            continue
        (fresh_lr,), runs = max(rates, key=lambda rate: len(rate[1]))
        fresh = {run["seed"]: run["accuracy"] for run in runs}
        for (*place, arm), stale in _grouped([r for r in own if r["lag"]], (*_WHERE, "arm")):
            shares = [r["accuracy"] / fresh[r["seed"]] for r in stale if r["seed"] in fresh]
            if len(shares) > 1:
                found = difference(shares, [0.0] * len(shares))
                share = f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})"
                counts = [str(len(shares)), share, f"{min(shares):.3f}"]
                rows.append([*_place(*place), arm, f"{fresh_lr:g}", *counts])
    head = [*_PLACE, "arm", "learning rate of fresh data", "pairs", "share", "lowest"]
    return _markdown(head, rows) if rows else ""


def best_rate(runs: list[dict]) -> float | None:
    """Return the learning rate with the highest reward of the last ten steps.

    Only seeds with a run at every rate count. None without such a seed, and for a single rate.
    """
    by_rate = {lr: {run["seed"]: run for run in own} for (lr,), own in _grouped(runs, ("lr",))}
    common = set.intersection(*(set(own) for own in by_rate.values()))
    if len(by_rate) < 2 or not common:
        return None
    return max(
        by_rate, key=lambda lr: sum(last_mean(by_rate[lr][seed]["rewards"]) for seed in common)
    )


def _differences(base: list[dict], other: list[dict]) -> list[str] | None:
    """Return the cells of a row: `base` minus `other`, with 95 % intervals over seeds.

    Steps are compared by their ratio, over the seeds in which both arms reached the threshold.
    None for fewer than two pairs.
    """
    seeds = [{run["seed"]: run for run in runs} for runs in (base, other)]
    pairs = [(seeds[0][s], seeds[1][s]) for s in sorted(seeds[0].keys() & seeds[1].keys())]
    if len(pairs) < 2:
        return None
    return [
        str(len(pairs)),
        _interval(pairs, lambda run: run["accuracy"]),
        _interval(pairs, lambda run: last_mean(run["rewards"])),
        *(_share_of_steps(pairs, t) for t in THRESHOLDS),
    ]


def _grouped(records: Iterable[dict], keys: tuple[str, ...]) -> Iterable[tuple[tuple, list[dict]]]:
    def key(run: dict) -> tuple:
        return tuple(run[name] for name in keys)

    ordered = sorted(records, key=lambda run: (key(run), run["seed"]))
    return [(place, list(runs)) for place, runs in groupby(ordered, key)]


def _place(lag: int, lr: float | str, eps: float, minibatches: int, steps: int) -> list[str]:
    rate = lr if isinstance(lr, str) else f"{lr:g}"
    return [str(lag), rate, f"{eps:g}", f"{minibatches} x {steps}"]


def _interval(pairs: list[tuple[dict, dict]], value: Callable[[dict], float]) -> str:
    found = difference(*zip(*((value(a), value(b)) for a, b in pairs)))
    return f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"


def _share_of_steps(pairs: list[tuple[dict, dict]], threshold: float) -> str:
    steps = [[steps_to(run["rewards"], threshold) for run in pair] for pair in pairs]
    logs = [[math.log(count) for count in pair] for pair in steps if None not in pair]
    if len(logs) < 2:
        return "–"
    found = difference(*zip(*logs))
    share = "{:.2f} ({:.2f} to {:.2f})".format(*np.exp(found[:3]))
    return share if len(logs) == len(pairs) else f"{share}, {len(logs)} pairs"


def _range(values: list[float]) -> str:
    return f"{np.mean(values):.3f} ({min(values):.3f}–{max(values):.3f})"


def _steps(values: list[int | None]) -> str:
    return ", ".join("never" if value is None else str(value) for value in values)


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

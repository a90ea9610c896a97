"""Tables of the studies, from their records: what each arm reached, and paired differences."""

import math
from collections.abc import Callable, Iterable
from itertools import groupby

import numpy as np

from benchmarks.staleness.paired import best_mean, difference, last_mean, steps_to

THRESHOLDS = (0.6, 0.75)
_WHERE = ("lag", "lr", "eps", "minibatches", "steps")
_PLACE = ["lag", "learning rate", "clip range", "updates"]


def page(study: str, records: list[dict]) -> str:
    """Return a page of Markdown with both tables. The second one is left out without pairs."""
    parts = [
        f"# All numbers of the study `{study}`",
        "Values are means over seeds, with the lowest and the highest. Steps are listed by seed. "
        "The divergence is that of the proximal from the behavior policy, in nats a token.",
        _reached(records),
        "Decoupled PPO minus another arm, seed by seed, with 95 % intervals (Student's t):",
        _paired(records),
    ]
    return "\n\n".join(parts if parts[-1] else parts[:-2]) + "\n"


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


def _paired(records: list[dict]) -> str:
    """Return decoupled PPO minus each other arm, with 95 % intervals over seeds.

    Steps are compared by their ratio, over the seeds in which both arms reached the threshold.
    """
    head = [*_PLACE, "decoupled against", "pairs", "accuracy", "reward, last 10 steps"]
    head += [*(f"share of the steps to {t:g}" for t in THRESHOLDS)]
    rows = []
    for place, runs in _grouped(records, _WHERE):
        arms = {arm: {run["seed"]: run for run in own} for (arm,), own in _grouped(runs, ("arm",))}
        base = arms.pop("decoupled", {})
        for arm, other in arms.items():
            pairs = [(base[seed], other[seed]) for seed in sorted(base.keys() & other.keys())]
            if len(pairs) < 2:
                continue
            rows.append(
                [
                    *_place(*place),
                    arm,
                    str(len(pairs)),
                    _interval(pairs, lambda run: run["accuracy"]),
                    _interval(pairs, lambda run: last_mean(run["rewards"])),
                    *(_share_of_steps(pairs, t) for t in THRESHOLDS),
                ]
            )
    return _markdown(head, rows) if rows else ""


def _grouped(records: Iterable[dict], keys: tuple[str, ...]) -> Iterable[tuple[tuple, list[dict]]]:
    def key(run: dict) -> tuple:
        return tuple(run[name] for name in keys)

    ordered = sorted(records, key=lambda run: (key(run), run["seed"]))
    return [(place, list(runs)) for place, runs in groupby(ordered, key)]


def _place(lag: int, lr: float, eps: float, minibatches: int, steps: int) -> list[str]:
    return [str(lag), f"{lr:g}", f"{eps:g}", f"{minibatches} x {steps}"]


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

"""Statistics of paired runs: what an arm reaches, and differences of arms seed by seed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats


class Difference(NamedTuple):
    """The mean difference of paired values and its 95 % interval (Student's t)."""

    mean: float
    low: float
    high: float
    pairs: int


def difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Return a - b, pair by pair. Raises ValueError for fewer than two pairs."""
    d = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    if len(d) < 2:
        raise ValueError(f"an interval needs at least two pairs, got {len(d)}")
    half = stats.t.ppf(0.975, len(d) - 1) * d.std(ddof=1) / np.sqrt(len(d))
    return Difference(float(d.mean()), float(d.mean() - half), float(d.mean() + half), len(d))


def last_mean(rewards: Sequence[float], steps: int = 10) -> float:
    """Return the mean reward of the last steps."""
    return float(np.mean(rewards[-steps:]))


def best_mean(rewards: Sequence[float], steps: int = 10) -> float:
    """Return the highest mean reward of `steps` steps in a row."""
    return float(np.convolve(rewards, np.full(steps, 1 / steps), "valid").max())


def steps_to(rewards: Sequence[float], threshold: float, steps: int = 10) -> int | None:
    """Return the first step at which the mean reward of the last `steps` steps is `threshold`.

    Steps count from 1. None if it never is.
    """
    means = np.convolve(rewards, np.full(steps, 1 / steps), "valid")
    reached = np.flatnonzero(means >= threshold - 1e-12)
    return int(reached[0]) + steps if len(reached) else None

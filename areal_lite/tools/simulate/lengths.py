"""Lengths of completions: a clipped log-normal distribution, or those of a run.

The logarithm of a length is the sum of a part of the prompt and a part of the sample, so that the
answers to one prompt are similar. `shared` is the prompt's share of the variance. Lengths above
`longest` are cut there, as `rollout.max_new_tokens` does, and `mean` is that of the cut lengths.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Protocol

import numpy as np

_NORMAL = NormalDist()


class Lengths(Protocol):
    """Draws the lengths of a group, in tokens."""

    def group(self, seed: int, prompt: int, size: int) -> np.ndarray:
        """Return the lengths of `size` completions of a prompt, int64 [size], the same each time.

        A prompt that is asked again therefore gets as long an answer.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LogNormalLengths:
    """Log-normal lengths that are cut at `longest` and then have the given mean.

    Args:
        mean: mean length in tokens, after the cut.
        spread: standard deviation of the logarithm, before the cut.
        longest: the cut, in tokens.
        shared: the prompt's share of the variance of the logarithm, 0 to 1.
    """

    mean: float
    spread: float
    longest: int
    shared: float = 0.5

    def __post_init__(self) -> None:
        if self.mean >= self.longest:
            raise ValueError(
                f"simulate.length_mean={self.mean:g} must be below "
                f"rollout.max_new_tokens={self.longest}"
            )

    @cached_property
    def location(self) -> float:
        """Return the mean of the logarithm before the cut, by bisection."""
        low, high = math.log(self.mean) - self.spread**2 - 1, math.log(self.longest) + 20
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if self._cut_mean(middle) < self.mean else (low, middle)
        return low

    def _cut_mean(self, location: float) -> float:
        """Return E[min(X, longest)] of a log-normal X."""
        if not self.spread:
            return min(math.exp(location), self.longest)
        edge = (math.log(self.longest) - location) / self.spread
        below = math.exp(location + self.spread**2 / 2) * _NORMAL.cdf(edge - self.spread)
        return below + self.longest * (1 - _NORMAL.cdf(edge))

    def group(self, seed: int, prompt: int, size: int) -> np.ndarray:
        rng = np.random.default_rng((seed, prompt))
        common, own = rng.normal(), rng.normal(size=size)
        parts = math.sqrt(self.shared) * common + math.sqrt(1 - self.shared) * own
        lengths = np.exp(self.location + self.spread * parts)
        return lengths.round().clip(1, self.longest).astype(np.int64)


@dataclass(frozen=True)
class RecordedLengths:
    """The groups of a stored run, drawn with repetition."""

    groups: Sequence[Sequence[int]]

    def group(self, seed: int, prompt: int, size: int) -> np.ndarray:
        rng = np.random.default_rng((seed, prompt))
        lengths = self.groups[int(rng.integers(len(self.groups)))]
        if len(lengths) == size:
            return np.asarray(lengths, np.int64)
        return rng.choice(np.asarray(lengths, np.int64), size)

"""The scores of a held-out set: accuracy and pass@k, with intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from typing import TypedDict

import numpy as np

Interval = tuple[float, float]

_Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution


class EvalScores(TypedDict):
    """The scores of one held-out set in evals.jsonl.

    Intervals are those of `interval`. `greedy_interval` is None when a reward is outside [0, 1].
    """

    greedy: float
    greedy_interval: Interval | None
    sampled: float | None
    pass_at_k: dict[str, float]
    pass_at_k_intervals: dict[str, Interval]
    problems: int
    samples: int
    versions: list[int]
    failures: int


@dataclass(slots=True)
class Scores:
    """The scores of one held-out set.

    Args:
        rewards: float64 [problems, 1 + samples], the greedy completion first.
        versions: the versions that sampled at least one token.
        failures: number of completions without a reward; they count as 0.
    """

    rewards: np.ndarray
    versions: list[int]
    failures: int

    @property
    def greedy(self) -> float:
        """Return the mean reward of the greedy completions."""
        return float(self.rewards[:, 0].mean())

    @property
    def sampled(self) -> float | None:
        """Return the mean reward of the samples; None without samples."""
        return float(self.rewards[:, 1:].mean()) if self.samples else None

    @property
    def samples(self) -> int:
        """Return the number of samples per problem."""
        return self.rewards.shape[1] - 1

    def pass_at_powers(self) -> dict[str, float]:
        """Return pass@k for each power of two up to the number of samples."""
        return {str(1 << i): self.pass_at(1 << i) for i in range(self.samples.bit_length())}

    def pass_at(self, k: int) -> float:
        """Return the mean of `pass_at_k` over problems; a sample is correct if its reward is > 0.

        k must not exceed the number of samples.
        """
        correct = np.count_nonzero(self.rewards[:, 1:] > 0, axis=1)
        return float(np.mean([pass_at_k(self.samples, int(c), k) for c in correct]))

    def record(self) -> EvalScores:
        """Return the scores as JSON values."""
        greedy, problems = self.rewards[:, 0], len(self.rewards)
        is_share = bool(((greedy >= 0) & (greedy <= 1)).all())
        pass_at = self.pass_at_powers()
        return {
            "greedy": self.greedy,
            "greedy_interval": interval(self.greedy, problems) if is_share else None,
            "sampled": self.sampled,
            "pass_at_k": pass_at,
            "pass_at_k_intervals": {k: interval(p, problems) for k, p in pass_at.items()},
            "problems": problems,
            "samples": self.samples,
            "versions": self.versions,
            "failures": self.failures,
        }


def pooled(parts: Sequence[Scores]) -> Scores:
    """Return the scores of all problems of several sets."""
    return Scores(
        rewards=np.concatenate([part.rewards for part in parts]),
        versions=sorted({version for part in parts for version in part.versions}),
        failures=sum(part.failures for part in parts),
    )


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate without bias that one of k samples is correct.

    1 - C(n - c, k) / C(n, k), with `correct` c of `samples` n (arXiv 2107.03374, eq. 1).
    """
    assert 0 <= correct <= samples and 1 <= k <= samples
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def interval(mean: float, problems: int) -> Interval:
    """Return the 95 % score interval of a mean over problems whose values are in [0, 1].

    It is Wilson's (1927), for a share. Other values in [0, 1] with the same mean vary less, so it
    is too wide for them rather than too narrow. It has a width at 0 and at 1, too.
    """
    shrink = 1 + _Z**2 / problems
    center = (mean + _Z**2 / (2 * problems)) / shrink
    half = _Z / shrink * sqrt(mean * (1 - mean) / problems + _Z**2 / (4 * problems**2))
    return max(0.0, center - half), min(1.0, center + half)

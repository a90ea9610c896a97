"""Settings that are allowed but cannot do what they are for. Each caution is one line.

`areal-lite train --dry-run` prints the cautions, and `areal-lite diagnose` compares the staleness
of a run with what its objective tolerates.
"""

from typing import NamedTuple

from areal_lite.config.algo import AlgoConfig
from areal_lite.config.commands import TrainConfig

CLIPPED_LOSSES = ("ppo", "gspo", "cispo")
_SMALLER_LR_FROM = 32
"""Lag, in training steps, from which the learning rate of fresh data was too large."""


class Tolerance(NamedTuple):
    """The staleness, in training steps, up to which an objective is known to learn; the source."""

    steps: int
    objective: str
    shown: str


def cautions(config: TrainConfig) -> list[str]:
    """Return what a run with these settings should know beforehand."""
    found = [
        _idle_clip(config),
        _too_stale(config),
        _fresh_learning_rate(config),
    ]
    return [caution for caution in found if caution]


def clip_is_idle(config: TrainConfig) -> bool:
    """Return whether the ratio that the loss clips is always 1."""
    algo = config.algo
    return (
        algo.loss in CLIPPED_LOSSES
        and algo.decoupled
        and algo.prox != "loglinear"
        and config.trainer.minibatches == 1
    )


def tolerated_staleness(algo: AlgoConfig) -> Tolerance | None:
    """Return the staleness that an objective tolerates.

    None for Trajectory Balance, which tolerates any, and for a loss of your own.
    """
    if algo.loss == "tb" or ":" in algo.loss:
        return None
    if algo.loss in CLIPPED_LOSSES and not algo.decoupled:
        return Tolerance(
            2, "a clip around the behavior policy", "arXiv 2505.24298: AIME24 42.0 -> 23.3 at 4"
        )
    if algo.correction.mode == "off":
        return Tolerance(1, "a weight of 1", "nothing accounts for the policy that sampled")
    return Tolerance(
        8, "a bounded weight", "arXiv 2505.24298: AIME24 42.0 -> 41.0 at 8, 38.7 at 16"
    )


def _idle_clip(config: TrainConfig) -> str | None:
    if not clip_is_idle(config):
        return None
    return (
        "algo.eps_low and algo.eps_high never act: trainer.minibatches=1 makes one update a batch, "
        "in which the ratio to the proximal policy is 1. For a clip that acts, set "
        "trainer.minibatches=2 and algo.prox=recompute"
    )


def _too_stale(config: TrainConfig) -> str | None:
    tolerance, allowed = tolerated_staleness(config.algo), config.buffer.max_staleness
    if tolerance is None or allowed <= tolerance.steps:
        return None
    return (
        f"buffer.max_staleness={allowed} is more than the {tolerance.steps} that "
        f"{tolerance.objective} is known to tolerate ({tolerance.shown}): lower it, or use "
        "algo.loss=examples.recipes.stale:loss"
    )


def _fresh_learning_rate(config: TrainConfig) -> str | None:
    algo, allowed = config.algo, config.buffer.max_staleness
    if allowed < _SMALLER_LR_FROM or algo.loss not in CLIPPED_LOSSES:
        return None
    return (
        f"trainer.lr={config.trainer.lr:g} is too large at buffer.max_staleness={allowed} if it is "
        "the learning rate of fresh data. 0.6 of it was right at a lag of 32, and a third at 64 "
        "(benchmarks/results/staleness/README.md)"
    )

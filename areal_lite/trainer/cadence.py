"""The cadence of pushes: which steps end with one, and which pushes are evaluated.

It depends on the completed steps alone, so a resumed run keeps it. An evaluation needs weights that
the servers have (docs/staleness.md, Fewer pushes).
"""

from areal_lite.config import TrainConfig


def is_pushed(config: TrainConfig, done: int) -> bool:
    """Return whether the weights after `done` steps are pushed."""
    return done % config.sync.every == 0 or done == config.trainer.steps


def is_evaluated(config: TrainConfig, done: int) -> bool:
    """Return whether the push after `done` steps is evaluated while training continues."""
    every = config.eval.every
    if not every or not is_pushed(config, done) or done == config.trainer.steps:
        return False
    return done // every > (done - config.sync.every) // every


def last_evaluated(config: TrainConfig, done: int) -> int:
    """Return the newest version up to `done` that a run evaluates; 0 is the first."""
    return next((step for step in range(done, 0, -1) if is_evaluated(config, step)), 0)

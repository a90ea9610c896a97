"""The cadence of pushes: which steps end with one, and which pushes are evaluated.

With `sync.every` = N the weights after steps N, 2N, 3N, ... and after the last step are pushed. An
evaluation needs weights that the servers have, so it follows the first push at or after a multiple
of `eval.every`. Both depend on the completed steps alone, so a resumed run keeps them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """The steps after which weights are pushed and evaluated. All numbers are training steps."""

    every: int  # from push to push, N
    eval_every: int  # from evaluation to evaluation; 0 for none during training
    steps: int  # of the run

    def pushes(self, done: int) -> bool:
        """Return whether the weights after `done` steps are pushed."""
        return done % self.every == 0 or done == self.steps

    def evaluates(self, done: int) -> bool:
        """Return whether the push after `done` steps is evaluated while training continues."""
        if not self.eval_every or not self.pushes(done) or done == self.steps:
            return False
        return done // self.eval_every > (done - self.every) // self.eval_every

    def last_evaluated(self, done: int) -> int:
        """Return the newest version up to `done` that a run evaluates; 0 is the first."""
        return next((step for step in range(done, 0, -1) if self.evaluates(step)), 0)

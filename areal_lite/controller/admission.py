"""Admission by maximum staleness: no group is started that would be too stale when it is used.

With B groups per training step, the servers' version v and the bound eta = `max_staleness`, a group
may start while

    accepted + running < (eta + v + 1) * B            (AReaL, arXiv 2505.24298, eq. 3)

`running` groups are being generated. `accepted` groups have finished since the start of the run;
they wait for the trainer or were used by it. v is the trainer's step at the last push, so that eta
is in training steps. With `sync.every` = N the trainer is up to N - 1 steps ahead of v, and these
steps need the batches v to v + N - 1: eta must be at least N - 1 (config/buffer_rules.py).

Invariants, asserted in tests/unit/controller/test_admission.py:

* submitted = running + accepted + rejected: a group that is filtered, fails or is dropped is
  rejected, and returns its capacity to the next prompt. Otherwise admission would stop one day.
* The n-th group (n from 0) is used at step floor(n / B) if groups are used in order. It was
  admitted at a version v with n + 1 <= (eta + v + 1) * B, so floor(n / B) - v <= eta, and its
  tokens are of version v or newer. A group that is overtaken by younger ones can exceed eta, hence
  the hard bound at consumption (`queue.py`).

Example, B = 2 and eta = 1. At version 0 four groups may start: two for step 0, two for step 1. The
trainer completes step 0, `on_version(1)`, and two more may start, which step 2 will use with
staleness 1. If one group fails, `on_rejected()`, one more may start at once. With eta = 0 only the
groups of the coming step may start: synchronous training.

A run that resumes after s steps has used s * B groups. These and the finished groups that wait
count as accepted again (`recover`). Groups that were in flight are lost and do not count. Counters
that started at 0 would admit the groups of all completed steps at once.
"""

import math
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class AdmissionGate:
    """Counts groups and decides whether another one may start. No clock and no I/O.

    Args:
        max_staleness: the bound eta in steps. With None, as replay needs it, generation never
            waits.
        batch_groups: groups per training step, B.
        steps: training steps of the run. No group starts that no step would use. None: no end.
        version: the servers' version.
        step: completed training steps.
    """

    max_staleness: int | None
    batch_groups: int
    steps: int | None = None
    version: int = 0
    step: int = 0
    running: int = 0
    accepted: int = 0
    rejected: int = 0

    def __post_init__(self) -> None:
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(
                f"buffer.max_staleness is {self.max_staleness}: it must be 0 (synchronous) or more"
            )
        if self.batch_groups < 1:
            raise ValueError(
                f"trainer.batch_groups is {self.batch_groups}: a step needs at least one group"
            )

    @property
    def capacity(self) -> float:
        """Return how many groups may start now."""
        if self.max_staleness is None:
            return math.inf
        ahead = self.max_staleness + self.version + 1
        if self.steps is not None:
            ahead = min(ahead, self.steps)
        return ahead * self.batch_groups - self.accepted - self.running

    def can_admit(self) -> bool:
        """Return whether a group may start now."""
        return self.capacity > 0

    @property
    def waiting(self) -> int:
        """Return the number of accepted groups that no completed step has used."""
        return self.accepted - self.step * self.batch_groups

    @property
    def drained(self) -> bool:
        """Return whether no group is running and none may start before the next version."""
        return self.running == 0 and self.capacity <= 0

    def on_admitted(self) -> None:
        """Count a group that starts."""
        assert self.capacity > 0, "admitted a group without capacity"
        self.running += 1

    def on_accepted(self) -> None:
        """Count a running group that has finished and waits for the trainer."""
        assert self.running > 0, "accepted a group that was not running"
        self.running -= 1
        self.accepted += 1

    def on_rejected(self) -> None:
        """Count a running group that failed or was filtered; its capacity is free again."""
        assert self.running > 0, "rejected a group that was not running"
        self.running -= 1
        self.rejected += 1

    def on_revoked(self) -> None:
        """Count an accepted group that was dropped before use; its capacity is free again."""
        assert self.accepted > 0, "revoked a group that was not accepted"
        self.accepted -= 1
        self.rejected += 1

    def on_step(self, step: int) -> None:
        """Record that `step` steps are complete."""
        assert step >= self.step, f"completed steps went back from {self.step} to {step}"
        self.step = step

    def on_version(self, version: int) -> None:
        """Record that `version` steps are complete and that the servers have these weights."""
        self.on_step(version)
        self.version = version

    def recover(self, step: int, version: int, waiting: int) -> None:
        """Resume after `step` steps with `waiting` finished groups that no step has used.

        Call this before anything is admitted. The servers have `version`.
        """
        assert self.running == self.accepted == self.step == 0, "the run has already begun"
        self.step, self.version = step, version
        self.accepted = step * self.batch_groups + waiting

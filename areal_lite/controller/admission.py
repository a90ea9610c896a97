"""Admission by maximum staleness: nothing is born too stale to be used.

With B groups a training step, version v (completed steps) and bound eta = `max_staleness`, a group may be started while

    accepted + running < (eta + v + 1) * B            (AReaL, arXiv 2505.24298, eq. 3)

`running` are groups being generated; `accepted` are all that finished since the start and wait for the trainer or were used by it.
A group that is filtered, fails or is dropped leaves both counts: its room goes to the next prompt, else admission would one day stand
still.

Why it bounds staleness: the n-th group admitted (n from 0) is used at step floor(n / B) by a first-in-first-out consumer. It was admitted
at a version v with n + 1 <= (eta + v + 1) * B, so floor(n / B) - v <= eta. A group overtaken by younger ones can still exceed eta:
that is what the hard bound at consumption is for (areal_lite/controller/queue.py).

Example, B = 2, eta = 1: at version 0 four groups may start: two for step 0, two for step 1. The trainer finishes step 0, `on_version(1)`,
and two more may start, which step 2 will use with staleness 1. If one group fails, `on_rejected()`, one more may start at once.
With eta = 0 only the groups of the coming step may start: synchronous training.

A run that resumes at version v has used v * B groups. Those, and what had finished and waits, are counted again (`recover`); what was in
flight is lost and is not. Counters that began at 0 would admit a whole run's groups at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class AdmissionGate:
    """Pure state machine: a group is admitted, then accepted or rejected; an accepted one may be revoked. It counts groups.

    `max_staleness=None` is no bound: generation never waits (replay, areal_lite/controller/replay.py)."""

    max_staleness: int | None
    batch_groups: int
    steps: int | None = None  # training steps of the run: nothing starts that no step would use
    version: int = 0
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
        """How many groups may start now."""
        if self.max_staleness is None:
            return math.inf
        ahead = self.max_staleness + self.version + 1
        return (
            (ahead if self.steps is None else min(ahead, self.steps)) * self.batch_groups
            - self.accepted
            - self.running
        )

    def can_admit(self) -> bool:
        return self.capacity > 0

    @property
    def waiting(self) -> int:
        """Accepted groups that no completed step has used."""
        return self.accepted - self.version * self.batch_groups

    @property
    def drained(self) -> bool:
        """Everything that may be generated before the next `on_version` is: nothing runs and nothing may start."""
        return self.running == 0 and self.capacity <= 0

    def on_admitted(self) -> None:
        """A group starts."""
        assert self.capacity > 0, "admitted a group without room"
        self.running += 1

    def on_accepted(self) -> None:
        """A running group has finished and waits for the trainer."""
        assert self.running > 0, "accepted a group that was not running"
        self.running -= 1
        self.accepted += 1

    def on_rejected(self) -> None:
        """A running group failed or was filtered: its room is free again."""
        assert self.running > 0, "rejected a group that was not running"
        self.running -= 1
        self.rejected += 1

    def on_revoked(self) -> None:
        """An accepted group was dropped before its use: its room is free again."""
        assert self.accepted > 0, "revoked a group that was not accepted"
        self.accepted -= 1
        self.rejected += 1

    def on_version(self, version: int) -> None:
        """The trainer completed a step and is at `version` now."""
        assert version >= self.version, f"version went back from {self.version} to {version}"
        self.version = version

    def recover(self, version: int, waiting: int) -> None:
        """Before anything is admitted: a run goes on at `version`, with `waiting` finished groups that no step has used yet."""
        assert self.running == self.accepted == self.version == 0, (
            "recovered into a run that has begun"
        )
        self.version, self.accepted = version, version * self.batch_groups + waiting

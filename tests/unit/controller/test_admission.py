"""Admission by maximum staleness, and no earlier than the trainer needs."""

import heapq
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal_lite.controller.buffer import AdmissionGate


def test_the_docstring_example() -> None:
    gate = AdmissionGate(max_staleness=1, batch_groups=2)
    for _ in range(4):
        gate.on_admitted()
    assert not gate.can_admit()
    gate.on_accepted(), gate.on_accepted()
    assert not gate.can_admit()  # waiting or used: both count
    gate.on_version(1)
    assert gate.capacity == 2
    gate.on_admitted(), gate.on_admitted()
    gate.on_rejected()
    assert gate.capacity == 1


def test_synchronous_admits_one_step_only() -> None:
    gate = AdmissionGate(max_staleness=0, batch_groups=3)
    for _ in range(3):
        gate.on_admitted(), gate.on_accepted()
    assert not gate.can_admit()
    gate.on_version(1)
    assert gate.capacity == 3


def test_nothing_starts_that_no_step_would_use() -> None:
    gate = AdmissionGate(max_staleness=4, batch_groups=2, steps=2)
    for _ in range(4):
        gate.on_admitted()
    assert not gate.can_admit()
    gate.on_rejected()  # but a lost group is replaced
    assert gate.capacity == 1
    gate.on_admitted(), gate.on_version(1)
    assert not gate.can_admit()


class Run(RuleBasedStateMachine):
    """A trainer that uses groups in the order of admission, and pushes every `every` steps.

    Groups finish, are filtered, fail and are dropped in any order, and the run crashes at any
    moment, also between two pushes. A server that returns makes the trainer push early. Each live
    group is [version at admission, finished?], oldest first.
    """

    @initialize(
        spare=st.integers(0, 4),
        every=st.integers(1, 8),
        batch=st.integers(1, 4),
        steps=st.none() | st.integers(1, 12),
        fresh=st.booleans(),
    )
    def begin(self, spare: int, every: int, batch: int, steps: int | None, fresh: bool) -> None:
        self.eta, self.every, self.batch, self.steps = every - 1 + spare, every, batch, steps
        self.fresh = fresh
        self.step = 0
        self.gate = self.new_gate()
        self.live: list[list] = []
        self.used = 0
        self.submitted = 0

    def new_gate(self) -> AdmissionGate:
        return AdmissionGate(
            max_staleness=self.eta, batch_groups=self.batch, steps=self.steps, fresh=self.fresh
        )

    def running(self) -> list[int]:
        return [i for i, (_, finished) in enumerate(self.live) if not finished]

    def finished(self) -> list[int]:
        return [i for i, (_, finished) in enumerate(self.live) if finished]

    @precondition(lambda self: self.gate.can_admit())
    @rule(count=st.integers(1, 12))
    def submit(self, count: int) -> None:
        for _ in range(min(count, self.gate.capacity)):
            self.gate.on_admitted()
            self.live.append([self.gate.version, False])
            self.submitted += 1

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def finish(self, data) -> None:
        self.live[data.draw(st.sampled_from(self.running()))][1] = True
        self.gate.on_accepted()

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def filter_or_fail(self, data) -> None:
        capacity = self.gate.capacity
        del self.live[data.draw(st.sampled_from(self.running()))]
        self.gate.on_rejected()
        assert self.gate.capacity == capacity + 1

    @precondition(
        lambda self: (
            len(self.live) >= self.batch
            and all(finished for _, finished in self.live[: self.batch])
        )
    )
    @rule()
    def train(self) -> None:
        batch, self.live = self.live[: self.batch], self.live[self.batch :]
        assert all(self.step - born <= self.eta for born, _ in batch)
        self.used += self.batch
        self.step += 1
        if self.step % self.every == 0 or self.step == self.steps:
            self.gate.on_version(self.step)
        else:
            self.gate.on_step(self.step)

    @rule()
    def push_early(self) -> None:
        self.gate.on_version(self.step)

    @rule()
    def crash_and_recover(self) -> None:
        self.live = [group for group in self.live if group[1]]
        self.gate = self.new_gate()
        self.gate.recover(self.step, self.step, len(self.live))
        self.submitted = self.used + len(self.live)

    @invariant()
    def nothing_leaks(self) -> None:
        gate = self.gate
        assert gate.running + gate.accepted + gate.rejected == self.submitted
        assert gate.running == len(self.running())
        assert self.gate.accepted == self.used + len(self.finished())
        assert self.gate.waiting == len(self.finished())
        assert 0 <= self.step - self.gate.version < self.every
        assert self.used + len(self.live) <= (self.eta + self.gate.version + 1) * self.batch
        assert 0 <= self.gate.lead <= self.eta * self.batch

    @invariant()
    def something_can_happen(self) -> None:
        over = self.step == self.steps
        assert over or self.gate.can_admit() or self.running() or len(self.finished()) >= self.batch
        assert not (over and self.gate.can_admit())


TestRun = Run.TestCase
TestRun.settings = settings(deadline=None, max_examples=60, stateful_step_count=60)


def test_nothing_is_admitted_between_two_pushes() -> None:
    gate = AdmissionGate(max_staleness=2, batch_groups=1)
    for _ in range(3):
        gate.on_admitted(), gate.on_accepted()
    gate.on_step(1)
    assert gate.capacity == 0 and gate.waiting == 2, "a new group would be of version 0 at step 3"
    gate.on_version(2)
    assert gate.capacity == 2 and gate.waiting == 1


def test_without_a_bound_generation_never_waits() -> None:
    gate = AdmissionGate(max_staleness=None, batch_groups=2, steps=1)
    for _ in range(100):
        gate.on_admitted()
    assert gate.can_admit()


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 30))
def test_a_run_of_failures_returns_all_capacity(eta: int, batch: int, failures: int) -> None:
    gate = AdmissionGate(max_staleness=eta, batch_groups=batch)
    capacity = gate.capacity
    for _ in range(failures):
        gate.on_admitted(), gate.on_rejected()
    assert gate.capacity == capacity and gate.rejected == failures


def play(
    gate: AdmissionGate, latency: Callable[[], float], steps: int, fixed: int | None = None
) -> tuple[list[float], list[float]]:
    """Train `steps` steps of one second, with groups that take latency() seconds.

    `fixed`: the groups by which admission runs ahead, in place of what the gate learns. Returns how
    long the trainer waited for each batch, and the mean lead of each batch's admissions, in steps.
    """
    now, running, waits, ages = 0.0, [], [], []
    born: list[int] = []
    for step in range(steps):
        if step:
            gate.on_version(step)
        if fixed is not None:
            gate.late = fixed - gate.batch_groups
        while gate.can_admit():
            gate.on_admitted()
            heapq.heappush(running, (now + latency(), step))
        asked = now
        while gate.waiting < gate.batch_groups:
            finished, version = heapq.heappop(running)
            gate.on_accepted()
            born.append(version)
            now = max(now, finished)
        waits.append(now - asked)
        batch, born = born[: gate.batch_groups], born[gate.batch_groups :]
        ages.append(float(np.mean([step - version for version in batch])))
        now += 1.0
        while running and running[0][0] <= now:
            born.append(heapq.heappop(running)[1])
            gate.on_accepted()
    return waits, ages


@given(st.floats(0.01, 3.9), st.integers(1, 5), st.integers(4, 7))
def test_a_fresh_gate_finds_the_least_lead_at_which_the_trainer_does_not_wait(
    latency: float, batch: int, eta: int
) -> None:
    def waits(fixed: int | None) -> float:
        gate = AdmissionGate(max_staleness=eta, batch_groups=batch, fresh=True)
        return sum(play(gate, lambda: latency, 40, fixed)[0][20:])

    gate = AdmissionGate(max_staleness=eta, batch_groups=batch, fresh=True)
    assert sum(play(gate, lambda: latency, 150)[0][20:]) == 0.0
    least = next(lead for lead in range(batch, eta * batch + 1) if waits(lead) == 0.0)
    assert gate.lead == least


@pytest.mark.parametrize("tail", [0.3, 0.8, 1.3])
@pytest.mark.parametrize("seed", range(3))
def test_with_a_tail_of_latencies_fresh_groups_are_fresher_and_hardly_awaited(tail, seed) -> None:
    found = {}
    for fresh in (False, True):
        draws = np.random.default_rng(seed)
        gate = AdmissionGate(max_staleness=8, batch_groups=16, fresh=fresh)
        waits, ages = play(gate, lambda draws=draws: 0.5 * draws.lognormal(0.0, tail), 400)
        found[fresh] = np.mean(waits[50:]), np.mean(ages[50:])
    assert found[True][0] < found[False][0] + 0.02
    assert found[True][1] < 0.5 * found[False][1]


def test_where_servers_are_slower_a_fresh_gate_becomes_an_eager_one() -> None:
    """One group finishes at a time: a batch takes two seconds, and a step one."""
    gates = [AdmissionGate(max_staleness=4, batch_groups=8, fresh=fresh) for fresh in (True, False)]
    for gate in gates:
        for step in range(12):
            if step:
                gate.on_version(step)
            while gate.can_admit():
                gate.on_admitted()
            for _ in range(8):
                gate.on_accepted()
    assert gates[0].lead == gates[1].lead == 32
    assert gates[0].running == gates[1].running


def test_a_fresh_gate_forgets_from_its_bound_on_when_servers_are_fast_again() -> None:
    """31 of 32 groups are late, and 16 from now on: the lead is below its bound a few steps on."""
    gate = AdmissionGate(max_staleness=4, batch_groups=8, fresh=True)
    leads = []
    for step in range(1, 8):
        while gate.can_admit():
            gate.on_admitted()
        while gate.running > (31 if step < 4 else 16):
            gate.on_accepted()
        gate.on_version(step)
        while gate.waiting < 8:  # the trainer waits for its batch
            gate.on_accepted()
        leads.append(gate.lead)
    assert leads[2] == 32 and leads[-1] < 32

"""Windowed first in, first out: how far groups pass a slow one, and how old a token can get."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal_lite.config import BufferConfig, TrainConfig, TrainerConfig
from areal_lite.controller.buffer import AdmissionGate, GroupQueue
from tests.unit.controller.test_queue import group


def put(queue: GroupQueue, *group_ids: int) -> None:
    for group_id in group_ids:
        queue.put(group(group_id, [0]))


def take(queue: GroupQueue, count: int, running: int | None) -> list[int] | None:
    batch = queue.take(count, 0, 1, running)
    return batch.group_ids if batch else None


def test_the_docstring_example() -> None:
    queue = GroupQueue(3, window=6)
    put(queue, 0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12)
    assert take(queue, 4, running=5) == [0, 1, 2, 3]
    assert take(queue, 4, running=5) == [4, 6, 7, 8]
    assert queue.held_back(4, 5) and take(queue, 4, running=5) is None
    put(queue, 5)
    assert not queue.held_back(4, 13) and take(queue, 4, running=13) == [5, 9, 10, 11]


def test_without_a_window_any_number_may_pass() -> None:
    queue = GroupQueue(3)
    put(queue, *range(1, 9))
    assert queue.take(4, 0, 1, 0).passed == 4 and queue.take(4, 0, 1, 0).passed == 8


def test_a_window_of_0_is_strict_order() -> None:
    queue = GroupQueue(3, window=0)
    put(queue, 0, 1, 3)
    assert take(queue, 3, running=2) is None and take(queue, 2, running=2) == [0, 1]
    assert take(queue, 1, running=2) is None and take(queue, 1, running=None) == [3]


def test_a_group_that_fails_is_waited_for_no_longer() -> None:
    queue = GroupQueue(3, window=1)
    put(queue, 1, 2)
    assert take(queue, 2, running=0) is None
    # Group 0 is filtered. The next oldest one is younger than the batch.
    assert take(queue, 2, running=3) == [1, 2]


def test_too_few_groups_are_not_held_back() -> None:
    queue = GroupQueue(3, window=0)
    put(queue, 1)
    assert not queue.held_back(2, 0) and queue.held_back(1, 0)


def test_a_batch_that_cannot_be_dealt_passes_nothing() -> None:
    queue = GroupQueue(3, window=3)
    put(queue, 1, 2, 3)
    with pytest.raises(ValueError, match="cannot be divided equally"):
        queue.take(3, 0, 2, 0)
    assert take(queue, 3, running=0) == [1, 2, 3]


@given(st.integers(0, 9), st.integers(0, 40), st.integers(1, 8))
def test_the_lead_is_the_bound_less_the_steps_of_the_window(
    bound: int, window: int, batch: int
) -> None:
    buffer = BufferConfig(max_staleness=bound, window=window)
    config = TrainConfig(model="m", buffer=buffer, trainer=TrainerConfig(batch_groups=batch))
    steps = bound - config.max_lead
    assert steps * batch >= window > (steps - 1) * batch
    config.buffer.window = None
    assert config.max_lead == bound


class Run(RuleBasedStateMachine):
    """The real queue and the real admission, with a trainer that pushes every `every` steps.

    Groups finish, are filtered and fail in any order. The run crashes at any moment and resumes
    from its newest checkpoint. `live` has the version at the start of each group that no step has
    used, `used` what each step used.
    """

    @initialize(
        spare=st.integers(0, 2),
        every=st.integers(1, 3),
        batch=st.integers(1, 3),
        window=st.integers(0, 7),
    )
    def begin(self, spare: int, every: int, batch: int, window: int) -> None:
        self.every, self.batch, self.window = every, batch, window
        self.eta = every - 1 + spare
        self.bound = self.eta + -(-window // batch)
        self.step = self.saved = self.next_id = 0
        self.live: dict[int, int] = {}
        self.running: set[int] = set()
        self.used: list[dict[int, int]] = []
        self.passed: dict[int, set[int]] = {}
        self.start()

    def start(self) -> None:
        """Begin, or resume, a process: what runs is lost, what is finished waits."""
        for group_id in self.running:
            del self.live[group_id]
        self.running.clear()
        self.queue = GroupQueue(self.bound, self.window)
        self.gate = AdmissionGate(max_staleness=self.eta, batch_groups=self.batch)
        self.gate.recover(self.step, self.step, len(self.live))
        for group_id, version in self.live.items():
            self.queue.put(group(group_id, [version]))

    def admit(self, count: float) -> None:
        for _ in range(int(min(count, self.gate.capacity))):
            self.gate.on_admitted()
            self.live[self.next_id] = self.gate.version
            self.running.add(self.next_id)
            self.passed[self.next_id] = set()
            self.next_id += 1

    def end(self, group_id: int) -> None:
        self.running.remove(group_id)
        self.gate.on_accepted()
        # The worst case: it never saw another version than that at its start.
        self.queue.put(group(group_id, [self.live[group_id]]))

    @rule(count=st.integers(1, 6))
    def submit(self, count: int) -> None:
        self.admit(count)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.running))))

    @precondition(lambda self: self.gate.can_admit())
    @rule(steps=st.integers(1, 12))
    def leave_one_behind(self, steps: int) -> None:
        """The last group that may start is slow; all others finish at once while steps go on."""
        self.admit(self.gate.capacity)
        slow = max(self.running)
        for _ in range(steps):
            for group_id in sorted(self.running - {slow}):
                self.end(group_id)
            self.step_if_ready()
            self.admit(self.gate.capacity)
        self.end(slow)
        while self.step_if_ready():
            pass

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def reject(self, data) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(group_id)
        del self.live[group_id]
        self.gate.on_rejected()

    @rule()
    def train(self) -> None:
        self.step_if_ready()

    def step_if_ready(self) -> bool:
        """Train on the next batch; return whether there was one."""
        oldest = min(self.running, default=None)
        batch = self.queue.take(self.batch, self.step, 1, oldest)
        finished = sorted(self.live.keys() - self.running)
        if batch is None:
            enough = len(finished) >= self.batch
            assert self.queue.held_back(self.batch, oldest) == enough
            assert not enough or oldest is not None, "it waits for nothing"
            return False
        assert batch.group_ids == finished[: self.batch], "the oldest ones, each once"
        assert batch.masked_tokens == 0
        versions = {group_id: self.live.pop(group_id) for group_id in batch.group_ids}
        assert all(self.step - version <= self.bound for version in versions.values())
        for group_id in self.live:
            self.passed[group_id] |= {i for i in versions if i > group_id}
        assert batch.passed == max((len(self.passed[i]) for i in self.running), default=0)
        self.used.append(versions)
        self.step += 1
        if self.step % self.every:
            self.gate.on_step(self.step)
        else:
            self.gate.on_version(self.step)
        return True

    @rule()
    def save(self) -> None:
        self.saved = self.step

    @rule()
    def crash_and_resume(self) -> None:
        """Go back to the checkpoint; what later weights sampled is lost with them."""
        for versions in self.used[self.saved :]:
            self.live |= versions
        del self.used[self.saved :]
        self.step = self.saved
        lost = {i for i, version in self.live.items() if version > self.saved} - self.running
        for group_id in lost:
            del self.live[group_id]
        self.passed = {i: {j for j in ids if j not in self.live} for i, ids in self.passed.items()}
        self.start()

    @invariant()
    def no_group_is_passed_by_more_than_the_window(self) -> None:
        assert all(len(self.passed[group_id]) <= self.window for group_id in self.live)

    @invariant()
    def something_can_happen(self) -> None:
        waiting = len(self.live) - len(self.running)
        assert self.gate.can_admit() or self.running or waiting >= self.batch


TestRun = Run.TestCase
TestRun.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)

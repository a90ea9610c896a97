"""Admission by maximum staleness."""

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.rollout.staleness import Staleness


def test_the_docstring_example() -> None:
    gate = Staleness(max_staleness=1, batch_groups=2)
    for _ in range(4):
        gate.admit()
    assert not gate.can_admit()
    gate.accept(), gate.accept()
    assert not gate.can_admit()  # waiting or used: both count
    gate.bump(1)
    assert gate.room == 2
    gate.admit(), gate.admit()
    gate.reject()
    assert gate.room == 1


def test_synchronous_admits_one_step_only() -> None:
    gate = Staleness(max_staleness=0, batch_groups=3)
    for _ in range(3):
        gate.admit(), gate.accept()
    assert not gate.can_admit()
    gate.bump(1)
    assert gate.room == 3


def test_nothing_starts_that_no_step_would_use() -> None:
    gate = Staleness(max_staleness=4, batch_groups=2, steps=2)
    for _ in range(4):
        gate.admit()
    assert not gate.can_admit()
    gate.reject()  # but a lost group is replaced
    assert gate.room == 1
    gate.admit(), gate.bump(1)
    assert not gate.can_admit()


@pytest.mark.parametrize("arguments", [(-1, 4), (0, 0)])
def test_bad_settings_are_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(ValueError):
        Staleness(*arguments)


@given(st.integers(0, 4), st.integers(1, 5), st.integers(0, 2**32), st.booleans())
@settings(deadline=None, max_examples=100)
def test_in_order_consumption_is_never_staler_than_the_bound(eta: int, batch: int, seed: int, losses: bool) -> None:
    """A consumer that uses groups in the order of admission, against random speeds, failures and drops."""
    rng = random.Random(seed)
    gate = Staleness(eta, batch)
    born: deque[int] = deque()  # version at admission, oldest first, of running and waiting groups
    finished = used = 0
    for _ in range(400):
        choices = []
        if gate.can_admit():
            choices.append("admit")
        if gate.running:
            choices += ["accept", "reject"] if losses else ["accept"]
        if finished and losses:
            choices.append("revoke")
        if finished >= batch:
            choices.append("train")
        assert choices, "dead-lock: nothing can happen any more"
        match rng.choice(choices):
            case "admit":
                gate.admit()
                born.append(gate.version)
            case "accept":  # the first `finished` of `born` have finished: in order
                gate.accept()
                finished += 1
            case "reject":
                gate.reject()
                del born[finished]
            case "revoke":
                gate.revoke()
                del born[rng.randrange(finished)]
                finished -= 1
            case "train":
                for _ in range(batch):
                    assert gate.version - born.popleft() <= eta
                finished, used = finished - batch, used + batch
                gate.bump(gate.version + 1)
        assert gate.running + gate.accepted == len(born) + used  # nothing leaks
        assert gate.running + gate.accepted <= (eta + gate.version + 1) * batch


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 30))
def test_a_run_of_failures_gives_all_room_back(eta: int, batch: int, failures: int) -> None:
    gate = Staleness(eta, batch)
    room = gate.room
    for _ in range(failures):
        gate.admit(), gate.reject()
        gate.admit(), gate.accept(), gate.revoke()
    assert gate.room == room and gate.rejected == 2 * failures

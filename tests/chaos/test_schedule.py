"""The schedules of the chaos runs, without a run."""

from collections import Counter

import pytest

from tests.chaos.schedule import (
    ALL_KINDS,
    CONTROLLER,
    END,
    JUMP,
    KILL,
    OF_THE_WORLD,
    REPLACED_AFTER_S,
    SERVER_PARTS,
    STOP,
    SUPERVISOR,
    TARGETS,
    TRAINER,
    long_schedule,
    short_schedule,
)
from tests.chaos.test_chaos import LONG_FAULTS, LONG_SEEDS, LONG_STEPS, SHORT_STEPS


@pytest.mark.parametrize("seed", range(20))
def test_a_short_schedule_has_fourteen_faults_of_as_many_kinds(seed: int) -> None:
    faults = short_schedule(seed, SHORT_STEPS)
    assert faults == short_schedule(seed, SHORT_STEPS)
    kinds = Counter(fault.kind for fault in faults)
    assert len(faults) == len(kinds) == 14 and set(kinds) <= set(ALL_KINDS)
    assert {kind.target for kind in kinds if kind.action == STOP} == set(TARGETS)
    assert {kind.target for kind in OF_THE_WORLD} <= {kind.target for kind in kinds}
    harsh = [kind for kind in kinds if kind.action in (KILL, END)]
    assert sum(kind.target in SERVER_PARTS for kind in harsh) == 1
    assert sum(kind.target == SUPERVISOR for kind in harsh) == 1


def test_seeds_differ_and_cover_each_kind() -> None:
    schedules = [short_schedule(seed, SHORT_STEPS) for seed in range(20)]
    assert len({tuple(faults) for faults in schedules}) == 20
    assert {fault.kind for faults in schedules for fault in faults} == set(ALL_KINDS)
    assert {(fault.server, fault.in_push) for faults in schedules for fault in faults} == {
        (server, in_push) for server in (0, 1) for in_push in (False, True)
    }


def test_faults_come_in_order_and_before_the_end_of_the_run() -> None:
    for seed in range(20):
        for faults, steps in (
            (short_schedule(seed, SHORT_STEPS), SHORT_STEPS),
            (long_schedule(seed, LONG_STEPS, LONG_FAULTS), LONG_STEPS),
        ):
            at = [fault.step for fault in faults]
            assert at == sorted(at) and 1 <= at[0] and at[-1] <= steps - len(faults)
            assert all(fault.seconds > 0 or fault.kind.action == JUMP for fault in faults)


def test_the_long_runs_have_a_hundred_faults_of_every_kind() -> None:
    schedules = [long_schedule(seed, LONG_STEPS, LONG_FAULTS) for seed in LONG_SEEDS]
    assert sum(len(faults) for faults in schedules) >= 100
    assert all({fault.kind for fault in faults} == set(ALL_KINDS) for faults in schedules)
    replaced = [
        fault
        for faults in schedules
        for fault in faults
        if fault.kind.action == STOP
        and fault.kind.target in (CONTROLLER, TRAINER)
        and fault.seconds > REPLACED_AFTER_S
    ]
    assert replaced

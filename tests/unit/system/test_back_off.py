"""The wait before a restart: it doubles up to its limit, for any number of restarts."""

import pytest

from areal_lite.system.processes import LONGEST_BACK_OFF_S, back_off_s


@pytest.mark.parametrize(
    ("restarts", "wait_s"),
    [(1, 1), (2, 2), (6, 32), (7, LONGEST_BACK_OFF_S), (1_000_000, LONGEST_BACK_OFF_S)],
)
def test_the_wait_doubles_up_to_the_longest(restarts: int, wait_s: float) -> None:
    assert back_off_s(restarts) == wait_s

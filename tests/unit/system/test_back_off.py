"""The wait before a restart: none at first, then it doubles up to its limit."""

import pytest

from areal_lite.system.processes import LONGEST_BACK_OFF_S, back_off_s


@pytest.mark.parametrize(
    ("failures", "wait_s"),
    [(0, 0), (1, 0), (2, 1), (3, 2), (7, 32), (8, LONGEST_BACK_OFF_S), (10**6, LONGEST_BACK_OFF_S)],
)
def test_the_wait_doubles_up_to_the_longest(failures: int, wait_s: float) -> None:
    assert back_off_s(failures) == wait_s

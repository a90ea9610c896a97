"""The numbers of a recovery, from the ends of steps."""

import random

import pytest

from benchmarks.recovery import FAULTS, SLOWER, WINDOW, full_speed, next_step, summary, table


def test_the_next_step_is_the_first_to_end_after_the_fault() -> None:
    assert next_step([1.0, 2.0, 4.5, 5.0], 2.0) == 2.5
    assert next_step([1.0, 2.0], 2.0) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_speed_is_full_after_the_first_fast_steps_that_end_after_the_fault(seed: int) -> None:
    draw = random.Random(seed)
    times = [draw.choice((0.9, 1.0, 1.3)) for _ in range(60)]
    ends = [sum(times[: number + 1]) for number in range(len(times))]
    at = draw.uniform(5, 20)
    expected = None
    for number in range(WINDOW, len(times)):  # the last of the steps
        steps = range(number - WINDOW + 1, number + 1)
        after = all(ends[step] > at for step in steps)
        if after and sum(times[step] for step in steps) <= WINDOW * SLOWER and expected is None:
            expected = ends[number] - at
    assert full_speed(ends, at, 1.0) == expected


def test_a_slow_step_delays_the_full_speed() -> None:
    ends = [1.0, 2.0, 3.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0]
    assert full_speed(ends, 2.5, 1.0) == 14.0 - 2.5
    assert full_speed(ends[:-1], 2.5, 1.0) is None


def test_the_table_has_a_row_for_each_fault() -> None:
    measured = {"usual": 1.0, "next_step": 2.0, "full_speed": 7.0, "servers": None}
    records = [{"fault": name, **measured} for name in FAULTS for _ in range(3)]
    records += [{"fault": "nothing", **measured, "next_step": 4.0}]
    found = summary(records)
    assert found["nothing"] == {"next_step": [2.0, 3.7], "full_speed": [7.0, 7.0]}
    page = table(
        {
            "now": {
                **dict.fromkeys(("rounds", "cores", "load_before"), 3),
                "summary": found,
                "records": records,
            }
        }
    )
    assert "| nothing | 2.0 / 3.7 | 7.0 / 7.0 |  |" in page and page.count("\n| ") == 1 + len(
        FAULTS
    )

"""Restarts after failures of controller or trainer, as a function of the failures."""

import pytest

from areal_lite.launch.local import Failure, decide, error_identity

MOST = 3


def killed(at_s: float, group: str = "trainer", progressed: bool = False) -> Failure:
    return Failure(at_s=at_s, group=group, progressed=progressed)


def raised(at_s: float, error: str, progressed: bool = True) -> Failure:
    return Failure(at_s=at_s, group="trainer", error=error, progressed=progressed)


def reason(failures: list[Failure], most: int = MOST) -> str:
    decision = decide(failures, most)
    assert isinstance(decision, str)
    return decision


def test_what_was_killed_starts_again_after_growing_delays_until_the_budget_is_spent() -> None:
    failures = [killed(float(second)) for second in range(4)]
    decisions = [decide(failures[: n + 1], MOST) for n in range(3)]
    assert decisions == [(0.0, 1), (1.0, 2), (2.0, 3)]
    assert reason(failures) == "there were 3 restarts within an hour (restart.max)"


def test_only_failures_of_one_kind_in_a_row_without_progress_delay_a_restart() -> None:
    trainer, controller = killed(0.0), killed(1.0, "controller")
    assert decide([trainer, controller], MOST) == (0.0, 2)
    assert decide([trainer, controller, killed(2.0)], MOST) == (1.0, 3)
    assert decide([trainer, killed(1.0, progressed=True)], MOST) == (0.0, 2)
    assert decide([trainer, raised(1.0, "a"), killed(2.0)], MOST) == (0.0, 3)


def test_the_delay_is_at_most_a_minute() -> None:
    failures = [killed(float(second)) for second in range(20)]
    assert decide(failures, 1000) == (60.0, 20)


def test_failures_before_the_window_do_not_count() -> None:
    failures = [killed(0.0), killed(1.0), killed(2.0)]
    assert decide([*failures, killed(3602.0)], MOST) == (1.0, 2)
    assert "3 restarts" in reason([*failures, killed(3600.0)])


def test_an_error_before_the_first_step_ends_the_run() -> None:
    assert "no step was completed" in reason([raised(0.0, "bad", progressed=False)])
    assert "no step was completed" in reason([killed(0.0), raised(9.0, "bad", progressed=False)])


def test_an_error_starts_again_once() -> None:
    assert decide([raised(0.0, "a")], MOST) == (0.0, 1)
    assert decide([raised(0.0, "a"), raised(1.0, "b")], MOST) == (0.0, 2)
    assert "same error" in reason([raised(0.0, "a"), killed(1.0), raised(2.0, "a")])
    assert decide([raised(0.0, "a"), raised(3601.0, "a")], MOST) == (0.0, 1)


def test_without_a_budget_nothing_starts_again() -> None:
    assert "restart.max=0" in reason([killed(0.0)], 0)


TRACEBACK = """
Traceback (most recent call last):
  File "/a/loop.py", line 7, in step
    value = f(x)
  File "/a/user.py", line {line}, in f
    raise KeyError(step)
KeyError: {number}
"""


@pytest.mark.parametrize(
    "other, same",
    [
        (TRACEBACK.format(line=3, number=9), True),
        (TRACEBACK.format(line=4, number=5), False),
        (TRACEBACK.format(line=3, number=5) + "RuntimeError: other\n", False),
    ],
)
def test_two_reports_of_an_error_have_its_place_and_its_message(other: str, same: bool) -> None:
    report = "earlier line 1\n" + TRACEBACK.format(line=3, number=5)
    assert (error_identity(report) == error_identity(other)) == same


def test_a_log_without_a_traceback_is_known_by_its_last_line() -> None:
    assert error_identity("12:01 ERROR bad step 3\n\n") == error_identity("13:07 ERROR bad step 4")
    assert error_identity("") == ""

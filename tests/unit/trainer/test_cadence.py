"""Which steps end with a push, and which pushes are evaluated."""

from hypothesis import given
from hypothesis import strategies as st

from areal_lite.trainer.cadence import Cadence


def test_every_fourth_step_and_the_last_one() -> None:
    cadence = Cadence(every=4, eval_every=5, steps=18)
    steps = range(1, 19)
    assert [done for done in steps if cadence.pushes(done)] == [4, 8, 12, 16, 18]
    # Due at 5, 10 and 15. The end of training has an evaluation of its own.
    assert [done for done in steps if cadence.evaluates(done)] == [8, 12, 16]


def test_a_push_after_each_step_is_evaluated_when_it_is_due() -> None:
    cadence = Cadence(every=1, eval_every=3, steps=9)
    assert all(map(cadence.pushes, range(1, 10)))
    assert [done for done in range(1, 10) if cadence.evaluates(done)] == [3, 6]
    assert [cadence.last_evaluated(done) for done in range(10)] == [0, 0, 0, 3, 3, 3, 6, 6, 6, 6]
    never = Cadence(every=2, eval_every=0, steps=9)
    assert not any(map(never.evaluates, range(1, 10)))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 40))
def test_each_due_evaluation_is_made_once_at_the_next_push(
    every: int, eval_every: int, steps: int
) -> None:
    cadence = Cadence(every=every, eval_every=eval_every, steps=steps)
    pushes = [done for done in range(1, steps + 1) if cadence.pushes(done)]
    due = range(eval_every, steps, eval_every)
    expected = {next(push for push in pushes if push >= step) for step in due} - {steps}
    assert {done for done in range(1, steps + 1) if cadence.evaluates(done)} == expected
